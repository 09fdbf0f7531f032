"""The six schedules: complete and ordered for odd sizes, with the published bubble and memory.

The oracle is `played`, which knows only the definition of a pipeline (F after the previous stage's
F, B after the next stage's B, W after B, one thing at a time on a rank) and nothing of lowering.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.schedule.actions import COMPUTE_OPS, Action, Op, Schedule
from reparto.schedule.check import check
from reparto.schedule.generate import generate
from reparto.schedule.live import peaks_by_rank
from reparto.schedule.rules import NAMES, default_chunks, legal_chunks

Times = tuple[Fraction, Fraction, Fraction]
UNIT: Times = (Fraction(1), Fraction(1), Fraction(1))


def played(schedule: Schedule, times: Times = UNIT) -> tuple[Fraction, list[Fraction]]:
    """(length of the step, idle time inside each rank's own span), from the definition, exactly.

    Of a full backward (`fuse_backward`) the gradient arrives when its W is done.
    """
    cost = dict(zip((Op.F, Op.B, Op.W), times, strict=True))
    last = schedule.num_stages - 1
    ends: dict[Action, Fraction] = {}
    rows = [list(row) for row in schedule.ranks]
    now = [Fraction(0)] * len(rows)
    began: dict[int, Fraction] = {}
    busy = [Fraction(0)] * len(rows)

    def needs(action: Action) -> list[Action]:
        stage, microbatch = action.pipeline_stage, action.microbatch
        if action.op is Op.F:
            return [Action(stage - 1, Op.F, microbatch)] if stage else []
        if action.op is Op.W:
            return [Action(stage, Op.B, microbatch)]
        forward = Action(stage, Op.F, microbatch)
        if stage == last:
            return [forward]
        far = schedule.owner(stage + 1) != schedule.owner(stage)
        op = Op.W if schedule.fuse_backward and far else Op.B
        return [forward, Action(stage + 1, op, microbatch)]

    while any(rows):
        moved = False
        for rank, row in enumerate(rows):
            while row and all(needed in ends for needed in needs(row[0])):
                action = row.pop(0)
                start = max([now[rank], *(ends[needed] for needed in needs(action))])
                began.setdefault(rank, start)
                busy[rank] += cost[action.op]
                now[rank] = ends[action] = start + cost[action.op]
                moved = True
        assert moved, f"{schedule.name} cannot run"
    return max(now), [now[rank] - began[rank] - busy[rank] for rank in range(len(rows))]


def made(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    return generate(name, pipeline=p, chunks=v or default_chunks(name), num_microbatches=m)


sizes = st.tuples(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 40), st.integers(2, 4))


@settings(deadline=None, max_examples=80)
@given(sizes)
def test_any_size_is_complete_ordered_and_free_of_deadlock(size: tuple[str, int, int, int]) -> None:
    name, p, m, chunks = size
    v = legal_chunks(name).nearest(chunks)
    schedule = made(name, p, m, v)
    report = check(schedule)
    assert report.num_actions == 3 * p * v * m
    everything = [action for row in schedule.ranks for action in row]
    assert len(everything) == len(set(everything)) == 3 * p * v * m
    assert {action.op for action in everything} == set(COMPUTE_OPS)
    for rank, row in enumerate(schedule.ranks):
        assert {schedule.owner(action.pipeline_stage) for action in row} == {rank}
    played(schedule)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_is_plain_gradient_accumulation(name: str) -> None:
    schedule = generate(name, pipeline=1, chunks=1, num_microbatches=3)
    assert " ".join(map(str, schedule.ranks[0])) == "0F0 0B0 0W0 0F1 0B1 0W1 0F2 0B2 0W2"
    if 2 in legal_chunks(name):
        two = generate(name, pipeline=1, chunks=2, num_microbatches=2)
        assert " ".join(map(str, two.ranks[0])) == (
            "0F0 1F0 1B0 1W0 0B0 0W0 0F1 1F1 1B1 1W1 0B1 0W1"
        )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 5), (4, 4), (4, 10)])
def test_every_b_is_directly_followed_by_its_w(name: str, p: int, m: int) -> None:
    for row in made(name, p, m).ranks:
        for position, action in enumerate(row):
            if action.op is Op.B:
                after = row[position + 1]
                assert (after.pipeline_stage, after.op, after.microbatch) == (
                    action.pipeline_stage,
                    Op.W,
                    action.microbatch,
                )


# published bubbles, for F, B and W of everything a rank owns; p ranks, v chunks


def bubble(name: str, p: int, v: int, times: Times) -> Fraction:
    forward, backward, weight = times
    return (p - 1) * {
        "gpipe": forward + backward + weight,
        "1f1b": forward + backward + weight,
        "interleaved": (forward + backward + weight) / v,
        "zb-h1": max(forward, backward, forward + backward - weight),
        "zb-v": forward / 2,
        "dualpipe-v": forward / 2,
    }[name]


def excess(schedule: Schedule, times: Times) -> Fraction:
    """Idle time of a rank beyond the published bubble; `times` are of the whole rank."""
    v = schedule.num_chunks
    chunk = (times[0] / v, times[1] / v, times[2] / v)
    step, _ = played(schedule, chunk)
    idle = step - schedule.num_microbatches * sum(times)
    return idle - bubble(schedule.name, schedule.num_ranks, v, times)


@pytest.mark.parametrize("name", NAMES)
def test_published_bubble_in_slots_for_every_m_from_p_on(name: str) -> None:
    chunk_counts = [2, 3, 4] if name == "interleaved" else [default_chunks(name)]
    for p, v in product(range(2, 7), chunk_counts):
        for m in range(p, 3 * p + 2):
            times = (Fraction(v), Fraction(v), Fraction(v))
            assert excess(made(name, p, m, v), times) == 0, (p, v, m)


_positive = st.fractions(Fraction(1, 4), 4, max_denominator=8)
_half_to_whole = st.fractions(Fraction(1, 2), 1, max_denominator=8)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]),
    st.integers(2, 6),
    st.integers(0, 9),
    st.tuples(_positive, _positive, _positive),
)
def test_published_bubble_for_any_times(name: str, p: int, more: int, times: Times) -> None:
    assert excess(made(name, p, p + more), times) == 0


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["zb-v", "dualpipe-v"]), st.integers(2, 6), st.integers(0, 9), _half_to_whole
)
def test_bubble_of_a_v_with_short_weight_gradients(
    name: str, p: int, more: int, weight: Fraction
) -> None:
    times = (Fraction(1), Fraction(1), weight)
    assert excess(made(name, p, 2 * p - 1 + more), times) == 0


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("p", range(2, 8))
def test_no_rank_of_a_v_waits_once_it_has_started(name: str, p: int) -> None:
    for m in range(2 * p - 1, 4 * p):
        assert played(made(name, p, m))[1] == [0] * p, m


def test_the_published_table_for_four_ranks() -> None:
    """F=B=W=1 for a whole rank, p=4, m=8: the numbers in the generator's documentation."""
    found = {}
    for name in NAMES:
        schedule = made(name, 4, 8)
        chunk = Fraction(1, schedule.num_chunks)
        found[name] = played(schedule, (chunk, chunk, chunk))[0] - 24
    assert found == {
        "gpipe": 9,
        "1f1b": 9,
        "interleaved": Fraction(9, 2),
        "zb-h1": 3,
        "zb-v": Fraction(3, 2),
        "dualpipe-v": Fraction(3, 2),
    }


# memory, in chunks, live from F until W


def memory(name: str, p: int, v: int, m: int, rank: int) -> int:
    """The bound of the documentation; exact for the first three."""
    largest_group = -(-m // max(1, m // p))
    return {
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m * v, (v - 1) * largest_group + 2 * (p - 1 - rank) + 1),
        "zb-h1": min(m, p),
        "zb-v": min(2 * m, 2 * p),
        "dualpipe-v": min(2 * m, 2 * p + 1),
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_memory_bound_of_every_rank(name: str) -> None:
    exact = name in ("gpipe", "1f1b", "interleaved")
    chunk_counts = [2, 3] if name == "interleaved" else [default_chunks(name)]
    for p, v, m in product(range(2, 7), chunk_counts, range(1, 16)):
        for rank, peaks in enumerate(peaks_by_rank(made(name, p, m, v))):
            bound = memory(name, p, v, m, rank)
            assert peaks.live <= bound, (p, m, rank)
            assert peaks.live == bound or not exact, (p, m, rank)


def test_memory_beside_1f1b() -> None:
    """ZB-H1 and ZB-V on the worst rank as much as 1F1B; DualPipe-V half a rank's layers more."""
    worst = {}
    for name in NAMES:
        schedule = made(name, 8, 32)
        worst[name] = max(p.live for p in peaks_by_rank(schedule)) / schedule.num_chunks
    assert worst == {
        "gpipe": 32,
        "1f1b": 8,
        "interleaved": (8 + 14 + 1) / 2,
        "zb-h1": 8,
        "zb-v": 8,
        "dualpipe-v": 8.5,
    }


def test_dualpipe_v_puts_a_forward_beside_a_backward_of_the_other_chunk() -> None:
    """In the steady state every F is followed by such a B, on every rank; ZB-V has no such pair."""
    p, m = 4, 24
    for rank, row in enumerate(made("dualpipe-v", p, m).ranks):
        pairs = sum(
            first.op is Op.F and second.op is Op.B and first.pipeline_stage != second.pipeline_stage
            for first, second in pairwise(row)
        )
        steady = m - 2 * p + rank + 1
        assert pairs >= 2 * steady, rank


# fewer microbatches than stages, and numbers that stages do not divide


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("p", "m"), [(4, 1), (4, 2), (4, 3), (8, 1), (8, 3), (8, 7), (4, 5), (4, 6)]
)
def test_L15_fewer_microbatches_than_stages_never_hang(name: str, p: int, m: int) -> None:
    schedule = made(name, p, m)
    assert check(schedule).num_actions == 3 * schedule.num_stages * m
    step, _ = played(schedule)
    # never longer than sending the microbatches through one after another
    assert step <= 3 * schedule.num_stages * m
    if m == 1:  # one microbatch: down, back and the last weight gradient, nothing else
        assert step <= 3 * schedule.num_stages


@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_below_p_takes_the_time_of_its_longest_chain(v: int) -> None:
    for p in range(2, 7):
        for m in range(1, p):
            assert played(made("interleaved", p, m, v))[0] == 3 * (p * v + m - 1)
