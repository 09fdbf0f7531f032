"""Which of several equal copies writes a tensor: each once, all copies in turn.

Pure arithmetic on the placement table, so every rank knows its part without asking. Whole tensors
are given out, the largest first to the copy that has least: within 5 % of even for a decoder over
up to 8 copies, with as few pieces as there are tensors. Rejected: cutting each tensor by copies,
which is even to a row but multiplies the pieces, and with them the manifest, by the copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from reparto.partition.grid import Grid
from reparto.partition.tensors import Placement, Table


def writes(table: Table, grid: Grid, rank: int) -> frozenset[str]:
    """Names of the parameters that `rank` writes, out of those that it holds.

    Among the ranks that hold an equal copy of a rectangle, exactly one writes it. Aliases are
    written by nobody.
    """
    here = grid.coordinates(rank)
    by_axes: dict[tuple[str, ...], dict[str, int]] = {}
    for name, placement in table.items():
        if placement.held and placement.tied_to is None:
            by_axes.setdefault(_axes(placement), {})[name] = placement.held_numel
    mine: set[str] = set()
    for axes, sizes in by_axes.items():
        index = 0
        for axis in axes:
            index = index * grid.size(axis) + here[axis]
        copies = math.prod(grid.size(axis) for axis in axes)
        mine.update(name for name, copy in share_out(sizes, copies).items() if copy == index)
    return frozenset(mine)


def _axes(placement: Placement) -> tuple[str, ...]:
    return tuple(sorted(set(placement.replicated_over)))


def share_out(sizes: Mapping[str, int], copies: int) -> dict[str, int]:
    """name -> the one of `copies` that writes it; all copies compute the same answer."""
    load = [0] * copies
    chosen: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda one: (-one[1], one[0])):
        chosen[name] = min(range(copies), key=lambda index: (load[index], index))
        load[chosen[name]] += size
    return chosen
