"""Who holds which part of every parameter: the one table that all stages read.

A `Placement` says, for one rank and one parameter of the model, which rectangles of the global
tensor the rank keeps, along which axes equal copies exist, and along which axes its gradient is
only a part of the sum. Strategies do not hang anything on tensors; each returns a new table.
Initialisation, weight decay, clipping, reduction, checkpoints and `verify` read this table only.

Rows are cut in contiguous runs whose lengths differ by at most one, the longer runs first, so a
shard is always a rectangle of the global tensor, whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Rectangle:
    """A box of a tensor: first index and size along every dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Rectangle:
        return cls(start=(0,) * len(shape), size=shape)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.start, self.size, strict=True))

    def narrow(self, dim: int, start: int, size: int) -> Rectangle:
        """The part [start, start + size) of this box along `dim`, from its own edge."""
        if start < 0 or size < 0 or start + size > self.size[dim]:
            raise IndexError(f"[{start}, {start + size}) of {self.size[dim]} along dim {dim}")
        starts, sizes = list(self.start), list(self.size)
        starts[dim] += start
        sizes[dim] = size
        return Rectangle(start=tuple(starts), size=tuple(sizes))

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """The common box, or None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        if any(extent <= 0 for extent in size):
            return None
        return Rectangle(start=start, size=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What one rank holds of one parameter."""

    name: str
    "global name, as in the unsplit model"
    shape: tuple[int, ...]
    "global shape"
    held: tuple[Rectangle, ...]
    "rectangles of the global tensor that this rank keeps; empty if it keeps none"
    replicated_over: tuple[str, ...] = ()
    "axes along which other ranks keep an equal copy"
    partial_over: tuple[str, ...] = ()
    "axes along which this rank's gradient is one term of a sum"
    tied_to: str | None = None
    "the name under which the same tensor is stored, if it is an alias"
    decays: bool = True
    "whether weight decay applies"
    trainable: bool = True
    "whether it gets a gradient"

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape)

    @property
    def held_numel(self) -> int:
        """Elements this rank keeps."""
        return sum(box.numel for box in self.held)

    def with_(self, **changes: object) -> Placement:
        return replace(self, **changes)  # type: ignore[arg-type]


Table = Mapping[str, Placement]


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """`(start, size)` of run `index` when `total` items are cut in `parts` runs, longer runs first.

    >>> [split_evenly(10, 4, i) for i in range(4)]
    [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    if not 0 <= index < parts:
        raise IndexError(f"part {index} of {parts}")
    size, rest = divmod(total, parts)
    return index * size + min(index, rest), size + (index < rest)


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor as rows x columns: its first dim against all others; a scalar is 1 x 1."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def shard_rows(box: Rectangle, parts: int, index: int) -> tuple[Rectangle, ...]:
    """The rows of `box` that shard `index` of `parts` keeps; empty when there are too few rows."""
    if not box.size:  # a scalar has one row, kept by the first shard
        return (box,) if index == 0 else ()
    start, size = split_evenly(box.size[0], parts, index)
    return (box.narrow(0, start, size),) if size and box.numel else ()


def initial_table(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    decays: Mapping[str, bool],
    tied: Mapping[str, str] | None = None,
    frozen: Iterable[str] = (),
    axes: tuple[str, ...],
) -> dict[str, Placement]:
    """The table before any strategy: every rank holds everything, replicated over `axes`.

    tied    alias -> the name it is stored under
    frozen  names without a gradient
    """
    aliases = tied or {}
    without_gradient = set(frozen)
    return {
        name: Placement(
            name=name,
            shape=shape,
            held=(Rectangle.whole(shape),),
            replicated_over=axes,
            tied_to=aliases.get(name),
            decays=decays[name],
            trainable=name not in without_gradient,
        )
        for name, shape in shapes.items()
    }


def uncovered(shape: tuple[int, ...], boxes: Iterable[Rectangle]) -> int:
    """Elements of a tensor that no box covers, for boxes that do not overlap; 0 means complete."""
    return math.prod(shape) - sum(box.numel for box in boxes)
