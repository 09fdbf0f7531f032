"""Rectangles and placements: rows cut evenly, every element kept once, boxes against index sets."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.partition.tensors import (
    Rectangle,
    initial_table,
    rows_and_columns,
    shard_rows,
    split_evenly,
    uncovered,
)

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> Rectangle:
    start = tuple(draw(st.integers(0, 4)) for _ in range(dims))
    size = tuple(draw(st.integers(0, 4)) for _ in range(dims))
    return Rectangle(start=start, size=size)


def elements(box: Rectangle) -> set[tuple[int, ...]]:
    """The indices that a box holds, one by one."""
    ranges = [range(a, a + n) for a, n in zip(box.start, box.size, strict=True)]
    return set(itertools.product(*ranges))


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 30))
def test_runs_are_consecutive_even_and_the_longer_first(total: int, parts: int) -> None:
    runs = [split_evenly(total, parts, index) for index in range(parts)]
    assert [item for start, size in runs for item in range(start, start + size)] == list(
        range(total)
    )
    sizes = [size for _, size in runs]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("index", [-1, 4])
def test_a_part_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=f"part {index} of 4"):
        split_evenly(10, 4, index)


@settings(deadline=None)
@given(shapes, st.integers(1, 8))
def test_shards_hold_every_element_exactly_once(shape: tuple[int, ...], parts: int) -> None:
    whole = Rectangle.whole(shape)
    held = [box for index in range(parts) for box in shard_rows(whole, parts, index)]
    found = [one for box in held for one in elements(box)]
    assert len(found) == len(set(found)) == whole.numel
    assert set(found) == elements(whole)
    assert uncovered(shape, held) == 0
    if shape and shape[0]:
        counts = [sum(b.numel for b in shard_rows(whole, parts, i)) for i in range(parts)]
        assert max(counts) - min(counts) <= math.prod(shape[1:])


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_a_shard_of_a_tensor_parallel_part_is_a_box_of_the_whole(
    rows: int, columns: int, tensor: int, shards: int
) -> None:
    """Cut by columns over `tensor`, then by rows over `shards`: every element once, all of it."""
    held: list[Rectangle] = []
    whole = Rectangle.whole((rows, columns))
    for part in range(tensor):
        start, size = split_evenly(columns, tensor, part)
        for shard in range(shards):
            held += shard_rows(whole.narrow(1, start, size), shards, shard)
    found = [one for box in held for one in elements(box)]
    assert len(found) == len(set(found)) and set(found) == elements(whole)


def test_a_missing_shard_is_counted() -> None:
    whole = Rectangle.whole((5, 3))
    held = [box for index in (0, 2) for box in shard_rows(whole, 3, index)]
    assert uncovered((5, 3), held) == 6  # 2 + 2 + 1 rows of 3; shard 1 is missing


def test_a_scalar_is_kept_by_the_first_shard_alone() -> None:
    whole = Rectangle.whole(())
    assert whole.numel == 1
    assert shard_rows(whole, 3, 0) == (whole,)
    assert shard_rows(whole, 3, 1) == shard_rows(whole, 3, 2) == ()


@settings(deadline=None)
@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims))))
def test_the_common_box_is_the_common_indices(pair: tuple[Rectangle, Rectangle]) -> None:
    one, other = pair
    common = elements(one) & elements(other)
    found = one.intersect(other)
    assert (found is None) == (not common)
    if found is not None:
        assert elements(found) == common
    assert other.intersect(one) == found


@settings(deadline=None)
@given(boxes(2), st.integers(0, 1), st.integers(-1, 5), st.integers(-1, 5))
def test_narrow_counts_from_the_edge_of_the_box(
    box: Rectangle, dim: int, start: int, size: int
) -> None:
    if start < 0 or size < 0 or start + size > box.size[dim]:
        with pytest.raises(IndexError, match=f"along dim {dim}"):
            box.narrow(dim, start, size)
        return
    first = box.start[dim] + start
    assert elements(box.narrow(dim, start, size)) == {
        one for one in elements(box) if first <= one[dim] < first + size
    }


@pytest.mark.parametrize(
    ("shape", "expected"), [((), (1, 1)), ((7,), (7, 1)), ((3, 4), (3, 4)), ((2, 3, 5), (2, 15))]
)
def test_a_tensor_is_rows_by_columns(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    assert rows_and_columns(shape) == expected


def test_the_first_table_gives_everything_to_every_rank() -> None:
    table = initial_table(
        {"embed": (10, 4), "norm": (4,), "head": (10, 4)},
        decays={"embed": True, "norm": False, "head": True},
        tied={"head": "embed"},
        frozen=("norm",),
        axes=("data", "tensor"),
    )
    assert list(table) == ["embed", "norm", "head"]
    assert [one.held_numel for one in table.values()] == [40, 4, 40]
    assert [one.numel for one in table.values()] == [40, 4, 40]
    assert {one.replicated_over for one in table.values()} == {("data", "tensor")}
    assert table["head"].tied_to == "embed" and table["embed"].tied_to is None
    assert [one.decays for one in table.values()] == [True, False, True]
    assert [one.trainable for one in table.values()] == [True, False, True]
    assert all(one.partial_over == () for one in table.values())


def test_a_placement_is_changed_by_making_another() -> None:
    (before,) = initial_table({"w": (4, 2)}, decays={"w": True}, axes=("data",)).values()
    after = before.with_(held=(), partial_over=("data",))
    assert after.held_numel == 0 and after.numel == 8 and after.partial_over == ("data",)
    assert before.held_numel == 8 and before.partial_over == ()
    with pytest.raises(AttributeError):
        before.held = ()  # type: ignore[misc]
