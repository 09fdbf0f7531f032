"""The simulator against timelines worked out by hand and against the definition."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.errors import CheckFailed, UserError
from reparto.schedule.actions import Action, Op, Placement, Schedule
from reparto.schedule.generate import generate
from reparto.schedule.lower import lower
from reparto.schedule.rules import NAMES, default_chunks
from reparto.schedule.timing import Timeline, simulate


def made(name: str, p: int, m: int) -> Schedule:
    return generate(name, pipeline=p, chunks=default_chunks(name), num_microbatches=m)


def times(timeline: Timeline, rank: int) -> dict[str, tuple[float, float]]:
    rows = zip(
        timeline.schedule.ranks[rank],
        timeline.starts_s[rank],
        timeline.ends_s[rank],
        strict=True,
    )
    return {str(action): (start, end) for action, start, end in rows}


def test_two_ranks_by_hand() -> None:
    """1F1B, two microbatches; F 1, B 2, W 3, message 10.

    rank 0: F0 0-1, F1 1-2                      B0 27-29 W0 29-32, B1 33-35, W1 35-38
    rank 1: F0 11-12, B0 12-14, W0 14-17, F1 17-18, B1 18-20, W1 20-23
    The gradient of a full backward leaves with its W: at 17 and 23, and is there at 27 and 33.
    """
    timeline = simulate(made("1f1b", 2, 2), forward_s=1, backward_s=2, weight_s=3, message_s=10)
    first, second = times(timeline, 0), times(timeline, 1)
    assert first["0F1"] == (1, 2)
    assert first["0SEND_F1"] == (2, 2)
    assert first["0RECV_B0"] == (2, 27)
    assert first["0B0"] == (27, 29)
    assert first["0RECV_B1"] == (32, 33)
    assert first["0W1"] == (35, 38)
    assert second["1RECV_F0"] == (0, 11)
    assert second["1F0"] == (11, 12)
    assert second["1RECV_F1"] == (17, 17)
    assert second["1W1"] == (20, 23)
    assert timeline.step_s == 38
    assert timeline.busy_s == (12, 12)
    assert timeline.bubble_s == (26, 26)
    assert timeline.bubble_share == pytest.approx(26 / 38)
    assert timeline.bubble_share_by_rank == pytest.approx((26 / 38, 26 / 38))
    assert timeline.inner_idle_s == (26, 0)
    assert [peaks.live for peaks in timeline.peaks] == [2, 1]


def test_the_same_without_fusing_sends_earlier() -> None:
    """Zero-bubble lists send after B: at 14, there at 24 instead of 27."""
    timeline = simulate(made("zb-h1", 2, 2), forward_s=1, backward_s=2, weight_s=3, message_s=10)
    assert times(timeline, 0)["0RECV_B0"] == (2, 24)


def test_times_by_stage_and_by_border() -> None:
    """Three stages, one microbatch: every time is seen exactly once on the way down and back."""
    timeline = simulate(
        made("gpipe", 3, 1),
        forward_s=[1, 2, 4],
        backward_s=[8, 16, 32],
        weight_s=[64, 128, 256],
        message_s=[1000, 2000, 999_999],  # there is no border behind the last stage
    )
    forward = 1 + 1000 + 2 + 2000 + 4
    backward = 32 + 256 + 2000 + 16 + 128 + 1000 + 8 + 64
    assert timeline.step_s == forward + backward


def test_a_channel_delivers_in_order() -> None:
    """Both borders of rank 0 -> rank 1 share a channel: a fast message behind a slow one waits."""
    rows = ("0F0 2F0 2B0 0B0 0W0 2W0", "1F0 3F0 3B0 1B0 1W0 3W0")
    schedule = Schedule(
        name="by hand",
        num_ranks=2,
        num_chunks=2,
        num_microbatches=1,
        placement=Placement.LOOP,
        fuse_backward=False,
        ranks=tuple(tuple(map(Action.parse, row.split())) for row in rows),
    )
    timeline = simulate(schedule, message_s=[5, 50, 1, 0])
    # rank 1 sends 1F0's output at 7 (there at 57), then 3B0's gradient at 61
    assert times(timeline, 0)["2RECV_F0"] == (1, 57)
    assert times(timeline, 1)["3RECV_F0"] == (7, 59)
    # backward of stage 2 leaves rank 0 after 2F0's output did, over a 50 s border
    assert times(timeline, 1)["1RECV_B0"][1] == 63 + 50


def test_gathers_hold_up_their_stage_and_reductions_only_the_end() -> None:
    lowered = lower(made("1f1b", 2, 2), shard_parameters=True)
    timeline = simulate(lowered, unshard_s=7, reduce_s=[100, 1])
    assert times(timeline, 0)["0UNSHARD"] == (0, 7)
    assert times(timeline, 0)["0F0"] == (7, 8)
    assert times(timeline, 1)["1RECV_F0"] == (0, 8)
    plain = simulate(lowered, unshard_s=7)
    assert times(timeline, 0)["0REDUCE"] == (plain.step_s, plain.step_s + 100)
    assert timeline.step_s == plain.step_s + 100
    assert timeline.busy_s == plain.busy_s


def test_reductions_run_beside_computing_one_after_another() -> None:
    lowered = lower(made("1f1b", 1, 3), gradient_sync="microbatch")
    found = times(simulate(lowered, reduce_s=5), 0)
    assert found["0REDUCE0"] == (3, 8)
    assert found["0F1"] == (3, 4)
    assert found["0REDUCE1"] == (8, 13)
    assert found["0REDUCE2"] == (13, 18)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12), st.integers(0, 9999))
def test_every_timeline_obeys_the_definition(name: str, p: int, m: int, seed: int) -> None:
    """Random times for every stage: nothing starts before what it needs, ranks never overlap, and
    every F, B and W starts the moment both its rank and its input are free."""
    schedule = made(name, p, m)
    chance = random.Random(seed)
    stages = range(schedule.num_stages)
    cost = {op: [chance.uniform(0.1, 2) for _ in stages] for op in (Op.F, Op.B, Op.W)}
    message = chance.choice([0.0, 0.3, 5.0])
    timeline = simulate(
        schedule,
        forward_s=cost[Op.F],
        backward_s=cost[Op.B],
        weight_s=cost[Op.W],
        message_s=message,
    )
    start, end = {}, {}
    for rank in range(p):
        for action, begun, done in timeline.computing(rank):
            start[action], end[action] = begun, done
            assert done - begun == pytest.approx(cost[action.op][action.pipeline_stage])

    def arrival(action: Action, at: int) -> float:
        far = schedule.owner(action.pipeline_stage) != schedule.owner(at)
        if far and action.op is Op.B and schedule.fuse_backward:
            action = Action(action.pipeline_stage, Op.W, action.microbatch)
        return end[action] + (message if far else 0.0)

    for row in schedule.ranks:
        free = 0.0
        for action in row:
            stage, microbatch = action.pipeline_stage, action.microbatch
            ready = 0.0
            if action.op is Op.F and stage > 0:
                ready = arrival(Action(stage - 1, Op.F, microbatch), stage)
            elif action.op is Op.B and stage < stages[-1]:
                ready = arrival(Action(stage + 1, Op.B, microbatch), stage)
            assert start[action] == pytest.approx(max(free, ready))
            free = end[action]
    assert timeline.step_s == pytest.approx(max(end.values()))


@pytest.mark.parametrize("name", NAMES)
def test_slower_messages_never_help_and_free_ones_are_the_bound(name: str) -> None:
    steps = [simulate(made(name, 4, 9), message_s=s).step_s for s in (0, 0.1, 1, 10)]
    assert steps == sorted(steps)


def test_lists_that_cannot_run_are_refused() -> None:
    rows = ("0F0 0B0 0W0 0F1 0B1 0W1", "1F0 1F1 1B0 1W0 1B1 1W1")
    schedule = made("1f1b", 2, 2)
    broken = Schedule(
        name="by hand",
        num_ranks=2,
        num_chunks=1,
        num_microbatches=2,
        placement=schedule.placement,
        fuse_backward=False,
        ranks=tuple(tuple(map(Action.parse, row.split())) for row in rows),
    )
    with pytest.raises(CheckFailed, match="rank 0 waits for ever at 0RECV_B0"):
        simulate(broken)


@pytest.mark.parametrize("wrong", [[1.0], [1.0, 2.0, 3.0], [1.0, -1.0], -0.5])
def test_times_that_do_not_fit_are_refused(wrong: float | list[float]) -> None:
    with pytest.raises(UserError, match="one for each of 2 stages") as refused:
        simulate(made("1f1b", 2, 2), backward_s=wrong)
    assert refused.value.where == "backward_s"
