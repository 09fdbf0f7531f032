"""Flat memory of a unit: slots cover every element once, runs move every row, buckets take all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.parallel.flat import copy_in, copy_out, cut_rows, keeps_any, own_rows
from reparto.partition.flat import FlatLayout, Slot, buckets, flat_layout
from reparto.partition.tensors import Rectangle, shard_rows

shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
units = st.lists(shapes, min_size=1, max_size=5).map(
    lambda found: {f"p{index}": shape for index, shape in enumerate(found)}
)
shard_counts = st.integers(1, 7)


def numbered(shape: tuple[int, ...], first: int) -> torch.Tensor:
    """A tensor whose every element is different, also from those of other tensors."""
    return torch.arange(first, first + math.prod(shape), dtype=torch.float64).reshape(shape)


def rows_of_runs(layout: FlatLayout, slot: Slot) -> list[tuple[int, int]]:
    """(rank, row) of every row that the strided copies move."""
    return [
        (run.first_rank + place, run.first_row + place * run.rows + row)
        for run in layout.runs(slot)
        for place in range(run.count)
        for row in range(run.rows)
    ]


@settings(deadline=None)
@given(units, shard_counts)
def test_slots_lie_one_after_another_and_waste_less_than_a_row_a_rank(
    unit: dict[str, tuple[int, ...]], shards: int
) -> None:
    layout = flat_layout(unit, num_shards=shards)
    assert [slot.name for slot in layout.slots] == list(unit)
    offset = 0
    for slot in layout.slots:
        assert slot.offset == offset
        natural = math.prod(unit[slot.name])
        assert slot.rows * slot.columns == natural
        padding = slot.numel * shards - natural
        assert 0 <= padding < slot.columns * shards
        offset += slot.numel
    assert layout.piece_numel == offset
    assert layout.whole_numel == offset * shards


@settings(deadline=None)
@given(units, shard_counts)
def test_runs_move_every_row_once_to_the_rank_that_keeps_it(
    unit: dict[str, tuple[int, ...]], shards: int
) -> None:
    layout = flat_layout(unit, num_shards=shards)
    for slot in layout.slots:
        assert len(layout.runs(slot)) <= 2
        moved = rows_of_runs(layout, slot)
        assert sorted(row for _, row in moved) == list(range(slot.rows))
        for rank, row in moved:
            first, count = layout.rows_of(slot, rank)
            assert first <= row < first + count
        kept = [layout.rows_of(slot, rank)[1] for rank in range(shards)]
        assert sum(kept) == slot.rows and max(kept) * slot.columns <= slot.numel


@settings(deadline=None)
@given(units, shard_counts)
def test_rows_of_the_layout_are_rows_of_the_placement(
    unit: dict[str, tuple[int, ...]], shards: int
) -> None:
    """What a rank keeps in its piece is the rectangle that the placement table names."""
    layout = flat_layout(unit, num_shards=shards)
    for slot in layout.slots:
        for rank in range(shards):
            held = shard_rows(Rectangle.whole(slot.shape), shards, rank)
            first, count = layout.rows_of(slot, rank)
            assert keeps_any(layout, slot, rank) == bool(held)
            if held and slot.shape:
                assert (held[0].start[0], held[0].size[0]) == (first, count)


@settings(deadline=None, max_examples=60)
@given(units, shard_counts)
def test_what_is_copied_in_comes_out_whole_and_by_pieces(
    unit: dict[str, tuple[int, ...]], shards: int
) -> None:
    layout = flat_layout(unit, num_shards=shards)
    whole_NP = torch.full((shards, layout.piece_numel), -1.0, dtype=torch.float64)
    tensors, first = {}, 0
    for slot in layout.slots:
        tensors[slot.name] = numbered(slot.shape, first)
        first += tensors[slot.name].numel()
        copy_in(whole_NP, layout, slot, tensors[slot.name], add=False)
    for slot in layout.slots:
        back = torch.zeros(slot.shape, dtype=torch.float64)
        copy_out(back, layout, slot, whole_NP)
        assert torch.equal(back, tensors[slot.name])
        for rank in range(shards):
            if keeps_any(layout, slot, rank):
                own = own_rows(whole_NP[rank], layout, slot, rank)
                assert torch.equal(own, cut_rows(tensors[slot.name], layout, slot, rank))
    assert int((whole_NP >= 0).sum()) == first  # each element at one place; the rest is padding


@settings(deadline=None, max_examples=40)
@given(units, shard_counts)
def test_adding_adds_and_leaves_the_padding_alone(
    unit: dict[str, tuple[int, ...]], shards: int
) -> None:
    layout = flat_layout(unit, num_shards=shards)
    whole_NP = torch.zeros(shards, layout.piece_numel, dtype=torch.float64)
    for slot in layout.slots:
        for value in (1.0, 0.5):
            ones = torch.full(slot.shape, value, dtype=torch.float32)
            copy_in(whole_NP, layout, slot, ones, add=True)
    natural = sum(math.prod(shape) for shape in unit.values())
    assert whole_NP.sum().item() == 1.5 * natural
    assert int((whole_NP == 0).sum()) == whole_NP.numel() - natural


def test_one_shard_is_the_parameters_one_after_another() -> None:
    layout = flat_layout({"a": (3, 2), "b": (), "c": (4,)}, num_shards=1)
    assert [(slot.offset, slot.numel) for slot in layout.slots] == [(0, 6), (6, 1), (7, 4)]
    assert layout.whole_numel == layout.piece_numel == 11


def test_seven_rows_over_four_by_hand() -> None:
    layout = flat_layout({"w": (7, 2)}, num_shards=4)
    (slot,) = layout.slots
    assert (slot.numel, layout.piece_numel, layout.whole_numel) == (4, 4, 16)
    assert [layout.rows_of(slot, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 1)]
    whole_NP = torch.zeros(4, 4)
    copy_in(whole_NP, layout, slot, torch.arange(1.0, 15.0).reshape(7, 2), add=False)
    assert whole_NP.tolist() == [
        [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 0, 0],
    ]  # fmt: skip


# --- buckets -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=20), st.sampled_from([2, 4, 8]), st.integers(1, 400))
def test_buckets_take_every_parameter_once_from_the_end(
    numels: list[int], element_bytes: int, bucket_bytes: int
) -> None:
    found = buckets(numels, element_bytes=element_bytes, bucket_bytes=bucket_bytes)
    assert [index for bucket in found for index in bucket] == list(reversed(range(len(numels))))
    for bucket in found:
        sizes = [numels[index] * element_bytes for index in bucket]
        assert sum(sizes[:-1]) < bucket_bytes  # closed as soon as it is full
    for bucket in found[:-1]:
        assert sum(numels[index] for index in bucket) * element_bytes >= bucket_bytes


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [(1, [[3], [2], [1], [0]]), (40, [[3, 2], [1], [0]]), (10**9, [[3, 2, 1, 0]])],
)
def test_buckets_by_hand(bucket_bytes: int, expected: list[list[int]]) -> None:
    assert buckets([100, 10, 5, 5], element_bytes=4, bucket_bytes=bucket_bytes) == expected
