"""Ranks and groups: every rank on one place, every group a line of the grid, all once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.config.plan import Plan
from reparto.partition.grid import AXES, AXES_OF_GROUP, Grid

GROUPS = (*AXES_OF_GROUP, "expert", "expert_shard")


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    folded = sizes["data"] * sizes["context"]
    expert = draw(st.sampled_from([e for e in range(1, folded + 1) if folded % e == 0]))
    return Grid(**sizes, expert=expert)


@settings(deadline=None)
@given(grids())
def test_ranks_and_coordinates_are_inverse(grid: Grid) -> None:
    for rank in range(grid.world_size):
        assert grid.rank(grid.coordinates(rank)) == rank


@settings(deadline=None)
@given(grids())
def test_the_order_is_pipeline_replicas_data_context_tensor_slowest_first(grid: Grid) -> None:
    in_order = itertools.product(*(range(grid.size(axis)) for axis in AXES))
    for rank, place in enumerate(in_order):
        found = grid.coordinates(rank)
        assert tuple(found[axis] for axis in AXES) == place


@settings(deadline=None)
@given(grids(), st.sampled_from(GROUPS))
def test_the_groups_of_a_name_hold_every_rank_exactly_once(grid: Grid, name: str) -> None:
    groups = grid.all_groups(name)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert len({len(group) for group in groups}) == 1
    assert list(groups) == sorted(groups, key=min)
    for group in groups:
        assert list(group) == sorted(group)
        assert all(grid.group(name, rank) == group for rank in group)


@settings(deadline=None)
@given(grids(), st.sampled_from(tuple(AXES_OF_GROUP)))
def test_members_differ_along_the_axes_of_their_group_and_no_other(grid: Grid, name: str) -> None:
    size = 1
    for axis in AXES_OF_GROUP[name]:
        size *= grid.size(axis)
    for group in grid.all_groups(name):
        assert len(group) == size
        for axis in set(AXES) - set(AXES_OF_GROUP[name]):
            assert len({grid.coordinates(rank)[axis] for rank in group}) == 1


@settings(deadline=None)
@given(grids())
def test_experts_take_the_fastest_part_of_the_shard_group(grid: Grid) -> None:
    for rank in range(grid.world_size):
        line = grid.group("shard", rank)
        different, same = grid.group("expert", rank), grid.group("expert_shard", rank)
        assert len(different) == grid.expert
        assert len(same) == len(line) // grid.expert
        assert set(different) | set(same) <= set(line)
        assert set(different) & set(same) == {rank}  # the two cross in one rank
        first = line.index(different[0])
        assert different == line[first : first + grid.expert]  # neighbours
        place = line.index(rank) % grid.expert
        assert all(line.index(other) % grid.expert == place for other in same)


@settings(deadline=None)
@given(grids())
def test_ranks_with_one_batch_index_share_all_sequences(grid: Grid) -> None:
    parts = grid.replicas * grid.data
    for rank in range(grid.world_size):
        index = grid.batch_index(rank)
        assert 0 <= index < parts
        alike = {grid.batch_index(other) for other in grid.group("model", rank)}
        assert alike | {grid.batch_index(r) for r in grid.group("context", rank)} == {index}
        order = [grid.batch_index(other) for other in grid.group("batch", rank)]
        assert order == list(range(parts))  # group order is batch order


def test_data_4_in_2_replicas_is_4_ranks_cut_in_halves() -> None:
    plan = Plan.parse("data=4,replicas=2,shard=parameters")
    grid = Grid.of(plan)
    assert grid.world_size == plan.world_size == 4
    assert grid.all_groups("shard") == ((0, 1), (2, 3))
    assert grid.all_groups("replicas") == ((0, 2), (1, 3))
    assert grid.all_groups("reduce") == grid.all_groups("batch") == ((0, 1, 2, 3),)
    assert [grid.batch_index(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_data_2_expert_2_is_2_ranks() -> None:
    grid = Grid.of(Plan.parse("data=2,expert=2"))
    assert grid.world_size == 2
    assert grid.all_groups("expert") == ((0, 1),)
    assert grid.all_groups("expert_shard") == ((0,), (1,))


def test_a_cube_of_8_by_hand() -> None:
    grid = Grid.of(Plan.parse("data=2,tensor=2,pipeline=2"))
    assert grid.all_groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.all_groups("reduce") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.all_groups("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.all_groups("model") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert grid.coordinates(5) == {
        "pipeline": 1, "replicas": 0, "data": 0, "context": 0, "tensor": 1,
    }  # fmt: skip
    assert grid.rank({"pipeline": 1, "tensor": 1}) == 5


@settings(deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)
)
def test_the_grid_of_a_plan_has_its_world_size(
    pipeline: int, replicas: int, data: int, context: int, tensor: int
) -> None:
    plan = Plan(
        pipeline=pipeline, data=replicas * data, replicas=replicas, context=context, tensor=tensor
    )
    grid = Grid.of(plan)
    assert grid.world_size == plan.world_size
    assert len(grid.group("shard", 0)) == plan.num_shards


@pytest.mark.parametrize("rank", [-1, 4, 1000])
def test_a_rank_outside_the_grid_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} of 4"):
        Grid(data=4).coordinates(rank)
