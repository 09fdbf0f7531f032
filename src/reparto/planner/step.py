"""Seconds of one optimizer step of one plan, in closed form: microbatches, bubble, sharing, update.

    step = m x slowest rank + ramp + exposed data communication + optimizer + fixed part

The slowest pipeline rank sets the pace of all; the ramp is what the other ranks wait while the
pipeline fills and drains, by schedule (FORMULAS of the zero-bubble and DualPipe papers):

| schedule | ramp, f b w of the other ranks |
|---|---|
| gpipe, 1f1b | sum of f + b + w |
| interleaved | the same / chunks (Narayanan 2021, section 2.2.2) |
| zb-h1 | sum of f + b - w (Qi 2024, table 1) |
| zb-v, dualpipe-v | half of the sum of f + b - 2 w, where positive |

The closed form takes microseconds and ranks thousands of plans; `simulate` runs the action lists of
the best and replaces the number.
"""

from __future__ import annotations

from dataclasses import dataclass

from reparto.config.cluster import Cluster
from reparto.config.plan import Plan
from reparto.planner.constants import Constants
from reparto.planner.cost import Costs
from reparto.planner.job import Job
from reparto.planner.kernels import Kernels
from reparto.planner.links import Links
from reparto.planner.stages import Layout, layout_of
from reparto.schedule.actions import Schedule
from reparto.schedule.generate import generate
from reparto.schedule.lower import lower


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step of the slowest rank, and where it goes. The parts add up to `step_s`."""

    step_s: float
    "whole step"
    compute_s: float
    "kernels of the slowest pipeline rank, recomputation included"
    slowed_s: float
    "what compute loses to communication that runs beside it"
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
        self._schedules: dict[tuple[str, int, int, int], Schedule] = {}
        self._layouts: dict[tuple[object, ...], Layout] = {}

    def step(self, job: Job) -> StepTime:
        """Closed-form time of one step."""
        plan = job.plan
        layout = self.layout(job)
        pace = layout.costs[layout.slowest]
        m = plan.num_microbatches
        exposed = {axis: seconds * m for axis, seconds in pace.exposed_s}
        inside = sum(exposed.values())
        busy_s = pace.total_s * m
        ramp = _ramp(plan, layout.others)
        messages = self._messages_s(job)
        if messages:
            exposed["pipeline"] = messages
        hidden, data = self._data_s(job, layout)
        if data:
            exposed["data"] = data
        slowed = (self.constants["contention"] - 1) * min(hidden, busy_s)
        optimizer = self._optimizer_s(job, layout)
        fixed = self.constants["step_ms"] * 1e-3 if self.kernels.tiled else 0.0
        compute = busy_s - inside
        return StepTime(
            step_s=compute + slowed + ramp + sum(exposed.values()) + optimizer + fixed,
            compute_s=compute,
            slowed_s=slowed,
            bubble_s=ramp,
            exposed_s=tuple(exposed.items()),
            optimizer_s=optimizer,
            fixed_s=fixed,
        )

    def layout(self, job: Job) -> Layout:
        """The pipeline's layout, remembered for plans that differ in sharding alone."""
        plan = job.plan
        key = (
            job.model, job.software, job.precision, job.sequence_length, job.microbatch_size,
            plan.tensor, plan.sequence_parallel, plan.context, plan.context_mode, plan.expert,
            plan.recompute, plan.pipeline, plan.num_chunks,
            plan.schedule in ("zb-v", "dualpipe-v"), job.stage_layers,
        )  # fmt: skip
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) > 4096:
                self._layouts.clear()
            found = self._layouts[key] = layout_of(job, self.costs)
        return found

    def lowered(self, job: Job) -> Schedule:
        """The plan's action lists, messages included, remembered by schedule and sizes."""
        plan = job.plan
        chunks = plan.num_chunks if plan.pipeline > 1 else 1
        key = (plan.schedule, plan.pipeline, chunks, plan.num_microbatches)
        found = self._schedules.get(key)
        if found is None:
            made = generate(
                plan.schedule,
                pipeline=plan.pipeline,
                chunks=chunks,
                num_microbatches=plan.num_microbatches,
            )
            found = self._schedules[key] = lower(made)
        return found

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

    def _data_s(self, job: Job, layout: Layout) -> tuple[float, float]:
        """(hidden, exposed) seconds of reducing gradients and gathering weights."""
        plan, software = job.plan, job.software
        shared, routed = layout.fullest
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
            # a pipeline's chunk stays gathered from its first action to its last
            each_time = plan.shard == "parameters" and plan.pipeline == 1
            passes = 2 * m if each_time else 1
            gather_s += passes * collective("all_gather", elements * width, group)
        pace = layout.costs[-1 if layout.slowest == 0 else 0]
        window, forward = pace.input_s + pace.weight_s, pace.forward_s
        if plan.shard == "parameters":
            window, forward = (window + forward) * m, 0.0
            reduce_s, gather_s = reduce_s + gather_s, 0.0
        if plan.gradient_sync == "microbatch":
            window *= m if plan.shard != "parameters" else 1
        exposed = self._left(reduce_s, window, software.overlap_data) + self._left(
            gather_s, forward, software.overlap_data
        )
        return reduce_s + gather_s - exposed, exposed

    def _left(self, seconds: float, window: float, overlaps: bool) -> float:
        """What stays exposed of a communication that may run beside `window` of compute."""
        if not overlaps:
            return seconds
        share = self.constants["overlap"]
        return max(seconds * (1 - share), seconds - window)

    def _optimizer_s(self, job: Job, layout: Layout) -> float:
        """Adam reads and writes master, moments and gradient: 30 bytes an element it owns, and
        the norm, scaling and clearing pass 12 bytes over every gradient that is held."""
        shared, routed = layout.fullest
        held = shared + routed
        owned = held
        if job.plan.shard != "none":
            owned = shared / job.group("shard").size + routed / job.group("expert_shard").size
        if job.plan.shard == "parameters":
            held = owned
        return self.kernels.pass_s(30 * owned + 12 * held)


def _ramp(plan: Plan, others: tuple[float, float, float]) -> float:
    f, b, w = others
    if plan.schedule == "interleaved":
        return (f + b + w) / plan.num_chunks
    if plan.schedule == "zb-h1":
        return max(f + b - w, 0.0)
    if plan.schedule in ("zb-v", "dualpipe-v"):
        return max(f + b - 2 * w, 0.0) / 2
    return f + b + w
