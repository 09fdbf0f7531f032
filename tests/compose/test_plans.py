"""Products of all strategies against one device: no pair was left out because nobody thought of it.

Each plan trains two steps of a small decoder with tied embedding, uneven valid-token counts and
clipping, in float64, on up to 16 ranks. Loss, norm, every gradient and every updated weight are one
device's; recorded bytes are the formula's; held state is within 2 % of it.
"""

from __future__ import annotations

import pytest
from harness import Case, assert_bytes, assert_equal_to_one_device

from reparto.config.plan import Plan

CASE = Case(layers=5, heads=4, kv_heads=4, sequences=8, length=8, steps=2)

PLANS = [
    # every pair of axes
    "data=2,tensor=2",
    "data=2,shard=optimizer,tensor=2,num_microbatches=2",
    "data=2,shard=gradients,tensor=2,sequence_parallel=true",
    "data=2,shard=parameters,tensor=2,recompute=full",
    "data=4,replicas=2,shard=parameters,tensor=2",
    "data=4,replicas=2,shard=gradients,tensor=2,num_microbatches=2,gradient_sync=microbatch",
    "data=2,pipeline=2,num_microbatches=2",
    "data=2,shard=optimizer,pipeline=2,num_microbatches=2,schedule=gpipe",
    "data=2,shard=gradients,pipeline=2,num_microbatches=4,schedule=zb-h1",
    "data=2,shard=parameters,pipeline=2,num_microbatches=4,schedule=interleaved",
    "data=2,shard=parameters,pipeline=2,num_microbatches=2,schedule=zb-v,recompute=full",
    "data=2,shard=gradients,pipeline=2,num_microbatches=4,schedule=dualpipe-v,gradient_sync=microbatch",
    "data=4,replicas=2,shard=optimizer,pipeline=2,num_microbatches=2",
    "tensor=2,pipeline=2,num_microbatches=2,schedule=gpipe",
    "tensor=2,pipeline=2,num_microbatches=4,schedule=1f1b,recompute=selective",
    "tensor=2,pipeline=2,num_microbatches=4,schedule=interleaved,sequence_parallel=true",
    "tensor=2,pipeline=2,num_microbatches=4,schedule=zb-h1,recompute=full",
    "tensor=2,pipeline=2,num_microbatches=4,schedule=zb-v",
    "tensor=2,pipeline=2,num_microbatches=4,schedule=dualpipe-v,sequence_parallel=true",
    "tensor=4,pipeline=2,num_microbatches=2,schedule=zb-v,sequence_parallel=true",
    "tensor=2,pipeline=4,num_microbatches=2",
    # all three at once
    "data=2,tensor=2,pipeline=2",
    "data=2,tensor=2,pipeline=2,num_microbatches=4,schedule=gpipe",
    "data=2,tensor=2,pipeline=2,num_microbatches=4,schedule=interleaved",
    "data=2,tensor=2,pipeline=2,num_microbatches=4,schedule=zb-h1,gradient_sync=microbatch",
    "data=2,tensor=2,pipeline=2,num_microbatches=4,schedule=zb-v,sequence_parallel=true",
    "data=2,tensor=2,pipeline=2,num_microbatches=4,schedule=dualpipe-v,recompute=full",
    "data=2,shard=optimizer,tensor=2,pipeline=2,num_microbatches=2,schedule=zb-h1",
    "data=2,shard=gradients,tensor=2,pipeline=2,num_microbatches=4,schedule=zb-v",
    "data=2,shard=parameters,tensor=2,pipeline=2",
    "data=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=4,schedule=gpipe",
    "data=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=4,schedule=interleaved",
    "data=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=4,schedule=zb-v,"
    "sequence_parallel=true,recompute=full",
    "data=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=4,schedule=dualpipe-v,"
    "sequence_parallel=true,gradient_sync=microbatch",
    "data=4,replicas=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=2,schedule=zb-h1",
]


def test_the_table_is_large_and_holds_every_value() -> None:
    """At least 30 plans; every schedule, shard mode and switch stands in some product."""
    plans = [Plan.parse(text) for text in PLANS]
    assert len({plan.text for plan in plans}) == len(PLANS) >= 30
    for field, values in (
        ("schedule", {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}),
        ("shard", {"none", "optimizer", "gradients", "parameters"}),
        ("recompute", {"none", "selective", "full"}),
        ("gradient_sync", {"step", "microbatch"}),
        ("sequence_parallel", {False, True}),
    ):
        assert {getattr(plan, field) for plan in plans if plan.world_size > 2} == values


@pytest.mark.parametrize("plan", PLANS)
def test_every_product_is_one_device(plan: str) -> None:
    assert_bytes(assert_equal_to_one_device(CASE, plan))


@pytest.mark.parametrize(
    "plan",
    [
        "data=2,tensor=2,pipeline=2,num_microbatches=4,schedule=zb-v,recompute=full",
        "data=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=4,sequence_parallel=true",
    ],
)
def test_with_dropout_biases_smoothing_and_an_untied_head(plan: str) -> None:
    case = Case(
        layers=4, kv_heads=4, sequences=8, length=8, steps=2,
        tied=False, bias=True, dropout=0.3, label_smoothing=0.1,
    )  # fmt: skip
    assert_bytes(assert_equal_to_one_device(case, plan))
