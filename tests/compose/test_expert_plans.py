"""Mixture-of-experts decoders under products of all axes, against one device."""

from __future__ import annotations

import pytest
from harness import Case, assert_bytes, assert_equal_to_one_device, one_device

CASE = Case(layers=4, heads=4, kv_heads=4, sequences=8, length=8, steps=3, experts=4, shared=1)

PLANS = [
    "data=2",
    "num_microbatches=4",
    "data=2,expert=2",
    "data=4,expert=4",
    "data=4,expert=2",
    "data=4,expert=2,shard=optimizer",
    "data=4,expert=2,shard=gradients,num_microbatches=2",
    "data=4,expert=2,shard=parameters",
    "data=2,expert=2,shard=parameters,recompute=full",
    "data=2,expert=2,num_microbatches=2,gradient_sync=microbatch",
    "data=4,replicas=2,expert=2,shard=parameters",
    "data=4,replicas=2,expert=2",
    "tensor=2",
    "tensor=2,sequence_parallel=true",
    "data=2,expert=2,tensor=2",
    "data=2,expert=2,tensor=2,sequence_parallel=true,shard=parameters",
    "pipeline=2,num_microbatches=2",
    "data=2,expert=2,pipeline=2,num_microbatches=4,schedule=zb-v",
    "data=2,expert=2,pipeline=2,num_microbatches=4,schedule=interleaved,shard=parameters",
    "data=2,expert=2,tensor=2,pipeline=2,num_microbatches=2",
]


@pytest.mark.parametrize("plan", PLANS)
def test_plans_with_experts_equal_one_device(plan: str) -> None:
    assert_bytes(assert_equal_to_one_device(CASE, plan))


@pytest.mark.parametrize(
    "case",
    [
        Case(layers=4, sequences=8, length=8, experts=4, balance="bias", scoring="sigmoid"),
        Case(layers=4, sequences=8, length=8, experts=8, chosen=1, aux=0.5, z=0.1),
        Case(layers=4, sequences=8, length=8, experts=4, sparse_step=2, shared=0),
        Case(layers=4, sequences=8, length=8, experts=4, capacity=0.75),
        Case(layers=4, sequences=8, length=8, experts=4, dropout=0.2, label_smoothing=0.1),
        Case(layers=4, sequences=8, length=8, experts=4, frozen="model.layers.1.mlp.experts"),
        Case(layers=4, sequences=8, length=8, experts=4, frozen="model.layers.1"),
    ],
    ids=["bias", "one-of-eight", "every-second", "capacity", "dropout", "frozen", "frozen-layer"],
)
@pytest.mark.parametrize(
    "plan",
    [
        "data=4,expert=2,shard=parameters,num_microbatches=2",
        "data=2,expert=2,tensor=2,pipeline=2,num_microbatches=2,schedule=zb-h1",
    ],
)
def test_every_kind_of_router_equals_one_device(case: Case, plan: str) -> None:
    outcomes = assert_equal_to_one_device(case, plan)
    if not case.capacity:  # a capacity sends fewer rows than the formula says
        assert_bytes(outcomes)


def test_the_load_is_that_of_the_whole_batch_on_every_rank() -> None:
    outcomes = assert_equal_to_one_device(CASE, "data=2,expert=2,pipeline=2,num_microbatches=4")
    reference = one_device(CASE)
    for outcome in outcomes:
        for ours, theirs in zip(outcome.results, reference.results, strict=True):
            assert ours.load is not None and theirs.load is not None
            assert ours.load.counts == theirs.load.counts
            assert ours.load.balance_loss == pytest.approx(theirs.load.balance_loss, rel=1e-12)
            assert ours.load.z_loss == pytest.approx(theirs.load.z_loss, rel=1e-12)
            valid = ours.num_tokens * CASE.chosen
            assert [sum(row) for row in ours.load.counts] == [valid] * CASE.layers
