"""A memory limit by arithmetic: what is refused, and that the plan proposed is legal and fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reparto.config.model import num_parameters, preset
from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.partition.ceiling import fullest_state_bytes, refuse_above
from reparto.partition.legal import check_plan

MODEL = preset("10m")
BATCH = {"batch_size": 64, "sequence_length": 64}


def test_one_worker_holds_sixteen_bytes_a_parameter() -> None:
    """Weight, gradient and two moments, all float32."""
    assert fullest_state_bytes(Plan(), MODEL) == 16 * num_parameters(MODEL)


def test_the_limit_itself_is_legal_and_a_byte_less_is_not() -> None:
    needed = 16 * num_parameters(MODEL)
    refuse_above(needed, Plan(), MODEL, **BATCH)
    with pytest.raises(UserError) as caught:
        refuse_above(needed - 1, Plan(), MODEL, **BATCH)
    assert caught.value.where == "compute.memory_gb"


def test_the_message_says_how_much_was_needed_and_how_much_there_was() -> None:
    with pytest.raises(UserError) as caught:
        refuse_above(64 << 20, Plan(), MODEL, **BATCH)
    needed = 16 * num_parameters(MODEL) / (1 << 20)
    assert f"needs {needed:.1f} MiB" in caught.value.what
    assert "may have 64.0 MiB" in caught.value.what


@given(
    share=st.floats(0.2, 0.95),
    data=st.sampled_from([1, 2, 3]),
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2]),
)
def test_the_plan_proposed_is_legal_and_leaves_room(
    share: float, data: int, tensor: int, pipeline: int
) -> None:
    plan = Plan(data=data, tensor=tensor, pipeline=pipeline)
    limit = int(fullest_state_bytes(plan, MODEL) * share)
    with pytest.raises(UserError) as caught:
        refuse_above(limit, plan, MODEL, **BATCH)
    words = caught.value.nearest.split()
    assert words[0] == "--plan", caught.value.nearest
    other = Plan.parse(words[1])
    check_plan(other, model=MODEL, **BATCH)
    assert fullest_state_bytes(other, MODEL) <= limit / 2
    assert other.world_size >= plan.world_size


def test_where_nothing_fits_it_says_so() -> None:
    with pytest.raises(UserError) as caught:
        refuse_above(1, Plan(), MODEL, **BATCH)
    assert "a smaller model" in caught.value.nearest
