"""Whether boxes tile a tensor exactly: no gap, no overlap, nothing outside. Pure arithmetic.

Every box is turned into signed corners, the way a step function is turned into its jumps: a corner
counts +1 if it takes an even number of `stop` edges, else -1. Two sums of boxes are equal
everywhere if and only if their corner counts are equal, so "the pieces cover each element exactly
once" is: the corners of all pieces add up to the corners of the whole tensor.

That costs n * 2^d for n pieces of d dims. Rejected: comparing all pairs, which is n^2 and lets a
hostile list of 100,000 pieces occupy a reader for hours; and adding up volumes only, which takes
one overlap and one gap of the same size for a tiling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from reparto.partition.tensors import Rectangle

#: pairs looked at to name an overlap in an error; the verdict itself needs no pairs
_PAIRS_FOR_MESSAGE = 200_000


def tiles(shape: tuple[int, ...], boxes: Sequence[Rectangle]) -> bool:
    """Whether `boxes` cover every element of a tensor of `shape` exactly once."""
    whole = Rectangle.whole(shape)
    if len(boxes) == 1:
        return boxes[0] == whole
    jumps: dict[tuple[int, ...], int] = {}
    _add_corners(jumps, whole, 1)
    for box in boxes:
        if len(box.start) != len(shape) or len(box.size) != len(shape):
            return False
        _add_corners(jumps, box, -1)
    return not any(jumps.values())


def _add_corners(jumps: dict[tuple[int, ...], int], box: Rectangle, weight: int) -> None:
    corners: list[tuple[tuple[int, ...], int]] = [((), weight)]
    for start, size in zip(box.start, box.size, strict=True):
        corners = [
            ((*corner, edge), sign * side)
            for corner, sign in corners
            for edge, side in ((start, 1), (start + size, -1))
        ]
    for corner, sign in corners:
        jumps[corner] = jumps.get(corner, 0) + sign


def why_not_tiled(shape: tuple[int, ...], boxes: Sequence[Rectangle]) -> str:
    """In words, for boxes that do not tile: what is outside, doubled or missing."""
    whole = Rectangle.whole(shape)
    for box in boxes:
        if {len(box.size), len(box.start)} != {len(shape)}:
            return f"piece {describe(box)} has other dims than the tensor, which has {len(shape)}"
        if any(size < 1 for size in box.size) or whole.intersect(box) != box:
            return f"piece {describe(box)} does not lie inside shape {list(shape)}"
    pairs = itertools.islice(itertools.combinations(boxes, 2), _PAIRS_FOR_MESSAGE)
    for one, other in pairs:
        if not shape or one.intersect(other) is not None:
            return f"pieces {describe(one)} and {describe(other)} overlap"
    missing = math.prod(shape) - sum(box.numel for box in boxes)
    if missing > 0:
        return f"{missing} of {math.prod(shape)} elements are in no piece"
    return "pieces overlap"


def describe(box: Rectangle) -> str:
    """`[0:4, 2:3]`, as one would index the tensor."""
    return "[" + ", ".join(f"{a}:{a + b}" for a, b in zip(box.start, box.size, strict=False)) + "]"
