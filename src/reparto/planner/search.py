"""All plans of a cluster, the best of them ranked, and for the others the reason why not.

Branch and bound over the groups of `candidates.py`. For every group (degrees, microbatch,
recomputation) two bounds are cheap and cannot be wrong:

    time    >= m x (all layers + ends) / p      the slowest pipeline rank has at least the mean
    memory  >= fully sharded states + activations of one microbatch

Groups are visited from the smallest time bound up. Once the bound exceeds the `keep`-th best plan
found so far, all that is left loses, and the search ends. So the ranking equals the exhaustive one
(a test holds the two against each other on 64 devices) at about a hundredth of its work.

The best plans are then simulated from their action lists, which replaces the closed form's time.
Rejected: a genetic or annealing search. It is no faster here and cannot say why a plan lost.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count as counter

from reparto.config.cluster import Cluster
from reparto.config.plan import Plan, ScheduleName, ShardMode
from reparto.errors import UserError, nearest_word
from reparto.planner.answer import (
    IDLE_POWER,
    OBJECTIVES,
    Objective,
    PlanSearch,
    Ranked,
    Rejected,
    energy_kwh,
)
from reparto.planner.candidates import (
    RECOMPUTES,
    Recompute,
    Shape,
    group_plan,
    microbatch_counts,
    refused_degrees,
    schedules,
    shapes,
    shardings,
    variant,
)
from reparto.planner.constants import Constants, shipped
from reparto.planner.job import REPARTO, Job, Software
from reparto.planner.memory import (
    first_rank_bytes,
    kept_bytes,
    least_bytes,
    least_layer_bytes,
    memory_of,
    reserved_bytes,
    usable_bytes,
)
from reparto.planner.model_spec import ModelSpec
from reparto.planner.simulate import steady_step_s
from reparto.planner.step import Predictor, StepTime

#: axes that a search may be forbidden to use
AXES = ("data", "tensor", "context", "pipeline", "expert", "shard", "recompute")


def plan_search(
    model: ModelSpec,
    cluster: Cluster,
    *,
    batch_size: int,
    sequence_length: int,
    objective: Objective = "time",
    forbid: Iterable[str] = (),
    precision: str = "bf16",
    software: Software | None = None,
    constants: Constants | None = None,
    keep: int = 20,
    exhaustive: bool = False,
    simulate_best: bool = True,
) -> PlanSearch:
    """Rank all plans of `cluster` for `model`. Raises `UserError` when none fits, naming the
    nearest and what it lacks.

    forbid      axes that must stay at 1 (data, tensor, context, pipeline, expert), or `shard` or
                `recompute`, which then stay at none
    exhaustive  visit every plan, for tests
    """
    began = time.perf_counter()
    forbidden = _checked(objective, forbid)
    search = _Search(
        objective=objective,
        keep=keep,
        exhaustive=exhaustive,
        predictor=Predictor(cluster, constants or shipped()),
    )
    asked = Job(
        model=model,
        cluster=cluster,
        plan=Plan(data=1),
        batch_size=batch_size,
        sequence_length=sequence_length,
        precision=precision,
        software=software or REPARTO,
    )
    search.run(asked, forbidden)
    if not search.best:
        raise search.nothing_fits(asked)
    ranked = search.ranking(simulate_best)
    refused = [
        Rejected(plan=text, reason=reason, plans=0)
        for text, reason in refused_degrees(model, cluster.count, sequence_length, batch_size)
    ]
    return PlanSearch(
        objective=objective,
        best=ranked[0],
        ranked=tuple(ranked),
        naive=search.ranked(naive_job(asked)),
        rejected=tuple(search.rejections() + refused[:40]),
        searched=search.searched,
        evaluated=search.evaluated,
        seconds=time.perf_counter() - began,
    )


def naive_job(asked: Job) -> Job:
    """Data parallel over all devices the batch can feed, nothing else."""
    data = min(asked.cluster.count, asked.batch_size)
    while asked.cluster.count % data:
        data -= 1
    return replace(asked, plan=Plan(data=data))


def _checked(objective: str, forbid: Iterable[str]) -> frozenset[str]:
    if objective not in OBJECTIVES:
        raise UserError(
            f"no objective is called {objective!r}",
            where="--objective",
            legal=", ".join(OBJECTIVES),
            nearest=nearest_word(objective, OBJECTIVES) or "time",
        )
    forbidden = frozenset(forbid)
    for axis in sorted(forbidden):
        if axis not in AXES:
            raise UserError(
                f"no axis is called {axis!r}",
                where="--forbid",
                legal=", ".join(AXES),
                nearest=nearest_word(axis, AXES) or "pipeline",
            )
    return forbidden


@dataclass(frozen=True, slots=True)
class _Group:
    """Plans that share a layer's cost."""

    bound_s: float
    job: Job
    shape: Shape
    recompute: Recompute


