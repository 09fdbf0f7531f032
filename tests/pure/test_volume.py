"""Bytes as a function: bounds of the literature, messages by hand, state bytes by their table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.config.plan import Plan
from reparto.partition.flat import FlatLayout, flat_layout
from reparto.partition.volume import (
    Message,
    Operation,
    reduction_messages,
    state_bytes,
    unit_layouts,
    unit_shapes,
    wire_bytes,
)

SHARDED = ("optimizer", "gradients", "parameters")

unit_lists = st.lists(
    st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.integers(1, 9), max_size=2).map(tuple), max_size=4
    ),
    min_size=1,
    max_size=5,
).map(
    lambda blocks: [
        {f"{index}.{name}": shape for name, shape in block.items()}
        for index, block in enumerate(blocks)
    ]
)


@st.composite
def reducing_plans(draw: st.DrawFn) -> Plan:
    replicas = draw(st.integers(1, 2))
    return Plan(
        data=replicas * draw(st.integers(1, 4)),
        replicas=replicas,
        context=draw(st.integers(1, 2)),
        shard=draw(st.sampled_from(["none", *SHARDED])),
        num_microbatches=draw(st.integers(1, 3)),
        gradient_sync=draw(st.sampled_from(["step", "microbatch"])),
        bucket_bytes=draw(st.sampled_from([1, 100, 400, 10**6])),
    )


# --- the bounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "size", "expected"),
    [
        ("all_reduce", 2, 1000),
        ("all_reduce", 4, 1500),
        ("all_gather", 4, 750),
        ("reduce_scatter", 4, 750),
        ("all_to_all", 4, 750),
        ("broadcast", 4, 1000),
        ("send", 2, 1000),
        ("recv", 2, 1000),
    ],
)
def test_ideal_bytes_of_a_payload_of_1000(operation: Operation, size: int, expected: float) -> None:
    assert wire_bytes(operation, 1000, size) == expected
    assert wire_bytes(operation, 1000, 1) == 0.0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for size in range(2, 40):
        assert wire_bytes("all_reduce", 840, size) == pytest.approx(
            wire_bytes("reduce_scatter", 840, size) + wire_bytes("all_gather", 840, size)
        )


# --- units ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(unit_lists, reducing_plans())
def test_units_hold_every_parameter_once_in_the_order_of_the_model(
    blocks: list[dict[str, tuple[int, ...]]], plan: Plan
) -> None:
    units = unit_shapes(blocks, plan=plan, gradient_bytes=4)
    assert all(units)
    flat = [(name, shape) for unit in units for name, shape in unit.items()]
    assert flat == [(name, shape) for block in blocks for name, shape in block.items()]


@settings(deadline=None)
@given(unit_lists, reducing_plans())
def test_layouts_are_cut_over_the_shards_of_the_plan(
    blocks: list[dict[str, tuple[int, ...]]], plan: Plan
) -> None:
    layouts = unit_layouts(blocks, plan=plan, gradient_bytes=4)
    shards = 1 if plan.shard == "none" else plan.num_shards
    assert {layout.num_shards for layout in layouts} <= {shards}
    natural = sum(math.prod(shape) for block in blocks for shape in block.values())
    whole = sum(layout.whole_numel for layout in layouts)
    assert whole >= natural
    if shards == 1:
        assert whole == natural


def test_a_small_block_joins_its_neighbour_when_parameters_are_sharded() -> None:
    blocks = [{"tiny": (1,)}, {"a": (100, 10)}, {"b": (100, 10)}, {"norm": (10,)}]
    plan = Plan(data=2, shard="parameters")
    assert [list(unit) for unit in unit_shapes(blocks, plan=plan, gradient_bytes=4)] == [
        ["tiny", "a"],
        ["b", "norm"],
    ]


def test_without_sharding_buckets_are_filled_from_the_end() -> None:
    blocks = [{"a": (100,), "b": (10,)}, {"c": (5,), "d": (5,)}]
    plan = Plan(data=2, bucket_bytes=40)
    assert [list(unit) for unit in unit_shapes(blocks, plan=plan, gradient_bytes=4)] == [
        ["a"],
        ["b"],
        ["c", "d"],
    ]


# --- messages ------------------------------------------------------------------------------------

#: 12 and 7 rows: over 4 ranks 3 and 2 rows are reserved, so the second has one row of padding
TWO_UNITS = ({"a": (12, 5)}, {"b": (7, 5)})


def two_layouts(shards: int) -> list[FlatLayout]:
    return [flat_layout(unit, num_shards=shards) for unit in TWO_UNITS]


def told(messages: list[Message]) -> list[tuple[str, str, str, int, int, int]]:
    return [
        (one.what, one.operation, one.group, one.group_size, one.payload_bytes, one.count)
        for one in messages
    ]


def test_data_parallel_messages_by_hand() -> None:
    plan = Plan(data=4)
    assert told(reduction_messages(two_layouts(1), plan=plan)) == [
        ("gradient", "all_reduce", "reduce", 4, 12 * 5 * 4, 1),
        ("gradient", "all_reduce", "reduce", 4, 7 * 5 * 4, 1),
    ]
    each = Plan(data=4, num_microbatches=3, gradient_sync="microbatch")
    assert [one.count for one in reduction_messages(two_layouts(1), plan=each)] == [3, 3]
    at_the_end = Plan(data=4, num_microbatches=3)
    assert [one.count for one in reduction_messages(two_layouts(1), plan=at_the_end)] == [1, 1]


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_a_sharded_update_reduces_in_float32_and_gathers_in_the_compute_type(shard: str) -> None:
    plan = Plan.parse(f"data=4,shard={shard},num_microbatches=2")
    assert told(reduction_messages(two_layouts(4), plan=plan, compute_dtype="bfloat16")) == [
        ("gradient", "reduce_scatter", "shard", 4, 60 * 4, 1),
        ("weight", "all_gather", "shard", 4, 60 * 2, 1),
        ("gradient", "reduce_scatter", "shard", 4, 40 * 4, 1),  # 8 rows: one of them padding
        ("weight", "all_gather", "shard", 4, 40 * 2, 1),
    ]


def test_sharded_parameters_are_gathered_for_forward_and_again_for_backward() -> None:
    plan = Plan(data=4, shard="parameters", num_microbatches=3)
    messages = reduction_messages(two_layouts(4), plan=plan)
    assert told(messages) == [
        ("gradient", "reduce_scatter", "shard", 4, 240, 1),
        ("gradient", "reduce_scatter", "shard", 4, 160, 1),
        ("weight", "all_gather", "shard", 4, 240, 6),
        ("weight", "all_gather", "shard", 4, 160, 3),  # the last one is still there for backward
    ]
    tied = reduction_messages(two_layouts(4), plan=plan, kept=[True, True])
    assert [one.count for one in tied if one.what == "weight"] == [3, 3]


def test_replicas_reduce_their_pieces_among_each_other() -> None:
    plan = Plan(data=4, replicas=2, shard="gradients")
    found = told(reduction_messages(two_layouts(2), plan=plan))
    assert ("replica", "all_reduce", "replicas", 2, 6 * 5 * 4, 1) in found
    assert ("replica", "all_reduce", "replicas", 2, 4 * 5 * 4, 1) in found
    assert ("gradient", "reduce_scatter", "shard", 2, 12 * 5 * 4, 1) in found
    copies = Plan(data=2, replicas=2, shard="parameters")  # one shard: nothing to gather or cut
    assert {one[0] for one in told(reduction_messages(two_layouts(1), plan=copies))} == {"replica"}


@settings(deadline=None)
@given(unit_lists)
def test_one_rank_sends_nothing(blocks: list[dict[str, tuple[int, ...]]]) -> None:
    for shard in ("none", *SHARDED):
        plan = Plan.parse(f"shard={shard}")
        layouts = unit_layouts(blocks, plan=plan, gradient_bytes=4)
        assert reduction_messages(layouts, plan=plan) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stages_1_and_2_cost_what_data_parallelism_costs_and_stage_3_half_more(ranks: int) -> None:
    """Rajbhandari et al., "ZeRO", 2020, section 7: 2, 2, 2 and 3 times the model a step."""
    blocks = [{f"{index}.w": (8 * ranks, 16)} for index in range(50)]
    model = 50 * 8 * ranks * 16 * 4

    def volume(shard: str) -> float:
        plan = Plan.parse(f"data={ranks},shard={shard}")
        layouts = unit_layouts(blocks, plan=plan, gradient_bytes=4)
        return sum(one.total_wire_bytes for one in reduction_messages(layouts, plan=plan))

    share = (ranks - 1) / ranks
    assert volume("none") == pytest.approx(2 * share * model)
    assert volume("optimizer") == pytest.approx(2 * share * model)
    assert volume("gradients") == pytest.approx(2 * share * model)
    assert volume("parameters") == pytest.approx((3 - 1 / 50) * share * model)  # the last unit once


def test_totals_multiply_by_the_count() -> None:
    one = Message(what="weight", operation="all_gather", group="shard", group_size=4,
                  payload_bytes=100, count=6)  # fmt: skip
    assert one.total_payload_bytes == 600 and one.total_wire_bytes == 450


# --- state ---------------------------------------------------------------------------------------


def test_state_of_data_parallelism_is_four_copies_of_the_weights() -> None:
    found = state_bytes(two_layouts(1), plan=Plan(data=4))
    assert (found.parameters, found.gradients, found.optimizer) == (95 * 4, 95 * 4, 95 * 8)
    assert found.total == 95 * 16
    mixed = state_bytes(two_layouts(1), plan=Plan(data=4), compute_dtype="bfloat16")
    assert mixed.parameters == 95 * (2 + 4)
    each = Plan(data=4, num_microbatches=2, gradient_sync="microbatch")
    assert state_bytes(two_layouts(1), plan=each).gradients == 2 * 95 * 4


@pytest.mark.parametrize(
    ("shard", "parameters", "gradients"),
    [
        ("optimizer", 95, 100 + 25),  # padded whole of both units, and the pieces
        # `b` goes first; while `a` fills, the buffer of `b` is still under way beside its piece
        ("gradients", 95, 60 + 40 + 10),
        ("parameters", 25, 60 + 40 + 10),
    ],
)
def test_state_of_sharding_over_4_by_hand(shard: str, parameters: int, gradients: int) -> None:
    found = state_bytes(two_layouts(4), plan=Plan.parse(f"data=4,shard={shard}"))
    assert found.parameters == parameters * 4
    assert found.optimizer == 25 * 2 * 4
    assert found.gradients == gradients * 4


@settings(deadline=None)
@given(unit_lists, reducing_plans(), st.sampled_from(["float32", "bfloat16"]))
def test_state_stays_between_its_shard_and_the_whole(
    blocks: list[dict[str, tuple[int, ...]]], plan: Plan, compute: str
) -> None:
    layouts = unit_layouts(blocks, plan=plan, gradient_bytes=4)
    found = state_bytes(layouts, plan=plan, compute_dtype=compute)
    owned = sum(layout.piece_numel for layout in layouts) * 4
    whole = sum(layout.whole_numel for layout in layouts) * 4
    assert found.optimizer == 2 * owned  # for shard=none the piece is the whole
    assert owned <= found.gradients <= 2 * whole + 2 * owned
    if plan.shard == "parameters":
        assert found.parameters == owned


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_stage_of_sharding_needs_no_more_than_the_one_before(ranks: int) -> None:
    blocks = [{f"{index}.w": (8 * ranks, 16)} for index in range(20)]

    def total(shard: str) -> int:
        # buckets of one block each, so that the unit in flight is small beside the model
        plan = Plan.parse(f"data={ranks},shard={shard},bucket_bytes=1")
        return state_bytes(unit_layouts(blocks, plan=plan, gradient_bytes=4), plan=plan).total

    totals = [total(shard) for shard in ("none", *SHARDED)]
    assert totals[0] > totals[1] > totals[2] > totals[3]
    model = 20 * 8 * ranks * 16 * 4
    # 16 bytes a parameter become 16 / ranks, and what is in flight: two units of twenty
    assert totals[3] <= 4 * model / ranks + 2 * model / 20
