"""When every action starts and ends, given how long each one takes.

Runs over the same lowered lists as the executor, so a predicted and a measured timeline have the
same rows and the same positions. The model: a rank computes in list order, one action at a time; a
SEND takes no time of the rank; the matching RECV ends `message_s` after the SEND was issued, or
when it is reached if that is later; a channel delivers in order. Parameter gathers and gradient
reductions run beside computing on one lane of each rank, one after another: an UNSHARD holds up the
first action of its stage, a REDUCE only the end of the step.

One pass, linear in the number of actions: 64 stages x 512 microbatches, about 230,000 actions, take
0.5 s. Rejected: a longest-path solver over the dependency graph, which is the same numbers from a
graph that has to be built first; and a global event queue, which sorts what list order has sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reparto.errors import CheckFailed, UserError
from reparto.schedule.actions import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op, Schedule
from reparto.schedule.live import Peaks, peaks_by_rank
from reparto.schedule.lower import lower


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Start and end of every action of one step: simulated, or measured by an executor."""

    schedule: Schedule
    """The lowered schedule; `schedule.ranks[rank][i]` is the action whose times stand at
    `starts_s[rank][i]` and `ends_s[rank][i]`."""
    starts_s: tuple[tuple[float, ...], ...]
    """Seconds since the start of the step, for each rank and action. A RECV starts when the rank
    reaches it."""
    ends_s: tuple[tuple[float, ...], ...]
    """Seconds since the start of the step. A RECV ends when its message is there."""

    @cached_property
    def step_s(self) -> float:
        """Seconds from the start of the step to the end of its last action on any rank."""
        return max((end for row in self.ends_s for end in row), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes (F, B and W)."""
        return tuple(sum(end - start for _, start, end in self.computing(r)) for r in self._ranks)

    @cached_property
    def bubble_s(self) -> tuple[float, ...]:
        """Seconds of the step in which each rank does not compute, for whatever reason."""
        return tuple(self.step_s - busy for busy in self.busy_s)

    @cached_property
    def bubble_share(self) -> float:
        """Idle share of all ranks' time in the step, 0 to 1."""
        whole = self.step_s * self.schedule.num_ranks
        return sum(self.bubble_s) / whole if whole else 0.0

    @cached_property
    def bubble_share_by_rank(self) -> tuple[float, ...]:
        """Idle share of each rank's time in the step, 0 to 1."""
        return tuple(idle / self.step_s if self.step_s else 0.0 for idle in self.bubble_s)

    @cached_property
    def inner_idle_s(self) -> tuple[float, ...]:
        """Seconds each rank waits between its own first and last action: the bubble as the zero
        bubble papers count it, where ranks start and finish one after another."""
        idle = []
        for rank in self._ranks:
            spans = self.computing(rank)
            idle.append(spans[-1][2] - spans[0][1] - self.busy_s[rank] if spans else 0.0)
        return tuple(idle)

    @cached_property
    def peaks(self) -> tuple[Peaks, ...]:
        """Live activations of each rank, in chunks."""
        return peaks_by_rank(self.schedule)

    def computing(self, rank: int) -> list[tuple[Action, float, float]]:
        """(action, start_s, end_s) of every F, B and W of a rank, in order."""
        times = zip(self.schedule.ranks[rank], self.starts_s[rank], self.ends_s[rank], strict=True)
        return [span for span in times if span[0].op in COMPUTE_OPS]

    @property
    def _ranks(self) -> range:
        return range(self.schedule.num_ranks)


PerStage = float | Sequence[float]


def simulate(
    schedule: Schedule,
    *,
    forward_s: PerStage = 1.0,
    backward_s: PerStage = 1.0,
    weight_s: PerStage = 1.0,
    message_s: PerStage = 0.0,
    unshard_s: PerStage = 0.0,
    reduce_s: PerStage = 0.0,
) -> Timeline:
    """The timeline of one step; lowers the schedule first if nobody has.

    Every time is seconds, one number or one for each virtual stage. `backward_s` is the input
    gradient alone; a full backward takes `backward_s + weight_s`. `message_s[stage]` is a message
    between `stage` and `stage + 1`, in either direction. Raises `CheckFailed` when the lists cannot
    run to their end; `check` says why.
    """
    if not schedule.lowered:
        schedule = lower(schedule)
    message = _per_stage(schedule, "message_s", message_s)
    costs = {
        Op.F: _per_stage(schedule, "forward_s", forward_s),
        Op.B: _per_stage(schedule, "backward_s", backward_s),
        Op.W: _per_stage(schedule, "weight_s", weight_s),
        Op.UNSHARD: _per_stage(schedule, "unshard_s", unshard_s),
        Op.REDUCE: _per_stage(schedule, "reduce_s", reduce_s),
        Op.RESHARD: [0.0] * schedule.num_stages,
    }
    owner = schedule.owners
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    ends: list[list[float]] = [[] for _ in schedule.ranks]
    now = [0.0] * schedule.num_ranks
    lane = [0.0] * schedule.num_ranks  # when the collectives of a rank are done
    gathered = [0.0] * schedule.num_stages  # when the parameters of a stage are there
    arrivals: dict[tuple[int, int], list[float]] = {}  # channel (source, destination)
    taken: dict[tuple[int, int], int] = {}
    positions = [0] * schedule.num_ranks

    runnable = list(range(schedule.num_ranks - 1, -1, -1))
    waiting: dict[tuple[int, int], int] = {}
    while runnable:
        rank = runnable.pop()
        row, time_s = schedule.ranks[rank], now[rank]
        row_starts, row_ends = starts[rank], ends[rank]
        position = positions[rank]
        while position < len(row):
            action = row[position]
            stage, op = action.pipeline_stage, action.op
            if op in COMPUTE_OPS:
                start_s = time_s if gathered[stage] <= time_s else gathered[stage]
                end_s = time_s = start_s + costs[op][stage]
            elif op in SEND_OPS:
                peer = action.peer_stage
                channel = (rank, owner[peer])
                queue = arrivals.setdefault(channel, [0.0])
                queue.append(max(queue[-1], time_s + message[min(stage, peer)]))
                if channel in waiting:
                    runnable.append(waiting.pop(channel))
                start_s = end_s = time_s
            elif op in RECV_OPS:
                channel = (owner[action.peer_stage], rank)
                queue = arrivals.get(channel, [])
                number = taken.get(channel, 0) + 1
                if number >= len(queue):
                    waiting[channel] = rank
                    break
                taken[channel] = number
                start_s = time_s
                end_s = time_s = max(time_s, queue[number])
            else:
                start_s = max(time_s, lane[rank])
                end_s = lane[rank] = start_s + costs[op][stage]
                if op is Op.UNSHARD:
                    gathered[stage] = end_s
            row_starts.append(start_s)
            row_ends.append(end_s)
            position += 1
        now[rank], positions[rank] = time_s, position
    stuck = [rank for rank, row in enumerate(schedule.ranks) if positions[rank] < len(row)]
    if stuck:
        at = schedule.ranks[stuck[0]][positions[stuck[0]]]
        raise CheckFailed(f"{schedule.name}: rank {stuck[0]} waits for ever at {at}")
    return Timeline(
        schedule=schedule,
        starts_s=tuple(map(tuple, starts)),
        ends_s=tuple(map(tuple, ends)),
    )


def _per_stage(schedule: Schedule, name: str, value: PerStage) -> Sequence[float]:
    values = [value] * schedule.num_stages if isinstance(value, int | float) else value
    if len(values) != schedule.num_stages or min(values) < 0:
        raise UserError(
            f"{len(values)} values, least {min(values, default=0)}",
            where=name,
            legal=f"one number, or one for each of {schedule.num_stages} stages, none below 0",
        )
    return values