class _Search:
    """The state of one search: the best so far, and why others fell."""

    def __init__(
        self, *, objective: Objective, keep: int, exhaustive: bool, predictor: Predictor
    ) -> None:
        self.objective = objective
        self.keep = keep
        self.exhaustive = exhaustive
        self.predictor = predictor
        # (-objective value, tie breaker, entry): a heap whose root is the worst of the best
        self.best: list[tuple[float, int, Ranked]] = []
        self.searched = 0
        self.evaluated = 0
        self.nearest: Ranked | None = None
        self._order = counter()
        self._reasons: dict[tuple[object, ...], Rejected] = {}

    def run(self, asked: Job, forbidden: frozenset[str]) -> None:
        """Visit every group, or all that can still win."""
        groups = sorted(self._groups(asked, forbidden), key=lambda group: group.bound_s)
        for group in groups:
            worst = self._limit()
            if not self.exhaustive and self._value_bound(group) > worst:
                self._lost(group, worst)
                continue
            self._visit(group, forbidden)

    def _groups(self, asked: Job, forbidden: frozenset[str]) -> Iterable[_Group]:
        recomputes: tuple[Recompute, ...] = ("none",) if "recompute" in forbidden else RECOMPUTES
        for shape in shapes(
            asked.model,
            asked.cluster.count,
            asked.sequence_length,
            asked.batch_size,
            forbidden,
        ):
            for m in microbatch_counts(asked.batch_size, shape.data):
                for recompute in recomputes:
                    most: ShardMode = "none" if "shard" in forbidden else "parameters"
                    plan = group_plan(shape, shard=most, num_microbatches=m, recompute=recompute)
                    job = replace(asked, plan=plan)
                    least = least_bytes(job)
                    if not self.exhaustive and reserved_bytes(least) > usable_bytes(job):
                        self.searched += 1
                        self._too_big(job, least)
                        continue
                    yield _Group(self._least_s(job), job, shape, recompute)

    def _least_s(self, job: Job) -> float:
        """No plan of the group is faster: the slowest pipeline rank has at least the mean."""
        costs, model = self.predictor.costs, job.model
        embed, head = costs.ends(job)
        layers = embed.total_s + head.total_s
        if model.dense_layers_count:
            layers += model.dense_layers_count * costs.layer(job, moe=False).total_s
        if model.moe_layers:
            layers += model.moe_layers * costs.layer(job, moe=True).total_s
        return job.plan.num_microbatches * layers / job.plan.pipeline

    def _value_bound(self, group: _Group) -> float:
        """The bound in the objective's unit. For memory it is the fully sharded least."""
        if self.objective == "memory":
            return least_bytes(group.job)
        if self.objective == "energy":
            cluster = group.job.cluster
            watts = cluster.accelerator.power_w * cluster.count
            return IDLE_POWER * group.bound_s * watts / 3.6e6
        return group.bound_s

    def _limit(self) -> float:
        return -self.best[0][0] if len(self.best) >= self.keep else float("inf")

    def _visit(self, group: _Group, forbidden: frozenset[str]) -> None:
        shape, job = group.shape, group.job
        m = job.plan.num_microbatches
        names = schedules(shape, job.model.layers, m)
        ways = [
            way
            for way in shardings(shape, m, job.cluster.tiers[0].size)
            if "shard" not in forbidden or way.shard == "none"
        ]
        if not self.exhaustive:
            names = self._that_fit(job, names, len(ways))
        usable = usable_bytes(job)
        for way in ways if names else ():
            plan = variant(job.plan, way, names[0])
            least = least_bytes(replace(job, plan=plan))
            if not self.exhaustive and reserved_bytes(least) > usable:
                self.searched += len(names)
                self._too_big(replace(job, plan=plan), least, plans=len(names))
                continue
            for name in names:
                self._consider(replace(job, plan=variant(job.plan, way, name)))

    def _that_fit(
        self, job: Job, names: list[tuple[ScheduleName, int]], ways: int
    ) -> list[tuple[ScheduleName, int]]:
        """The schedules whose activations alone leave room, however the states are sharded."""
        layers = least_layer_bytes(job)
        found = []
        for name in names:
            kept = kept_bytes(job, name, layers)
            if reserved_bytes(kept) > usable_bytes(job):
                self.searched += ways
                self._too_big(job, kept, schedule=name[0], plans=ways)
            else:
                found.append(name)
        return found

    def _consider(self, job: Job) -> None:
        self.searched += 1
        limit = self._limit()
        first = first_rank_bytes(job, self.predictor.layout(job))
        if not self.exhaustive and reserved_bytes(first) > usable_bytes(job):
            self._too_big(job, first)
            return
        self.evaluated += 1
        step = self.predictor.step(job)
        value = self._value(job, step)
        if self.objective != "memory" and value > limit:
            return
        memory = memory_of(job, self.predictor)
        entry = Ranked(job=job, time=step, step_s=step.step_s, memory=memory)
        if not entry.fits:
            self._too_big(job, memory.peak_bytes, entry)
            return
        if self.objective == "memory":
            value = memory.peak_bytes
        if value > limit:
            return
        heapq.heappush(self.best, (-value, -next(self._order), entry))
        if len(self.best) > self.keep:
            heapq.heappop(self.best)

    def _value(self, job: Job, step: StepTime) -> float:
        return energy_kwh(job, step) if self.objective == "energy" else step.step_s

    def _too_big(
        self,
        job: Job,
        num_bytes: float,
        entry: Ranked | None = None,
        *,
        schedule: str = "",
        plans: int = 1,
    ) -> None:
        found = entry
        if found is None and self.nearest is None:
            found = self.ranked(job)
        if found is not None and (
            self.nearest is None or found.memory.peak_bytes < self.nearest.memory.peak_bytes
        ):
            self.nearest = found
        plan = job.plan

        def reason() -> str:
            needs, has = reserved_bytes(num_bytes) / 1e9, usable_bytes(job) / 1e9
            most = f", {entry.memory.fullest.items[0][0]} most" if entry else " at least"
            under = f" under {schedule}" if schedule else ""
            return f"needs {needs:.0f} GB of {has:.0f} GB a device{most}{under}"

        family = ("memory", plan.tensor, plan.pipeline, plan.recompute)
        self._reject(family, plan, reason, plans)

    def _lost(self, group: _Group, limit: float) -> None:
        self.searched += 1
        plan = group.job.plan

        def reason() -> str:
            unit = {"memory": "bytes", "energy": "kWh"}.get(self.objective, "s")
            bound = self._value_bound(group)
            return f"at least {bound:.4g} {unit}; the last ranked plan takes {limit:.4g} {unit}"

        self._reject(("bound", plan.tensor, plan.pipeline, plan.context), plan, reason)

    def _reject(
        self, family: tuple[object, ...], plan: Plan, reason: Callable[[], str], plans: int = 1
    ) -> None:
        known = self._reasons.get(family)
        if known is None:
            self._reasons[family] = Rejected(plan=plan.text, reason=reason(), plans=plans)
        else:
            self._reasons[family] = replace(known, plans=known.plans + plans)

    def rejections(self) -> list[Rejected]:
        """One for each family of plans, the largest families first."""
        return sorted(self._reasons.values(), key=lambda entry: -entry.plans)[:60]

    def ranked(self, job: Job) -> Ranked:
        """Time and memory of one plan."""
        step = self.predictor.step(job)
        memory = memory_of(job, self.predictor)
        return Ranked(job=job, time=step, step_s=step.step_s, memory=memory)

    def ranking(self, simulate_best: bool) -> list[Ranked]:
        """The kept plans, best first; simulated ones re-ordered by the simulated time."""
        ordered = [entry for _, _, entry in sorted(self.best, key=lambda e: (-e[0], -e[1]))]
        if not simulate_best:
            return ordered
        simulated = [self._simulated(entry) for entry in ordered]
        key: Callable[[Ranked], float] = lambda entry: entry.step_s  # noqa: E731
        if self.objective == "memory":
            key = lambda entry: entry.memory.peak_bytes  # noqa: E731
        return sorted(simulated, key=key)

    def _simulated(self, entry: Ranked) -> Ranked:
        if entry.job.plan.pipeline == 1:
            return entry
        seconds = steady_step_s(entry.job, self.predictor, closed=entry.time)
        return replace(entry, step_s=seconds, simulated=True)

    def nothing_fits(self, asked: Job) -> UserError:
        """What comes nearest, and what it lacks."""
        where = f"{asked.model.name} on {asked.cluster.name}"
        if self.nearest is None:
            return UserError(
                "no degrees are legal for this number of devices",
                where=where,
                legal="tensor divides the key-value heads, data at most the batch",
                nearest=f"a batch of {asked.cluster.count} sequences or another device count",
            )
        needs = reserved_bytes(self.nearest.memory.peak_bytes)
        has = usable_bytes(asked)
        return UserError(
            f"no plan fits: the nearest, `{self.nearest.job.plan.text}`, needs "
            f"{needs / 1e9:.1f} GB a device of {has / 1e9:.1f} GB usable; "
            f"{(needs - has) / 1e9:.1f} GB are missing",
            where=where,
            legal="a plan whose fullest device stays below its memory",
            nearest=f"more devices (about {_more(asked.cluster.count, needs, has)}), "
            "a shorter sequence, or devices with more memory",
        )


def _more(count: int, needs: float, has: float) -> int:
    """The next power of two of devices over which the nearest plan's bytes would fit."""
    wanted = count * max(needs / has, 1.0)
    found = 1
    while found < wanted:
        found *= 2
    return found
