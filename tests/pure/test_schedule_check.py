"""`check` accepts what is right and names what is wrong: rank, position, action and its want."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reparto.errors import CheckFailed
from reparto.schedule.actions import Action, Op, Placement, Schedule
from reparto.schedule.check import check
from reparto.schedule.describe import describe
from reparto.schedule.generate import generate
from reparto.schedule.live import peaks, peaks_by_rank
from reparto.schedule.lower import GradientSync, lower
from reparto.schedule.rules import NAMES, default_chunks

Rows = list[list[Action]]


def made(name: str, p: int, m: int) -> Schedule:
    return generate(name, pipeline=p, chunks=default_chunks(name), num_microbatches=m)


def rows_of(schedule: Schedule) -> Rows:
    return [list(row) for row in schedule.ranks]


def with_rows(schedule: Schedule, rows: Rows) -> Schedule:
    return replace(schedule, ranks=tuple(map(tuple, rows)))


def refusal(schedule: Schedule) -> str:
    with pytest.raises(CheckFailed) as failed:
        check(schedule)
    assert failed.value.exit_code == 3
    return str(failed.value)


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def by_hand(*rows: str, chunks: int = 1, placement: Placement = Placement.LOOP) -> Schedule:
    lists = tuple(map(actions, rows))
    return Schedule(
        name="by hand",
        num_ranks=len(rows),
        num_chunks=chunks,
        num_microbatches=1 + max(a.microbatch for row in lists for a in row),
        placement=placement,
        fuse_backward=False,
        ranks=lists,
    )


# what is right


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_the_report(name: str) -> None:
    schedule = made(name, 4, 6)
    report = check(schedule)
    stages = schedule.num_stages
    borders = stages - 1 - (1 if name in ("zb-v", "dualpipe-v") else 0)  # the turn needs none
    assert report.num_actions == 3 * stages * 6
    assert report.num_messages == 2 * borders * 6
    assert report.num_messages == sum(
        action.op in (Op.SEND_F, Op.SEND_B) for row in report.schedule.ranks for action in row
    )
    assert report.schedule == lower(schedule)
    assert report.peaks == peaks_by_rank(schedule)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_lowered_schedules_pass_as_they_are(name: str, sync: GradientSync) -> None:
    for p, m in [(1, 3), (2, 2), (3, 7)]:
        lowered = lower(made(name, p, m), shard_parameters=True, gradient_sync=sync)
        assert check(lowered).schedule is lowered


def test_blocking_sends_suit_gpipe_and_deadlock_1f1b() -> None:
    """Two neighbours of 1F1B send to each other at the same moment."""
    for p, m in [(2, 4), (4, 4), (4, 9)]:
        check(made("gpipe", p, m), sends="synchronous")
        with pytest.raises(CheckFailed, match=r"deadlock of \d ranks: rank \d at \dSEND_"):
            check(made("1f1b", p, m), sends="synchronous")


def test_another_order_of_microbatches_is_no_fault() -> None:
    check(by_hand("0F0 0F1 0B1 0W1 0B0 0W0", "1F1 1B1 1W1 1F0 1B0 1W0"))


# live activations


def test_live_activations_of_a_list_by_hand() -> None:
    row = actions("0F0 0F1 0B0 0B1 0F2 0W0 0W1 0B2 0W2")
    found = peaks(row)
    assert (found.live, found.until_backward, found.deferred) == (3, 2, 2)


def test_live_activations_in_bytes() -> None:
    row = actions("0F0 5F0 0F1 5B0 5W0 5F1 0B0 0W0")
    assert peaks(row).live == 3
    sizes = [10.0, 0, 0, 0, 0, 3.0]
    assert peaks(row, sizes).live == 10 + 10 + 3
    assert peaks(row, sizes).deferred == 10


def test_live_until_b_is_less_only_where_w_is_put_off() -> None:
    for name in ("gpipe", "1f1b", "interleaved"):
        for found in peaks_by_rank(made(name, 4, 8)):
            assert found.live == found.until_backward
            assert found.deferred == 1
    # zb-h1: rank r holds p-r until B as 1F1B does, and puts r weight gradients off to hold p
    for rank, found in enumerate(peaks_by_rank(made("zb-h1", 4, 8))):
        assert (found.live, found.until_backward) == (4, 4 - rank)
        assert found.deferred == rank + 1


# what is wrong, one of each kind, on any schedule


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.data())
def test_a_dropped_action_is_named(
    name: str, p: int, m: int, lowered: bool, data: st.DataObject
) -> None:
    schedule = made(name, p, m)
    schedule = lower(schedule) if lowered else schedule
    rows = rows_of(schedule)
    rank = data.draw(st.integers(0, p - 1))
    action = rows[rank].pop(data.draw(st.integers(0, len(rows[rank]) - 1)))
    # without its only REDUCE a schedule of one rank is the whole one before lowering
    assume(with_rows(schedule, rows).lowered == lowered)
    said = refusal(with_rows(schedule, rows))
    assert f"{action} is missing" in said
    assert f"rank {rank}" in said.splitlines()[0]
    assert [line for line in said.splitlines() if line.startswith(f"> rank {rank} ")]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.data())
def test_a_doubled_action_is_named(
    name: str, p: int, m: int, lowered: bool, data: st.DataObject
) -> None:
    schedule = made(name, p, m)
    schedule = lower(schedule) if lowered else schedule
    rows = rows_of(schedule)
    rank = data.draw(st.integers(0, p - 1))
    first = data.draw(st.integers(0, len(rows[rank]) - 1))
    second = data.draw(st.integers(first + 1, len(rows[rank])))
    rows[rank].insert(second, rows[rank][first])
    said = refusal(with_rows(schedule, rows))
    assert said.startswith(
        f"schedule {name}: rank {rank}, position {second}: {rows[rank][second]} stands here again, "
        f"first at position {first}"
    )
    assert f"[{rows[rank][second]}]" in said


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.data())
def test_two_dependent_actions_swapped_are_named(
    name: str, p: int, m: int, lowered: bool, data: st.DataObject
) -> None:
    """F and B, or B and W, of one stage and microbatch change places."""
    schedule = made(name, p, m)
    schedule = lower(schedule) if lowered else schedule
    rows = rows_of(schedule)
    rank = data.draw(st.integers(0, p - 1))
    row = rows[rank]
    weights = [position for position, action in enumerate(row) if action.op is Op.W]
    later = data.draw(st.sampled_from(weights))
    stage, microbatch = row[later].pipeline_stage, row[later].microbatch
    backward = row.index(Action(stage, Op.B, microbatch))
    if data.draw(st.booleans()):
        first, second = row.index(Action(stage, Op.F, microbatch)), backward
    else:
        first, second = backward, later
    row[first], row[second] = row[second], row[first]
    said = refusal(with_rows(schedule, rows))
    assert re.match(rf"schedule {name}: rank {rank}, position \d+: ", said)
    assert "which comes later" in said


@pytest.mark.parametrize("name", NAMES)
def test_an_action_on_the_wrong_rank_is_named(name: str) -> None:
    schedule = made(name, 3, 4)
    rows = rows_of(schedule)
    rows[0].insert(2, rows[1].pop())
    said = refusal(with_rows(schedule, rows))
    assert f"{rows[0][2]} belongs to rank 1" in said
    assert "rank 0, position 2" in said


def test_stages_and_microbatches_that_do_not_exist() -> None:
    schedule = made("1f1b", 2, 2)
    for word, said in [
        ("2F0", "2F0 names stage 2, there are 0 to 1"),
        ("0F2", "0F2 names microbatch 2, there are 0 to 1"),
        ("7UNSHARD", "7UNSHARD names stage 7"),
        ("1RESHARD", "1RESHARD belongs to rank 1"),
        ("0RECV_F0", "0RECV_F0 is a message within one rank or beyond the ends"),
    ]:
        rows = rows_of(schedule)
        rows[0].append(Action.parse(word))
        assert said in refusal(with_rows(schedule, rows))


def test_a_wrong_number_of_lists() -> None:
    schedule = made("1f1b", 3, 2)
    assert "2 lists for 3 ranks" in refusal(replace(schedule, ranks=schedule.ranks[:2]))


# deadlock and messages


def test_a_circle_of_ranks_is_named_link_by_link() -> None:
    """Rank 0 wants the gradient of 0 before it sends 1; rank 1 wants 1 before it gives it."""
    said = refusal(by_hand("0F0 0B0 0W0 0F1 0B1 0W1", "1F0 1F1 1B0 1W0 1B1 1W1"))
    assert said.startswith(
        "schedule by hand: rank 0, position 2: deadlock of 2 ranks: "
        "rank 0 at 0RECV_B0 (position 2) waits for rank 1; "
        "rank 1 at 1RECV_F1 (position 2) waits for rank 0"
    )
    assert "[0RECV_B0]" in said


def test_a_circle_that_others_wait_behind() -> None:
    """Ranks 1 and 2 wait for each other; rank 0 only waits behind them and is not accused."""
    said = refusal(
        by_hand(
            "0F0 0F1 0B0 0W0 0B1 0W1",
            "1F0 1B0 1W0 1F1 1B1 1W1",
            "2F0 2F1 2B0 2W0 2B1 2W1",
        )
    )
    assert "deadlock of 3 ranks: rank 1 at" in said
    assert "rank 0 at" not in said


def test_the_turn_of_a_v_is_a_need_within_one_rank() -> None:
    said = refusal(
        by_hand(
            "0F0 3F0 3B0 3W0 0B0 0W0", "2F0 1F0 2B0 2W0 1B0 1W0", chunks=2, placement=Placement.V
        )
    )
    assert "rank 1, position 0: 2F0 waits for 1F0, which comes later, at position 1" in said


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpipe"])
def test_receives_in_another_order_than_the_sends(name: str) -> None:
    lowered = lower(made(name, 2, 3))
    rows = rows_of(lowered)
    receives = [i for i, action in enumerate(rows[1]) if action.op in (Op.RECV_F, Op.RECV_B)]
    one, two = receives[:2]
    # both early enough for their use, in the wrong order
    second = rows[1].pop(two)
    rows[1].insert(one, second)
    said = refusal(with_rows(lowered, rows))
    assert re.search(
        rf"rank 1, position {one}: {second} meets \d+SEND_\w\d+, the next message", said
    )


def test_a_send_before_what_it_sends() -> None:
    lowered = lower(made("1f1b", 2, 2))
    rows = rows_of(lowered)
    rows[0][0], rows[0][1] = rows[0][1], rows[0][0]
    assert "0SEND_F0 waits for 0F0, which comes later" in refusal(with_rows(lowered, rows))


@pytest.mark.parametrize(
    ("move", "said"),
    [
        ("0REDUCE", "0REDUCE waits for 0W2, which comes later"),
        ("0UNSHARD", "needs the parameters of stage 0, which are sharded here"),
        ("0RESHARD", "needs the parameters of stage 0, which are sharded here"),
    ],
)
def test_whole_stage_actions_at_the_wrong_place(move: str, said: str) -> None:
    lowered = lower(made("1f1b", 2, 3), shard_parameters=True)
    rows = rows_of(lowered)
    rows[0].remove(Action.parse(move))
    rows[0].insert(6, Action.parse(move))
    assert said in refusal(with_rows(lowered, rows))


def test_unshard_and_reshard_alternate() -> None:
    lowered = lower(made("1f1b", 2, 3), shard_parameters=True)
    for word, at, said in [
        ("0UNSHARD", 4, "stage 0 is unsharded already"),
        ("0RESHARD", 0, "stage 0 is not unsharded"),
        ("0UNSHARD", len(lowered.ranks[0]), "stage 0 is never resharded"),
    ]:
        rows = rows_of(lowered)
        rows[0].insert(at, Action.parse(word))
        assert said in refusal(with_rows(lowered, rows))


def test_reducing_by_step_and_by_microbatch_do_not_mix() -> None:
    lowered = lower(made("1f1b", 2, 3), gradient_sync="microbatch")
    rows = rows_of(lowered)
    rows[0].append(Action.parse("0REDUCE"))
    assert "0REDUCE reduces the whole step" in refusal(with_rows(lowered, rows))


def test_the_grid_stays_readable_for_many_ranks() -> None:
    schedule = made("1f1b", 64, 8)
    rows = rows_of(schedule)
    rows[40].pop(9)
    said = refusal(with_rows(schedule, rows)).splitlines()
    assert len(said) < 20
    assert max(map(len, said)) < 140
    assert any(line.startswith("> rank 40") for line in said)
    assert "more ranks" in said[-1]


# shuffles: whatever check accepts must really run


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(1, 4), st.integers(0, 10_000))
def test_shuffled_lists_are_accepted_only_if_they_can_run(
    name: str, p: int, m: int, seed: int
) -> None:
    schedule = made(name, p, m)
    rows = rows_of(schedule)
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 4)):
        row = chance.choice(rows)
        i = chance.randrange(len(row) - 1)
        row[i], row[i + 1] = row[i + 1], row[i]
    changed = with_rows(schedule, rows)
    try:
        check(changed)
        accepted = True
    except CheckFailed:
        accepted = False
    assert accepted == _can_run(changed)


def _can_run(schedule: Schedule) -> bool:
    """From the definition, without messages."""
    rows = [list(row) for row in schedule.ranks]
    done: set[Action] = set()
    last = schedule.num_stages - 1
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row:
                stage, op, microbatch = row[0].pipeline_stage, row[0].op, row[0].microbatch
                needs = {
                    Op.F: [Action(stage - 1, Op.F, microbatch)] if stage else [],
                    Op.B: [Action(stage, Op.F, microbatch)]
                    + ([Action(stage + 1, Op.B, microbatch)] if stage < last else []),
                    Op.W: [Action(stage, Op.B, microbatch)],
                }[op]
                # a gradient that leaves with its fused W is not there before it
                far = stage < last and schedule.owner(stage + 1) != schedule.owner(stage)
                if op is Op.B and far and schedule.fuse_backward:
                    other = schedule.ranks[schedule.owner(stage + 1)]
                    at = other.index(Action(stage + 1, Op.B, microbatch))
                    weight = Action(stage + 1, Op.W, microbatch)
                    if at + 1 < len(other) and other[at + 1] == weight:
                        needs.append(weight)
                if not done.issuperset(needs):
                    break
                done.add(row.pop(0))
                moved = True
    return not any(rows)


def test_figures_for_json() -> None:
    found = describe(made("zb-v", 4, 8))
    assert found["name"] == "zb-v"
    assert found["step_slots"] == 51
    assert found["bubble_share"] == pytest.approx(3 / 51)
    assert found["inner_idle_slots"] == [0, 0, 0, 0]
    assert found["peak_live_activations"] == [8, 8, 8, 8]
    assert found["full_activations"] == 4
    assert found["num_messages"] == 2 * 6 * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_64_stages_and_512_microbatches(name: str) -> None:
    """The time is printed for the record; a busy machine must not fail a test."""
    chunks = default_chunks(name)
    begun = time.process_time()
    schedule = generate(name, pipeline=64 // chunks, chunks=chunks, num_microbatches=512)
    generated = time.process_time()
    lowered = lower(schedule, shard_parameters=True)
    inserted = time.process_time()
    report = check(lowered)
    checked = time.process_time()
    print(
        f"{name}: generate {generated - begun:.2f} s, lower {inserted - generated:.2f} s, "
        f"check {checked - inserted:.2f} s of processor time"
    )
    assert report.num_actions == 3 * 64 * 512
