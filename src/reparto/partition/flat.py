"""Flat memory of parameters that are reduced, gathered and updated together.

A *unit* is a list of parameters with one flat buffer. Cut for n ranks, every parameter has a *slot*
of ceil(rows / n) x columns elements in each rank's piece, at the same offset on every rank:

    piece of rank r = [slot of p0 | slot of p1 | ...]          piece_numel elements
    whole buffer    = [piece of rank 0 | piece of rank 1 | ...]   n x piece_numel elements

so one all-gather or reduce-scatter moves the whole unit, and copying one parameter in or out takes
at most two strided copies whatever n is (the first `rows mod n` ranks hold one row more). The price
is padding, less than one row per parameter and rank.

Cutting the concatenated parameters at equal element counts would need no padding, but then a shard
is no rectangle of any tensor, and a checkpoint could not be read by another layout.

With n = 1 the buffer is simply the parameters one after another, and each parameter is a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reparto.partition.tensors import rows_and_columns, split_evenly


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where one parameter lies in every piece."""

    name: str
    shape: tuple[int, ...]
    "shape of the tensor that is cut: the global one, or what a tensor-parallel rank holds of it"
    offset: int
    "first element in a piece"
    numel: int
    "elements reserved in a piece, padding included"

    @property
    def rows(self) -> int:
        return rows_and_columns(self.shape)[0]

    @property
    def columns(self) -> int:
        return rows_and_columns(self.shape)[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One strided copy: `count` ranks from `first_rank`, each with `rows` rows from `first_row`."""

    first_rank: int
    count: int
    first_row: int
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatLayout:
    """The slots of one unit for `num_shards` ranks."""

    num_shards: int
    slots: tuple[Slot, ...]
    piece_numel: int
    "elements of one rank's piece"

    @property
    def whole_numel(self) -> int:
        return self.num_shards * self.piece_numel

    def runs(self, slot: Slot) -> tuple[Run, ...]:
        """The one or two strided copies that move `slot` between tensor and buffer."""
        size, rest = divmod(slot.rows, self.num_shards)
        runs = []
        if rest:
            runs.append(Run(first_rank=0, count=rest, first_row=0, rows=size + 1))
        if size:
            runs.append(
                Run(
                    first_rank=rest,
                    count=self.num_shards - rest,
                    first_row=rest * (size + 1),
                    rows=size,
                )
            )
        return tuple(runs)

    def rows_of(self, slot: Slot, shard: int) -> tuple[int, int]:
        """`(first row, rows)` of `slot` that `shard` keeps."""
        return split_evenly(slot.rows, self.num_shards, shard)


def flat_layout(shapes: Mapping[str, tuple[int, ...]], *, num_shards: int) -> FlatLayout:
    """Lay `shapes` out for `num_shards` ranks, in the given order."""
    slots: list[Slot] = []
    offset = 0
    for name, shape in shapes.items():
        rows, columns = rows_and_columns(shape)
        numel = -(-rows // num_shards) * columns
        slots.append(Slot(name=name, shape=shape, offset=offset, numel=numel))
        offset += numel
    return FlatLayout(num_shards=num_shards, slots=tuple(slots), piece_numel=offset)


def buckets(numels: Sequence[int], *, element_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Indices of parameters, last first, in runs of about `bucket_bytes`.

    Backward makes gradients roughly in the reverse order of the model, so the first bucket to be
    full is the one of the last layers, and its reduction overlaps the rest of backward. A bucket is
    closed when it has reached `bucket_bytes`; a parameter is never cut.
    """
    found: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(numels))):
        if not found or filled >= bucket_bytes:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += numels[index] * element_bytes
    return found
