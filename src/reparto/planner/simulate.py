"""The timeline of a plan's step: the executor's own action lists, timed with predicted costs.

`schedule/timing.py` runs the lowered lists; this file supplies the seconds of every virtual stage's
F, B and W (tensor, context and expert collectives inside), of the messages between stages, and of
the data-parallel reductions beside the last backward. So a predicted and a measured timeline have
the same rows, and row by row they can be compared.

The closed form in `step.py` assumes that the slowest rank is never starved except in the ramp. The
simulation does not: it sees uneven stages, messages that arrive late, and schedules with gaps. It
costs 0.1 to 1 s for large plans, so a search simulates its best twenty only.

Ranks are never equally fast. With per-rank speeds spread by a log-normal of width s, the slowest of
n is about exp(s sqrt(2 ln n)) slower (extreme values of a normal sample), and a synchronous step
waits for it: `straggler_factor`. `step_quantiles` draws such speeds for the pipeline's ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from reparto.planner.job import Job
from reparto.planner.stages import stage_list
from reparto.planner.step import Predictor, StepTime
from reparto.schedule.actions import COMPUTE_OPS
from reparto.schedule.timing import Timeline, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One action of one rank, as the trace writes it."""

    rank: int
    "position on the pipeline axis"
    name: str
    "the action's text form: 2F0, 2B0, 2W0, 2SEND_F0, ..."
    start_s: float
    "seconds since the start of the step"
    end_s: float
    "seconds since the start of the step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """One simulated step."""

    step_s: float
    "whole step, update and fixed part included"
    pipeline_s: float
    "first forward to last action of the pipeline"
    bubble_share: float
    "idle share of all pipeline ranks' time, 0 to 1"
    timeline: Timeline
    "every action's start and end"

    def spans(self) -> list[Span]:
        """All actions that take time, rank by rank."""
        rows = zip(
            self.timeline.schedule.ranks, self.timeline.starts_s, self.timeline.ends_s, strict=True
        )
        return [
            Span(rank=rank, name=str(action), start_s=start, end_s=end)
            for rank, (actions, starts, ends) in enumerate(rows)
            for action, start, end in zip(actions, starts, ends, strict=True)
            if end > start or action.op in COMPUTE_OPS
        ]


def simulate_step(
    job: Job, predictor: Predictor, *, closed: StepTime | None = None, speeds: Sequence[float] = ()
) -> Simulated:
    """Run the plan's action lists with predicted costs.

    closed  what `Predictor.step` said of the same job, if known
    speeds  slow-down factor of each pipeline rank, 1 is nominal; empty: all nominal
    """
    plan = job.plan
    closed = closed or predictor.step(job)
    stages = stage_list(job, predictor.costs)
    costs = [stage.cost(job, predictor.costs) for stage in stages]
    schedule = predictor.lowered(job)
    if speeds:
        owners = schedule.owners
        costs = [cost.times(speeds[owners[index]]) for index, cost in enumerate(costs)]
    timeline = simulate(
        schedule,
        forward_s=[cost.forward_s for cost in costs],
        backward_s=[cost.input_s for cost in costs],
        weight_s=[cost.weight_s for cost in costs],
        message_s=predictor.message_s(job) if plan.pipeline > 1 else 0.0,
    )
    rest = closed.step_s - closed.compute_s - closed.bubble_s - _inside(closed)
    return Simulated(
        step_s=timeline.step_s + max(rest, 0.0),
        pipeline_s=timeline.step_s,
        bubble_share=timeline.bubble_share,
        timeline=timeline,
    )


def steady_step_s(job: Job, predictor: Predictor, *, closed: StepTime) -> float:
    """Seconds of a step from a simulation of a few microbatches, continued at the steady pace.

    Beyond two or three rounds of the pipeline every further microbatch adds the slowest rank's
    work, so 2 p or 3 p of them tell the ramp and the rest is a product.
    """
    plan = job.plan
    few = (3 if plan.pipeline <= 8 else 2) * plan.pipeline
    if plan.num_microbatches <= few:
        return simulate_step(job, predictor, closed=closed).step_s
    short = replace(
        job,
        plan=plan.model_copy(update={"num_microbatches": few}),
        batch_size=job.microbatch_size * plan.data * few,
    )
    simulated = simulate_step(short, predictor)
    pace = max(simulated.timeline.busy_s) / few
    rest = closed.step_s - closed.compute_s - closed.bubble_s - _inside(closed)
    return simulated.pipeline_s + (plan.num_microbatches - few) * pace + max(rest, 0.0)


def _inside(closed: StepTime) -> float:
    """Exposed communication that the timeline already holds: that of layers and of messages."""
    return sum(seconds for axis, seconds in closed.exposed_s if axis != "data")


def straggler_factor(spread: float, ranks: int) -> float:
    """Expected slow-down of a synchronous step: the slowest of `ranks` log-normal speeds."""
    return math.exp(spread * math.sqrt(2 * math.log(ranks))) if ranks > 1 else 1.0


def step_quantiles(
    job: Job, predictor: Predictor, *, spread: float, draws: int = 16, seed: int = 1
) -> tuple[float, float, float]:
    """(10 %, median, 90 %) of the step's seconds when pipeline ranks' speeds vary by `spread`.

    Every pipeline position is as slow as the slowest of its data, context and tensor ranks.
    """
    plan = job.plan
    generator = random.Random(seed)
    group = plan.world_size // plan.pipeline
    closed = predictor.step(job)
    found: list[float] = []
    for _ in range(draws):
        speeds = [
            math.exp(max(generator.gauss(0, spread) for _ in range(min(group, 256))))
            for _ in range(plan.pipeline)
        ]
        found.append(simulate_step(job, predictor, closed=closed, speeds=speeds).step_s)
    found.sort()
    last = len(found) - 1
    return found[round(0.1 * last)], found[round(0.5 * last)], found[round(0.9 * last)]


def bubble_rate(job: Job, predictor: Predictor) -> float:
    """Idle over whole time of the pipeline, as the zero-bubble paper's table 5 counts it.

    (cost - m (f + b + w)) / cost with one f, b, w and message time for all stages (the mean here,
    profiled there); cost is the longest time any rank takes from its first action to its last.
    """
    costs = [stage.cost(job, predictor.costs) for stage in stage_list(job, predictor.costs)]
    timeline = simulate(
        predictor.lowered(job),
        forward_s=fmean(cost.forward_s for cost in costs),
        backward_s=fmean(cost.input_s for cost in costs),
        weight_s=fmean(cost.weight_s for cost in costs),
        message_s=predictor.message_s(job),
    )
    cost_s = max(
        ends[-1] - starts[0]
        for ends, starts in zip(timeline.ends_s, timeline.starts_s, strict=True)
    )
    return max(0.0, (cost_s - fmean(timeline.busy_s)) / cost_s)
