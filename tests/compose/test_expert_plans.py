"""Mixture-of-experts decoders under products of all axes, against one device."""

from __future__ import annotations

import pytest
from harness import Case, assert_bytes, assert_equal_to_one_device

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
