"""Proves that a schedule is a correct step, or names the first thing wrong with it.

Four questions, in this order, so that the first answer is the nearest to the cause:

1. *complete* and 2. *ordered*: each rank's list alone (`check_lists`);
3. *matched and free of deadlock*: the lowered lists are executed symbolically, with RECVs that wait
   and channels that deliver in order, until all are done or no rank can move;
4. *live activations*: the peaks of every rank (`live`).

One execution stands for all: a SEND does not wait and a RECV takes the next message of one named
channel, so the speed of the ranks changes when things happen and never whether they can. Rejected:
sorting the dependency graph topologically; it proves the order of computing and says nothing of
messages that meet in the wrong order.

Cost: linear; 64 stages x 512 microbatches, about 230,000 actions, take about 1 s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from reparto.schedule.actions import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Schedule
from reparto.schedule.check_lists import check_lists, fault
from reparto.schedule.live import Peaks, peaks_by_rank
from reparto.schedule.lower import lower

Channel = tuple[int, int]  # (source rank, destination rank)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `check` has proved."""

    schedule: Schedule
    """The lowered schedule that was executed symbolically."""
    num_actions: int
    """F, B and W of all ranks in one step."""
    num_messages: int
    """Messages between all ranks in one step; each is one SEND and one RECV."""
    peaks: tuple[Peaks, ...]
    """Live activations of each rank, in chunks: from F until W, from F until B, from B until W."""


def check(schedule: Schedule, *, sends: Literal["buffered", "synchronous"] = "buffered") -> Report:
    """A `Report`, or `CheckFailed` with rank, position, action, cause and the lists around it.

    A schedule that is not lowered is lowered first; one that is, is taken as it stands.
    `sends="synchronous"` asks for more than the executor needs: that the lists also run when every
    SEND waits until its receiver stands at the RECV. GPipe does; 1F1B, where two neighbours send to
    each other at the same time, does not.
    """
    check_lists(schedule)
    lowered = schedule if schedule.lowered else lower(schedule)
    if lowered is not schedule:
        check_lists(lowered)
    stuck = _synchronous(lowered) if sends == "synchronous" else _buffered(lowered)
    if stuck:
        raise _deadlock(lowered, stuck)
    borders = sum(one != next_ for one, next_ in pairwise(lowered.owners))
    return Report(
        schedule=lowered,
        num_actions=len(COMPUTE_OPS) * lowered.num_stages * lowered.num_microbatches,
        num_messages=2 * borders * lowered.num_microbatches,
        peaks=peaks_by_rank(lowered),
    )


def _buffered(schedule: Schedule) -> dict[int, int]:
    """Executes the lists; returns rank -> position of every rank that cannot reach its end."""
    owners = schedule.owners
    channels: dict[Channel, deque[Action]] = {}
    waiting: set[Channel] = set()
    positions = [0] * schedule.num_ranks
    runnable = list(range(schedule.num_ranks))
    while runnable:
        rank = runnable.pop()
        row = schedule.ranks[rank]
        position = positions[rank]
        while position < len(row):
            action = row[position]
            if action.op in SEND_OPS:
                channel = (rank, owners[action.peer_stage])
                channels.setdefault(channel, deque()).append(action)
                if channel in waiting:
                    waiting.remove(channel)
                    runnable.append(channel[1])
            elif action.op in RECV_OPS:
                channel = (owners[action.peer_stage], rank)
                messages = channels.get(channel)
                if not messages:
                    waiting.add(channel)
                    break
                sent = messages.popleft()
                if not _match(sent, action):
                    problem = f"{action} meets {sent}, the next message from rank {channel[0]}"
                    raise fault(schedule, rank, position, problem)
            position += 1
        positions[rank] = position
    return _unfinished(schedule, positions)


def _synchronous(schedule: Schedule) -> dict[int, int]:
    """As `_buffered`, but SEND and RECV pass only together."""
    owners = schedule.owners
    standing: dict[Channel, int] = {}  # one side has arrived, and which rank it is
    positions = [0] * schedule.num_ranks
    runnable = list(range(schedule.num_ranks))
    while runnable:
        rank = runnable.pop()
        row = schedule.ranks[rank]
        while positions[rank] < len(row):
            action = row[positions[rank]]
            if action.op in SEND_OPS or action.op in RECV_OPS:
                peer = owners[action.peer_stage]
                channel = (rank, peer) if action.op in SEND_OPS else (peer, rank)
                if standing.get(channel, rank) == rank:
                    standing[channel] = rank
                    break
                del standing[channel]
                other = schedule.ranks[peer][positions[peer]]
                if not _match(action, other):
                    problem = f"{action} meets {other} of rank {peer}"
                    raise fault(schedule, rank, positions[rank], problem)
                positions[peer] += 1
                runnable.append(peer)
            positions[rank] += 1
    return _unfinished(schedule, positions)


def _match(one: Action, other: Action) -> bool:
    """Whether a SEND and a RECV, known to be on one channel, are the same message."""
    return (
        one.peer_stage == other.pipeline_stage
        and other.peer_stage == one.pipeline_stage
        and one.microbatch == other.microbatch
    )


def _unfinished(schedule: Schedule, positions: list[int]) -> dict[int, int]:
    ends = (len(row) for row in schedule.ranks)
    both = enumerate(zip(positions, ends, strict=True))
    return {rank: position for rank, (position, end) in both if position < end}


def _deadlock(schedule: Schedule, stuck: dict[int, int]) -> Exception:
    """Follows who waits for whom until a rank comes up twice: that is the circle."""
    chain: list[int] = []
    rank = min(stuck)
    while rank in stuck and rank not in chain:
        chain.append(rank)
        rank = schedule.owners[schedule.ranks[rank][stuck[rank]].peer_stage]
    circle = chain[chain.index(rank) :] if rank in chain else chain
    waits = []
    for each in circle:
        action = schedule.ranks[each][stuck[each]]
        peer = schedule.owners[action.peer_stage]
        waits.append(f"rank {each} at {action} (position {stuck[each]}) waits for rank {peer}")
    problem = f"deadlock of {len(stuck)} ranks: {'; '.join(waits)}"
    return fault(schedule, circle[0], stuck[circle[0]], problem)
