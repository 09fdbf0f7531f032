"""Layers on pipeline stages: the exact cut against all cuts there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.errors import UserError
from reparto.partition.layers import cut_by_cost, pipeline_cuts


def all_cuts(layers: int, stages: int) -> list[tuple[tuple[int, int], ...]]:
    """Every way to cut `layers` in `stages` runs with at least one layer each."""
    found = []
    for inner in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *inner, layers)
        found.append(tuple((a, b - a) for a, b in itertools.pairwise(edges)))
    return found


def dearest(costs: list[int], cut: tuple[tuple[int, int], ...]) -> int:
    return max(sum(costs[first : first + count]) for first, count in cut)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_the_dearest_stage_is_as_cheap_as_it_can_be(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    cut = cut_by_cost(costs, stages)
    assert cut in all_cuts(len(costs), stages)  # consecutive, complete, nobody empty
    assert dearest(costs, cut) == min(dearest(costs, one) for one in all_cuts(len(costs), stages))


def test_equal_layers_are_cut_evenly_and_the_earlier_stages_take_fewer() -> None:
    assert cut_by_cost([1.0] * 8, 4) == ((0, 2), (2, 2), (4, 2), (6, 2))
    assert cut_by_cost([1.0] * 7, 3) == ((0, 1), (1, 3), (4, 3))


def test_a_head_as_dear_as_three_layers_takes_layers_off_the_last_stage() -> None:
    costs = [0.0, *[1.0] * 8, 3.0]  # embedding, layers, head
    cut = cut_by_cost(costs, 2)
    assert [sum(costs[a : a + n]) for a, n in cut] in ([5.0, 6.0], [6.0, 5.0])


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_layers_are_refused_with_the_legal_numbers(stages: int) -> None:
    with pytest.raises(UserError) as caught:
        cut_by_cost([1.0, 1.0, 1.0], stages)
    assert caught.value.where == "partition.pipeline"
    assert caught.value.legal.startswith("1 to 3 ")
    assert caught.value.nearest == "pipeline=3"


#: owners of two chunks a rank: a loop and a V
LOOPS = {2: ((0, 1, 0, 1), (0, 1, 1, 0)), 3: ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))}


def step_of(
    costs: list[int], cut: tuple[tuple[int, int], ...], owners: tuple[int, ...], m: int
) -> int:
    stages = [sum(costs[first : first + count]) for first, count in cut]
    ranks = [sum(c for c, o in zip(stages, owners, strict=True) if o == r) for r in set(owners)]
    return m * max(ranks) + max(stages)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("shape", [0, 1], ids=["loop", "v"])
@pytest.mark.parametrize(("layers", "head"), [(6, 3), (8, 12), (8, 40), (9, 5), (8, 22)])
def test_with_several_stages_a_rank_the_busiest_rank_is_about_as_idle_as_it_can_be(
    ranks: int, shape: int, layers: int, head: int
) -> None:
    owners = LOOPS[ranks][shape]
    costs = [1, *[10] * layers, 1, head]
    cut = pipeline_cuts(costs, owners, 8)
    possible = all_cuts(len(costs), len(owners))
    assert cut in possible
    best = min(step_of(costs, one, owners, 8) for one in possible)
    assert step_of(costs, cut, owners, 8) <= 1.03 * best


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 20), min_size=4, max_size=9), st.sampled_from([0, 1]))
def test_moves_between_stages_never_make_the_step_longer(costs: list[int], shape: int) -> None:
    owners = LOOPS[2][shape]
    cut = pipeline_cuts(costs, owners, 4)
    assert cut in all_cuts(len(costs), 4)
    assert step_of(costs, cut, owners, 4) <= step_of(costs, cut_by_cost(costs, 4), owners, 4)


def test_a_v_over_two_ranks_shares_eight_layers_and_a_head_by_rank() -> None:
    # 8 layers and a head of 1.14: the busiest rank has 5, where the flattest stages give it 6
    cut = pipeline_cuts([0.01, *[1.0] * 8, 0.01, 1.14], (0, 1, 1, 0), 8)
    assert [count for _, count in cut] == [3, 2, 3, 3]
