"""What a search answers: ranked plans with all their figures, the naive one, the fallen ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reparto.planner.interval import interval
from reparto.planner.job import Job
from reparto.planner.memory import Memory, reserved_bytes, usable_bytes
from reparto.planner.step import StepTime

Objective = Literal["time", "cost", "energy", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "energy", "memory")
#: power of a device that waits, over one that computes
IDLE_POWER = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """One plan with all that was predicted for it."""

    job: Job
    "the question"
    time: StepTime
    "where the step goes, closed form"
    step_s: float
    "seconds of a step, simulated where `simulated` says so"
    memory: Memory
    "bytes by pipeline position"
    simulated: bool = False
    "whether the action lists were run"

    @property
    def fits(self) -> bool:
        """Whether it stays within the device's memory."""
        return reserved_bytes(self.memory.peak_bytes) <= usable_bytes(self.job)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """Plans that were not ranked, and why."""

    plan: str
    "text of one of them, or of the degree they share"
    reason: str
    "divisibility, memory or a lower bound, with the numbers"
    plans: int
    "how many"


@dataclass(frozen=True, kw_only=True)
class PlanSearch:
    """The answer of one search."""

    objective: Objective
    "what was minimised"
    best: Ranked
    "the first of `ranked`"
    ranked: tuple[Ranked, ...]
    "best first"
    naive: Ranked
    "adding devices and nothing else: data parallel, nothing sharded, nothing recomputed"
    rejected: tuple[Rejected, ...]
    "the others"
    searched: int
    "plans decided, one by one or by a bound"
    evaluated: int
    "plans whose time was computed"
    seconds: float
    "time the search took"

    def to_json(self) -> dict[str, object]:
        """The object of `plan --json` (DESIGN section 5)."""
        return {
            "best": describe(self.best),
            "ranked": [describe(entry) for entry in self.ranked],
            "naive": describe(self.naive),
            "rejected": [
                {"plan": entry.plan, "reason": entry.reason, "plans": entry.plans}
                for entry in self.rejected
            ],
            "searched": self.searched,
            "evaluated": self.evaluated,
            "seconds": round(self.seconds, 3),
            "objective": self.objective,
            "model": self.best.job.model.name,
            "cluster": self.best.job.cluster.name,
        }


def describe(entry: Ranked) -> dict[str, object]:
    """One plan as plain values."""
    job, step = entry.job, entry.time
    cluster = job.cluster
    flops = job.model.model_flops(job.step_tokens, job.sequence_length)
    peak = cluster.count * cluster.accelerator.peak_bf16_tflops * 1e12
    low, high = interval(job, entry.step_s)
    hours = entry.step_s / 3600 * cluster.count
    return {
        "plan": job.plan.text,
        "step_s": entry.step_s,
        "step_s_interval": [low, high],
        "tokens_per_s": job.step_tokens / entry.step_s,
        "mfu": flops / (entry.step_s * peak),
        "memory_bytes_per_rank": round(entry.memory.peak_bytes),
        "memory_items": {name: round(size) for name, size in entry.memory.fullest.items},
        "fits": entry.fits,
        "bubble_share": step.bubble_s / step.step_s,
        "exposed_share": {axis: s / step.step_s for axis, s in step.exposed_s if s > 0},
        "cost": hours * cluster.dollars_per_hour if cluster.dollars_per_hour else None,
        "energy_kwh": energy_kwh(entry.job, step) or None,
        "simulated": entry.simulated,
    }


def energy_kwh(job: Job, step: StepTime) -> float:
    """Energy of one step of the whole cluster; waiting devices draw `IDLE_POWER` of the board's."""
    busy = step.compute_s + step.optimizer_s
    watts = job.cluster.accelerator.power_w * job.cluster.count
    return watts * (busy + IDLE_POWER * (step.step_s - busy)) / 3.6e6
