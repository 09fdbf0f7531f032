"""Actions and schedules as values: text form, placement, what cannot be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reparto.errors import UserError
from reparto.schedule.actions import WHOLE_STEP, Action, Op, Placement, Schedule
from reparto.schedule.generate import generate
from reparto.schedule.lower import GradientSync, lower
from reparto.schedule.rules import NAMES, default_chunks

_WITHOUT_MICROBATCH = [Op.UNSHARD, Op.RESHARD, Op.REDUCE]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Op.F, 0)),
        ("10B511", Action(10, Op.B, 511)),
        ("0W3", Action(0, Op.W, 3)),
        ("2SEND_F0", Action(2, Op.SEND_F, 0)),
        ("3RECV_B12", Action(3, Op.RECV_B, 12)),
        ("2UNSHARD", Action(2, Op.UNSHARD)),
        ("2REDUCE", Action(2, Op.REDUCE, WHOLE_STEP)),
        ("2REDUCE7", Action(2, Op.REDUCE, 7)),
    ],
)
def test_text_form(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@given(st.integers(0, 9999), st.sampled_from(list(Op)), st.integers(0, 9999))
def test_every_action_comes_back_from_its_text(stage: int, op: Op, microbatch: int) -> None:
    action = Action(stage, op, WHOLE_STEP if op in _WITHOUT_MICROBATCH else microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F-1", "2F0 ", "2SEND0", "2SEND_F", "٢F0", "2F0x"],
)
def test_what_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="2F0"):
        Action.parse(text)


def test_peer_stage_is_the_other_end_of_the_message() -> None:
    assert Action.parse("2SEND_F0").peer_stage == 3
    assert Action.parse("3RECV_F0").peer_stage == 2
    assert Action.parse("3SEND_B0").peer_stage == 2
    assert Action.parse("2RECV_B0").peer_stage == 3


def test_loop_and_v_placement() -> None:
    loop = generate("interleaved", pipeline=4, chunks=2, num_microbatches=4)
    folded = generate("zb-v", pipeline=4, chunks=2, num_microbatches=4)
    assert [loop.owner(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [folded.owner(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert loop.stages(1) == (1, 5)
    assert folded.stages(1) == (1, 6)
    assert folded.stages(3) == (3, 4)
    assert [folded.chunk(stage) for stage in folded.stages(3)] == [0, 1]


@given(
    st.sampled_from(NAMES),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from(["no", "yes", "each"]),
)
def test_a_schedule_comes_back_from_its_text(name: str, p: int, m: int, lowered: str) -> None:
    schedule = generate(name, pipeline=p, chunks=default_chunks(name), num_microbatches=m)
    if lowered != "no":
        sync: GradientSync = "microbatch" if lowered == "each" else "step"
        schedule = lower(schedule, shard_parameters=True, gradient_sync=sync)
    assert Schedule.load(schedule.dump()) == schedule


def test_the_text_is_what_the_documentation_says() -> None:
    schedule = generate("1f1b", pipeline=2, chunks=1, num_microbatches=2)
    assert schedule.dump() == (
        "schedule=1f1b pipeline=2 chunks=1 num_microbatches=2 placement=loop fuse_backward=yes\n"
        "0: 0F0 0F1 0B0 0W0 0B1 0W1\n"
        "1: 1F0 1B0 1W0 1F1 1B1 1W1\n"
    )


_HEAD = "schedule=x pipeline=2 chunks=1 num_microbatches=1 placement=loop fuse_backward=yes\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one word each of"),
        ("0: 0F0\n1: 1F0\n", "one word each of"),
        (_HEAD + "0: 0F0\n", "1 lines of actions for pipeline=2"),
        (_HEAD + "0: 0F0\n2: 1F0\n", "should start with '1:'"),
        (_HEAD + "0: 0F0\n1: 1Q0\n", "'1Q0' is not an action"),
        (_HEAD.replace("pipeline=2", "pipeline=0"), "pipeline=0"),
        (_HEAD.replace("pipeline=2", "pipeline=two"), "pipeline=two"),
        (_HEAD.replace("loop", "ring") + "0:\n1:\n", "loop or v"),
        (_HEAD.replace("yes", "1") + "0:\n1:\n", "yes or no|no or yes|yes"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Schedule.load(text)


def test_an_empty_list_is_a_list() -> None:
    schedule = Schedule.load(_HEAD + "0:\n1: 1F0\n")
    assert schedule.ranks == ((), (Action(1, Op.F, 0),))
    assert Schedule.load(schedule.dump()) == schedule
    assert schedule.placement is Placement.LOOP
