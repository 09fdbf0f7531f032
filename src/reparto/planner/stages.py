"""Which layers stand on which virtual stage, and what each pipeline rank therefore holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from reparto.planner.cost import Cost, Costs
from reparto.planner.job import Job
from reparto.planner.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One virtual stage."""

    dense: int
    "layers without experts"
    moe: int
    "layers with experts"
    first: bool
    "holds the embedding"
    last: bool
    "holds norm, head and loss"

    def cost(self, job: Job, costs: Costs) -> Cost:
        """Seconds of one microbatch."""
        total = Cost()
        if self.dense:
            total += costs.layer(job, moe=False).times(self.dense)
        if self.moe:
            total += costs.layer(job, moe=True).times(self.moe)
        if self.first or self.last:
            embed, head = costs.ends(job)
            if self.first:
                total += embed
            if self.last:
                total += head
        return total

    def parameters(self, model: ModelSpec, *, tensor: int, expert: int) -> tuple[float, float]:
        """(elements cut by tensor only, elements of experts cut by expert and tensor) a rank."""
        routed = self.moe * model.experts * model.expert_parameters / expert
        shared = self.moe * (
            model.layer_parameters(True) - model.experts * model.expert_parameters
        ) + self.dense * model.layer_parameters(False)
        # a tied table stands on both ends when they are different stages
        ends = model.embedding_parameters * (
            1 if self.first and self.last and model.tied else int(self.first) + int(self.last)
        )
        return (shared + ends) / tensor, routed / tensor


def stage_list(job: Job, costs: Costs) -> tuple[Stage, ...]:
    """The virtual stages, in the order in which a microbatch meets them."""
    model, plan = job.model, job.plan
    number = plan.pipeline * plan.num_chunks
    counts = job.stage_layers
    if not counts:
        layer = costs.layer(job, moe=model.moe_layers > 0).total_s
        embed, head = costs.ends(job)
        counts = even_cut(
            model.layers, number, round(embed.total_s / layer, 2), round(head.total_s / layer, 2)
        )
    assert sum(counts) == model.layers and len(counts) == number
    found: list[Stage] = []
    done = 0
    for index, count in enumerate(counts):
        dense = count
        if model.experts:
            dense = max(0, min(model.dense_layers - done, count))
        found.append(
            Stage(dense=dense, moe=count - dense, first=index == 0, last=index == number - 1)
        )
        done += count
    return tuple(found)


@lru_cache(maxsize=4096)
def even_cut(layers: int, stages: int, embed: float, head: float) -> tuple[int, ...]:
    """Layers of each stage so that the dearest is cheapest; ends cost `embed` and `head` layers.

    `partition/layers.py: cut_by_cost` for equal layers, in closed form because a search asks
    thousands of times. The dearest stage's cost is a whole number of layers plus one of the ends;
    the smallest such bound that leaves room for all layers is the answer. Early stages take fewer.
    """
    if stages == 1:
        return (layers,)
    extra = [0.0] * stages
    extra[0] += embed
    extra[-1] += head

    def room(bound: float) -> list[int]:
        return [max(1, math.floor(bound - more + 1e-9)) for more in extra]

    bounds = sorted({count + more for count in range(1, layers + 1) for more in (0.0, embed, head)})
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(room(bounds[middle])) >= layers:
            high = middle
        else:
            low = middle + 1
    counts = room(bounds[low])
    surplus = sum(counts) - layers
    while surplus > 0:
        # take from the fullest stage, the earliest of equals
        index = max(range(stages), key=lambda i: (counts[i] > 1, counts[i] + extra[i], -i))
        counts[index] -= 1
        surplus -= 1
    return tuple(counts)


def owner_of(stage: int, *, pipeline: int, chunks: int, v_shape: bool) -> int:
    """The pipeline rank that owns a virtual stage: in a loop, or to and fro (`Placement`)."""
    turn, at = divmod(stage, pipeline)
    return pipeline - 1 - at if v_shape and turn % 2 else at


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What every pipeline rank holds and costs: all that does not depend on sharding."""

    stages: tuple[Stage, ...]
    "virtual stages, in the order of a microbatch"
    rows: tuple[tuple[int, ...], ...]
    "virtual stages of each rank"
    costs: tuple[Cost, ...]
    "one microbatch of each rank"
    parameters: tuple[tuple[float, float], ...]
    "(shared, routed) elements of each rank"
    slowest: int
    "the rank that sets the pace"
    others: tuple[float, float, float]
    "forward, input and weight seconds of all other ranks together"

    @property
    def fullest(self) -> tuple[float, float]:
        """(shared, routed) elements of the rank that holds most."""
        return max(self.parameters, key=sum)


def layout_of(job: Job, costs: Costs) -> Layout:
    """The layout of a plan; plans that differ in sharding alone share it."""
    plan = job.plan
    folded = plan.schedule in ("zb-v", "dualpipe-v")
    stages = stage_list(job, costs)
    rows: list[list[int]] = [[] for _ in range(plan.pipeline)]
    for index in range(len(stages)):
        rank = owner_of(index, pipeline=plan.pipeline, chunks=plan.num_chunks, v_shape=folded)
        rows[rank].append(index)
    cost_of = {stage: stage.cost(job, costs) for stage in set(stages)}
    held_by = {
        stage: stage.parameters(job.model, tensor=plan.tensor, expert=plan.expert)
        for stage in cost_of
    }
    totals: list[Cost] = []
    parameters: list[tuple[float, float]] = []
    known: dict[tuple[Stage, ...], Cost] = {}
    for row in rows:
        mine = tuple(stages[index] for index in row)
        if mine not in known:
            total = cost_of[mine[0]]
            for stage in mine[1:]:
                total += cost_of[stage]
            known[mine] = total
        totals.append(known[mine])
        held = [held_by[stage] for stage in mine]
        parameters.append((sum(part[0] for part in held), sum(part[1] for part in held)))
    slowest = max(range(len(rows)), key=lambda rank: totals[rank].total_s)
    others = [cost for rank, cost in enumerate(totals) if rank != slowest]
    return Layout(
        stages=stages,
        rows=tuple(map(tuple, rows)),
        costs=tuple(totals),
        parameters=tuple(parameters),
        slowest=slowest,
        others=(
            sum(cost.forward_s for cost in others),
            sum(cost.input_s for cost in others),
            sum(cost.weight_s for cost in others),
        ),
    )
