"""Seconds of one optimizer step of one plan, in closed form: microbatches, bubble, sharing, update.

    step = m x slowest rank + ramp + exposed data communication + optimizer + fixed part

The slowest pipeline rank sets the pace of all; the ramp is what the other ranks wait while the
pipeline fills and drains, by schedule (FORMULAS of the zero-bubble and DualPipe papers):

| schedule | ramp, f b w of the other ranks |
|---|---|
| gpipe, 1f1b | sum of f + b + w |
| interleaved | the same / chunks (Narayanan 2021, section 2.2.2) |
| zb-h1 | sum of f + b - w (Qi 2024, table 1) |
| zb-v | p (f + b - 2 w) where positive, / 2 |
| dualpipe-v | half of f + b + w - 3 w (DeepSeek-V3, table 2, B there is b + w) |

The closed form takes microseconds and ranks thousands of plans; `simulate` runs the action lists of
the best and replaces the number.
"""

from __future__ import annotations

from dataclasses import dataclass

from reparto.config.cluster import Cluster
from reparto.planner.constants import Constants
from reparto.planner.cost import Cost, Costs
from reparto.planner.job import Job
from reparto.planner.kernels import Kernels
from reparto.planner.links import Links
from reparto.planner.stages import Stage, ranks_of, stage_list


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step of the slowest rank, and where it goes. The parts add up to `step_s`."""

    step_s: float
    "whole step"
    compute_s: float
    "kernels of the slowest pipeline rank, recomputation included"
    bubble_s: float
    "waiting for the pipeline to fill and drain"
    exposed_s: tuple[tuple[str, float], ...]
    "communication that nothing hides, by axis"
    optimizer_s: float
    "the update"
    fixed_s: float
    "what every step costs"


class Predictor:
    """Everything that stays the same while plans of one cluster are compared."""

    def __init__(self, cluster: Cluster, constants: Constants) -> None:
        self.cluster = cluster
        self.constants = constants
        self.kernels = Kernels(cluster.accelerator, constants, cluster.measured)
        self.links = Links(cluster, constants)
        self.costs = Costs(self.kernels, self.links, constants)

    def step(self, job: Job) -> StepTime:
        """Closed-form time of one step."""
        plan = job.plan
        stages = stage_list(job, self.costs)
        rows = ranks_of(job, stages)
        stage_costs = _stage_costs(job, stages, self.costs)
        per_rank = [_sum([stage_costs[index] for index in row]) for row in rows]
        slowest = max(range(len(rows)), key=lambda rank: per_rank[rank].total_s)
        m = plan.num_microbatches
        busy = per_rank[slowest].times(m)
        exposed = dict(busy.exposed_s)
        inside = sum(exposed.values())
        ramp = _ramp(job, per_rank, slowest)
        messages = self._messages_s(job)
        if messages:
            exposed["pipeline"] = messages
        hidden, data = self._data_s(job, stages, rows, per_rank)
        for axis, seconds in data.items():
            exposed[axis] = exposed.get(axis, 0.0) + seconds
        slowed = (self.constants["contention"] - 1) * min(hidden, busy.total_s)
        optimizer = self._optimizer_s(job, stages, rows)
        fixed = self.constants["step_ms"] * 1e-3 if self.kernels.tiled else 0.0
        compute = busy.total_s - inside + slowed
        return StepTime(
            step_s=compute + ramp + sum(exposed.values()) + optimizer + fixed,
            compute_s=compute,
            bubble_s=ramp,
            exposed_s=tuple(exposed.items()),
            optimizer_s=optimizer,
            fixed_s=fixed,
        )

    def message_s(self, job: Job) -> float:
        """Seconds of one message between pipeline ranks."""
        payload = job.microbatch_tokens * job.model.hidden * job.element_bytes
        if job.plan.sequence_parallel or job.software.scatter_messages:
            payload /= job.plan.tensor
        return self.links.collective_s("send", payload, job.group("pipeline"))

    def _messages_s(self, job: Job) -> float:
        """Exposed seconds of activations and their gradients between pipeline ranks."""
        plan = job.plan
        if plan.pipeline == 1:
            return 0.0
        one = self.message_s(job)
        left = 1 - self.constants["overlap"] if job.software.overlap_data else 1.0
        steady = 2 * plan.num_microbatches * plan.num_chunks * one * left
        return steady + 2 * (plan.pipeline - 1) * one

    def _data_s(
        self, job: Job, stages: tuple[Stage, ...], rows: list[list[int]], per_rank: list[Cost]
    ) -> tuple[float, dict[str, float]]:
        """(hidden seconds, exposed seconds by axis) of reducing gradients and gathering weights."""
        plan, software = job.plan, job.software
        shared, routed = largest_parameters(job, stages, rows)
        m = plan.num_microbatches
        times = m if plan.gradient_sync == "microbatch" else 1
        width = job.element_bytes
        collective = self.links.collective_s
        parts: list[tuple[float, str]] = [(shared, "shard")]
        if routed:
            parts.append((routed, "expert_shard"))
        reduce_s = gather_s = 0.0
        for elements, name in parts:
            gradient = elements * software.gradient_bytes
            group = job.group(name)
            if plan.shard == "none":
                whole = job.group("reduce") if name == "shard" else group
                reduce_s += times * collective("all_reduce", gradient, whole)
                continue
            reduce_s += times * collective("reduce_scatter", gradient, group)
            if plan.replicas > 1:
                piece = gradient / max(1, group.size)
                reduce_s += times * collective("all_reduce", piece, job.group("replicas"))
            passes = 2 * m if plan.shard == "parameters" else 1
            gather_s += passes * collective("all_gather", elements * width, group)
        window = min(rank.input_s + rank.weight_s for rank in per_rank)
        forward = min(rank.forward_s for rank in per_rank)
        if plan.shard == "parameters":
            window, forward = (window + forward) * m, 0.0
            reduce_s, gather_s = reduce_s + gather_s, 0.0
        if plan.gradient_sync == "microbatch":
            window *= m if plan.shard != "parameters" else 1
        exposed = self._left(reduce_s, window, software.overlap_data) + self._left(
            gather_s, forward, software.overlap_data
        )
        return reduce_s + gather_s - exposed, {"data": exposed} if exposed else {}

    def _left(self, seconds: float, window: float, overlaps: bool) -> float:
        """What stays exposed of a communication that may run beside `window` of compute."""
        if not overlaps:
            return seconds
        share = self.constants["overlap"]
        return max(seconds * (1 - share), seconds - window)

    def _optimizer_s(self, job: Job, stages: tuple[Stage, ...], rows: list[list[int]]) -> float:
        """Adam reads and writes master, moments and gradient: 30 bytes an element it owns, and
        the norm, scaling and clearing pass 12 bytes over every gradient that is held."""
        shared, routed = largest_parameters(job, stages, rows)
        held = shared + routed
        owned = held
        if job.plan.shard != "none":
            owned = shared / job.group("shard").size + routed / job.group("expert_shard").size
        if job.plan.shard == "parameters":
            held = owned
        return self.kernels.pass_s(30 * owned + 12 * held)


def largest_parameters(
    job: Job, stages: tuple[Stage, ...], rows: list[list[int]]
) -> tuple[float, float]:
    """(shared, routed) elements on the pipeline rank that holds most."""
    plan = job.plan
    best = (0.0, 0.0)
    for row in rows:
        held = [
            stages[index].parameters(job.model, tensor=plan.tensor, expert=plan.expert)
            for index in row
        ]
        total = (sum(part[0] for part in held), sum(part[1] for part in held))
        if sum(total) > sum(best):
            best = total
    return best


def _stage_costs(job: Job, stages: tuple[Stage, ...], costs: Costs) -> list[Cost]:
    known: dict[Stage, Cost] = {}
    for stage in stages:
        if stage not in known:
            known[stage] = stage.cost(job, costs)
    return [known[stage] for stage in stages]


def _sum(parts: list[Cost]) -> Cost:
    if len(parts) == 1:
        return parts[0]
    total = Cost()
    for part in parts:
        total += part
    return total


def _ramp(job: Job, per_rank: list[Cost], slowest: int) -> float:
    plan = job.plan
    others = [cost for rank, cost in enumerate(per_rank) if rank != slowest]
    if not others:
        return 0.0
    f = sum(cost.forward_s for cost in others)
    b = sum(cost.input_s for cost in others)
    w = sum(cost.weight_s for cost in others)
    if plan.schedule == "interleaved":
        return (f + b + w) / plan.num_chunks
    if plan.schedule == "zb-h1":
        return max(f + b - w, 0.0)
    if plan.schedule == "zb-v":
        return max(f + b - 2 * w, 0.0) / 2
    if plan.schedule == "dualpipe-v":
        return max(f + b - 2 * w, 0.0) / 2
    return f + b + w
