"""Plans that cannot run: refused with the field, the legal values and a plan that does run."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reparto.config.model import ModelConfig
from reparto.config.plan import Plan, ScheduleName
from reparto.errors import UserError
from reparto.partition.legal import check_plan


def model(*, layers: int = 8, heads: int = 8, kv_heads: int = 4) -> ModelConfig:
    return ModelConfig(
        vocab_size=512,
        hidden_size=16 * heads,
        intermediate_size=64,
        num_experts=72,  # which every expert degree here divides
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


def refusal(text: str, **given: object) -> UserError:
    with pytest.raises(UserError) as caught:
        check_plan(Plan.parse(text), **given)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        "data=1",
        "data=4,replicas=2,shard=parameters",
        "data=2,expert=2",
        "data=2,context=2,expert=4",
        "tensor=4,sequence_parallel=true",
        "pipeline=8",
        "pipeline=4,schedule=interleaved",
        "pipeline=2,schedule=interleaved,chunks=4",
        "pipeline=4,schedule=zb-v",
        "context=4",
        "context=2,context_mode=ulysses,tensor=2",
        "schedule=dualpipe-v",  # one stage: plain accumulation
        "data=2,tensor=2,pipeline=2,context=2,num_microbatches=3,shard=gradients",
    ],
)
def test_what_can_run_is_let_through(text: str) -> None:
    assert check_plan(Plan.parse(text), model=model(), batch_size=24, sequence_length=64) == ()


def test_L66_key_value_heads_that_tensor_does_not_divide_are_refused_before_launch() -> None:
    error = refusal("tensor=4", model=model(heads=8, kv_heads=2))
    assert error.where == "partition.tensor"
    assert error.what == "tensor=4 cannot run"
    assert error.legal == ("a divisor of num_key_value_heads=2 and num_attention_heads=8: 1, 2")
    assert error.nearest == "tensor=2"


def test_L66_key_value_heads_that_ulysses_does_not_divide_are_refused_before_launch() -> None:
    error = refusal("context=4,context_mode=ulysses", model=model(heads=8, kv_heads=2))
    assert error.where == "partition.context"
    assert error.legal.endswith(": 1, 2")
    assert error.nearest == "context=2,context_mode=ulysses"
    check_plan(Plan(context=4), model=model(heads=8, kv_heads=2), sequence_length=64)  # ring: fine


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 12])
def test_L66_exactly_the_divisors_of_the_key_value_heads_are_legal(kv_heads: int) -> None:
    for tensor in range(1, 14):
        plan = Plan(tensor=tensor)
        if kv_heads % tensor == 0:
            check_plan(plan, model=model(heads=12, kv_heads=kv_heads))
        else:
            assert refusal(plan.text, model=model(heads=12, kv_heads=kv_heads)).nearest


@pytest.mark.parametrize(
    ("text", "field", "legal", "nearest"),
    [
        ("data=4,replicas=3", "replicas", "a divisor of data: 1, 2, 4", "data=4,replicas=2"),
        ("data=6,replicas=7", "replicas", "a divisor of data: 1, 2, 3, 6", "data=6,replicas=6"),
        ("replicas=2", "replicas", "a divisor of data: 1", "data=1"),
        ("data=4,expert=3", "expert", "a divisor of (data / replicas) x context: 1, 2, 4",
         "data=4,expert=2"),
        ("data=4,replicas=2,expert=4", "expert",
         "a divisor of (data / replicas) x context: 1, 2", "data=4,replicas=2,expert=2"),
        ("expert=2", "expert", "a divisor of (data / replicas) x context: 1", "data=1"),
        ("sequence_parallel=true", "sequence_parallel", "true only with tensor > 1", "data=1"),
        ("chunks=2", "chunks", "1 without a pipeline", "data=1"),
        ("pipeline=2,chunks=2", "chunks", "1 with schedule=1f1b; schedule=interleaved takes 2 or "
         "more", "pipeline=2,chunks=1"),
        ("pipeline=2,chunks=1,schedule=zb-v", "chunks", "2 with schedule=zb-v",
         "pipeline=2,chunks=2,schedule=zb-v"),
        ("pipeline=2,chunks=1,schedule=interleaved", "chunks", "2 or more with "
         "schedule=interleaved", "pipeline=2,chunks=2,schedule=interleaved"),
        ("pipeline=16", "pipeline", "1 to 8 (8 layers, 1 chunks a rank)", "pipeline=8"),
        ("pipeline=8,schedule=zb-v", "pipeline", "1 to 4 (8 layers, 2 chunks a rank)",
         "pipeline=4,schedule=zb-v"),
        ("pipeline=2,schedule=interleaved,chunks=9", "schedule",
         "one with a single chunk a rank: 8 layers are fewer than 9", "pipeline=2"),
        ("context=3", "context", "twice the degree divides sequence_length=64: 1, 2, 4, 8, 16, 32",
         "context=2"),
        ("context=64", "context", "twice the degree divides sequence_length=64: 1, 2, 4, 8, 16, 32",
         "context=32"),
        ("tensor=3", "tensor",
         "a divisor of num_key_value_heads=4 and num_attention_heads=8: 1, 2, 4", "tensor=2"),
        ("tensor=2,context=4,context_mode=ulysses", "context",
         "the degree divides sequence_length=64 and the degree divides the 2 KV heads of a tensor "
         "rank: 1, 2", "tensor=2,context=2,context_mode=ulysses"),
    ],
)  # fmt: skip
def test_refusals_by_hand(text: str, field: str, legal: str, nearest: str) -> None:
    error = refusal(text, model=model(), sequence_length=64)
    assert error.where == f"partition.{field}"
    value = getattr(Plan.parse(text), field)
    assert error.what == f"{field}={str(value).lower()} cannot run"
    assert error.legal == legal
    assert error.nearest == nearest


def test_other_fields_that_cannot_run_are_repaired_in_what_is_offered() -> None:
    error = refusal("data=4,replicas=3,expert=3")
    assert error.where == "partition.replicas"
    assert error.nearest == "data=4,replicas=2,expert=2"


@pytest.mark.parametrize(("length", "nearest"), [(1, "data=1"), (15, "data=1"), (18, "context=3")])
def test_an_odd_sequence_cannot_be_cut_for_a_ring(length: int, nearest: str) -> None:
    assert refusal("context=4", sequence_length=length).nearest == nearest


# --- world size ----------------------------------------------------------------------------------


def test_started_ranks_that_the_plan_does_not_need_are_refused() -> None:
    error = refusal("data=2,tensor=2", world_size=8)
    assert error.where == "partition"
    assert error.what == "the plan `data=2,tensor=2` needs 4 ranks, but 8 were started"
    assert error.legal == "4 ranks (pipeline x data x context x tensor)"
    assert error.nearest == "data=4,tensor=2"
    assert refusal("tensor=2,pipeline=2", world_size=6).nearest == "start 4 ranks"
    # replicas and expert fold over data, so they follow it
    assert refusal("data=4,replicas=4,expert=1", world_size=6).nearest == "data=6,replicas=3"
    assert refusal("data=4,expert=4", world_size=6).nearest == "data=6,expert=3"
    check_plan(Plan.parse("data=4,tensor=2"), world_size=8)


# --- batch ---------------------------------------------------------------------------------------


def test_a_batch_that_leaves_a_microbatch_empty_is_refused() -> None:
    error = refusal("data=4,num_microbatches=3", batch_size=11)
    assert error.where == "data.batch_size"
    assert (error.legal, error.nearest) == ("at least 12", "batch_size = 12")


def test_an_uneven_batch_is_a_warning_with_its_cost() -> None:
    (warning,) = check_plan(Plan(data=4, num_microbatches=3), batch_size=22)
    assert "2 padding sequences a step, 8.3% of the compute" in warning
    assert check_plan(Plan(data=4, num_microbatches=3), batch_size=24) == ()


# --- what is offered always runs -----------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> tuple[Plan, ModelConfig | None, int | None]:
    degree = st.integers(1, 9)
    plan = Plan(
        data=draw(degree),
        replicas=draw(degree),
        tensor=draw(degree),
        sequence_parallel=draw(st.booleans()),
        pipeline=draw(degree),
        chunks=draw(st.integers(0, 4)),
        schedule=draw(st.sampled_from(get_args(ScheduleName))),
        num_microbatches=draw(degree),
        context=draw(degree),
        context_mode=draw(st.sampled_from(["ring", "ulysses"])),
        expert=draw(degree),
    )
    kv_heads = draw(st.integers(1, 8))
    config = model(
        layers=draw(st.integers(1, 10)), kv_heads=kv_heads, heads=kv_heads * draw(st.integers(1, 3))
    )
    length = draw(st.one_of(st.none(), st.integers(1, 48)))
    return plan, draw(st.sampled_from([config, None])), length


@settings(deadline=None, max_examples=200)
@given(requests())
def test_the_nearest_plan_can_run(request: tuple[Plan, ModelConfig | None, int | None]) -> None:
    plan, config, length = request
    try:
        check_plan(plan, model=config, sequence_length=length)
    except UserError as error:
        assert error.where.startswith("partition.") and error.legal
        field = error.where.removeprefix("partition.")
        offered = Plan.parse(error.nearest)
        check_plan(offered, model=config, sequence_length=length)
        assert getattr(offered, field) != getattr(plan, field)
    else:
        assume(plan.world_size > 1)


@settings(deadline=None, max_examples=50)
@given(requests(), st.integers(1, 64))
def test_the_nearest_plan_for_started_ranks_can_run_on_them(
    request: tuple[Plan, ModelConfig | None, int | None], world_size: int
) -> None:
    plan, config, length = request
    try:
        check_plan(plan, model=config, sequence_length=length)
    except UserError as error:
        plan = Plan.parse(error.nearest)
    assume(plan.world_size != world_size)
    with pytest.raises(UserError) as caught:
        check_plan(plan, model=config, sequence_length=length, world_size=world_size)
    if world_size % (plan.pipeline * plan.context * plan.tensor) == 0:
        offered = Plan.parse(caught.value.nearest)
        check_plan(offered, model=config, sequence_length=length, world_size=world_size)
    else:
        assert caught.value.nearest == f"start {plan.world_size} ranks"


@settings(deadline=None, max_examples=50)
@given(requests())
def test_a_refusal_of_one_fault_changes_that_field_alone(
    request: tuple[Plan, ModelConfig | None, int | None],
) -> None:
    plan, config, length = request
    try:
        check_plan(plan, model=config, sequence_length=length)
    except UserError as error:
        plan = Plan.parse(error.nearest)
    error = refusal(
        plan.model_copy(update={"expert": 77}).text, model=config, sequence_length=length
    )  # 77 divides nothing that these plans can have, and no other field depends on it
    assert error.where == "partition.expert"
    assert Plan.parse(error.nearest).model_copy(update={"expert": plan.expert}) == plan
