"""From exit codes, last words and rings to one cause, with its consequences folded under it."""

from __future__ import annotations

import signal

import pytest

from reparto.recover.detect import describe, first_difference
from reparto.trace import Collective, Kind, Record, Ring

RingState = tuple[int, int, list[Record]]


class StillClock:
    def now_ns(self) -> int:
        return 1


def ring_at(
    rank: int, step: int, *done: str, open_: str = "", kind: Kind = Kind.COLLECTIVE
) -> RingState:
    """A rank's ring: finished all_reduces, and perhaps one piece of work it is still in."""
    ring = Ring(None, rank=rank, capacity=16, clock=StillClock())
    ring.set_step(step)
    for tag in done:
        ring.end(ring.start(Kind.COLLECTIVE, tag, op=Collective.ALL_REDUCE))
    if open_:
        op = Collective.ALL_REDUCE if kind is Kind.COLLECTIVE else Collective.NONE
        ring.start(kind, open_, op=op)
    return rank, step, ring.records()


def words(message: str, *, time_s: float, secondary: bool = False, exit_code: int = 4,
          where: dict[str, str] | None = None) -> dict[str, object]:  # fmt: skip
    return {
        "kind": "Fault",
        "message": message,
        "exit_code": exit_code,
        "secondary": secondary,
        "time_s": time_s,
        "where": where or {},
    }


def test_a_killed_rank_is_the_cause_of_errors_that_were_told_before_it_was_noticed() -> None:
    rings = {
        0: ring_at(0, 41, "gradient 0", open_="gradient 1"),
        1: ring_at(1, 41, "gradient 0"),
        2: ring_at(2, 41, open_="gradient 0"),
    }
    found = describe(
        exits={0: 4, 1: -signal.SIGKILL, 2: 4},
        errors={
            0: words("collective `gradient 1` failed: connection reset", time_s=9.0,
                     secondary=True),
            2: words("collective `gradient 0` failed: connection closed", time_s=8.0,
                     secondary=True),
        },
        rings=rings,
    )  # fmt: skip
    assert [one.rank for one in found] == [1, 2, 0]
    cause, *consequences = found
    assert cause.message == (
        "was killed (signal 9, SIGKILL); probably out of memory, or killed by hand"
    )
    assert cause.step == 41 and cause.exit_code == 4 and not cause.secondary
    assert cause.doing == "after all_reduce `gradient 0` (collective 0)"
    assert all(one.secondary for one in consequences)
    assert consequences[1].doing == "all_reduce `gradient 1` (collective 1)"


def test_the_earliest_error_that_is_not_the_loss_of_a_peer_is_the_cause() -> None:
    found = describe(
        exits={0: 4, 1: 4, 2: 4, 3: -signal.SIGTERM},
        errors={
            0: words("peer lost", time_s=1.0, secondary=True),
            1: words("a second error", time_s=3.0),
            2: words("the first error", time_s=2.0),
        },
        rings={},
    )
    assert [one.message for one in found[:3]] == ["the first error", "a second error", "peer lost"]
    assert found[3].rank == 3 and found[3].secondary  # we ended it after the others had failed


def test_a_users_error_keeps_its_status_and_its_fields() -> None:
    where = {"what": "3 is too few", "where": "data.batch_size", "legal": ">= 4", "nearest": "4"}
    (failure,) = describe({1: 2}, {1: words("3 is too few", time_s=1.0, exit_code=2, where=where)},
                          {})  # fmt: skip
    assert failure.exit_code == 2 and failure.where == where and not failure.secondary
    assert (failure.step, failure.doing) == (0, "starting")


def test_a_rank_that_left_without_a_word_is_told_after_those_that_spoke() -> None:
    found = describe({0: 1, 1: 4}, {1: words("no space left", time_s=5.0)}, {})
    assert [one.rank for one in found] == [1, 0]
    assert found[1].message == "ended with status 1 and left no message; see its log"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-signal.SIGSEGV, "was killed (signal 11, SIGSEGV)"),
        (-signal.SIGABRT, "was killed (signal 6, SIGABRT)"),
        (-signal.SIGKILL, "was killed (signal 9, SIGKILL); probably out of memory, or killed by "
         "hand"),
        (-250, "was killed (signal 250, unknown)"),
    ],
)  # fmt: skip
def test_signals_are_named(code: int, says: str) -> None:
    (failure,) = describe({3: code}, {}, {})
    assert (failure.rank, failure.message, failure.secondary) == (3, says, False)


@pytest.mark.parametrize(
    ("state", "doing"),
    [
        (ring_at(0, 5), "starting"),
        (ring_at(0, 5, "a"), "after all_reduce `a` (collective 0)"),
        (ring_at(0, 5, "a", open_="word"), "all_reduce `word` (collective 1)"),
        (ring_at(0, 5, open_="loader", kind=Kind.DATA_WAIT), "in waiting for data `loader`"),
        (ring_at(0, 5, open_="adamw", kind=Kind.OPTIMIZER), "in update `adamw`"),
        (ring_at(0, 5, open_="step-5", kind=Kind.SAVE), "in save `step-5`"),
    ],
)
def test_what_a_rank_was_doing_comes_from_its_ring(state: RingState, doing: str) -> None:
    (failure,) = describe({0: -signal.SIGKILL}, {}, {0: state})
    assert failure.doing == doing
    assert failure.step == 5


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_of_work_has_words(kind: Kind) -> None:
    (failure,) = describe({0: -9}, {}, {0: ring_at(0, 2, open_="this", kind=kind)})
    assert "`this`" in failure.doing and "work" not in failure.doing


def test_nobody_failed() -> None:
    assert describe({}, {}, {}) == ()


# --- the first difference ------------------------------------------------------------------------


def issued(rank: int, *collectives: tuple[int, str, int]) -> RingState:
    """A ring of (step, tag, digest)."""
    ring = Ring(None, rank=rank, capacity=16, clock=StillClock())
    for step, tag, digest in collectives:
        ring.set_step(step)
        ring.end(ring.start(Kind.COLLECTIVE, tag, op=Collective.ALL_REDUCE, digest=digest))
    return rank, collectives[-1][0] if collectives else 0, ring.records()


def test_L51_the_first_collective_that_departs_is_named_with_both_sides() -> None:
    rings = {
        0: issued(0, (6, "x", 1), (7, "head", 5), (7, "a", 2), (7, "b", 3)),
        1: issued(1, (6, "x", 1), (7, "head", 5), (7, "b", 3), (7, "a", 2)),
    }
    assert first_difference(rings, 6) == ""
    assert first_difference(rings, 7) == (
        "step 7, collective 1 of the step: rank 0: all_reduce `a` (collective 2); "
        "rank 1: all_reduce `b` (collective 2)"
    )


def test_a_rank_that_did_fewer_is_told_as_nothing() -> None:
    rings = {
        0: issued(0, (7, "a", 2), (7, "b", 3)),
        1: issued(1, (7, "a", 2), (7, "b", 3)),
        2: issued(2, (7, "a", 2)),
    }
    told = first_difference(rings, 7)
    assert told == (
        "step 7, collective 1 of the step: rank 0: all_reduce `b` (collective 1); rank 2: nothing"
    )


def test_messages_between_pairs_and_equal_work_are_no_difference() -> None:
    rings = {
        0: issued(0, (7, "to the next stage", 0), (7, "a", 2)),
        1: issued(1, (7, "a", 2)),
    }
    assert first_difference(rings, 7) == ""
    assert first_difference({}, 7) == ""
