"""Every plan of a cluster, in groups that share what is decided early.

A *shape* fixes tensor, context, pipeline, data and expert degrees; a *group* adds microbatch and
recomputation, which together fix the cost of a layer. Under a group stand its ways to shard, and
under each of them its schedules. A search can drop all that stands under on one inequality.

What arithmetic forbids is never generated; `refused_degrees` says why for the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from reparto.config.plan import Plan, ScheduleName, ShardMode
from reparto.planner.model_spec import ModelSpec

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDS: tuple[ShardMode, ...] = ("none", "optimizer", "gradients", "parameters")
#: schedule and chunks a rank
SCHEDULES: tuple[tuple[ScheduleName, int], ...] = (
    ("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2),
    ("interleaved", 2), ("interleaved", 4), ("interleaved", 8),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The degrees of one family of plans."""

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    context_mode: Literal["ring", "ulysses"]
    sequence_parallel: bool


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def shapes(
    model: ModelSpec, count: int, sequence_length: int, batch_size: int, forbidden: frozenset[str]
) -> Iterator[Shape]:
    """Every legal combination of degrees for `count` ranks."""
    for tensor in _degrees(count, "tensor", forbidden):
        if model.heads % tensor or model.kv_heads % tensor:
            continue
        for context in _degrees(count // tensor, "context", forbidden):
            if sequence_length % (2 * context) and context > 1:
                continue
            for pipeline in _degrees(count // tensor // context, "pipeline", forbidden):
                if pipeline > model.layers:
                    break
                data = count // tensor // context // pipeline
                if data > batch_size or ("data" in forbidden and data > 1):
                    continue
                yield from _with_modes(
                    model, tensor, context, pipeline, data, sequence_length, forbidden
                )


def _with_modes(
    model: ModelSpec,
    tensor: int,
    context: int,
    pipeline: int,
    data: int,
    sequence_length: int,
    forbidden: frozenset[str],
) -> Iterator[Shape]:
    experts = [1]
    if model.experts and "expert" not in forbidden:
        experts = [n for n in divisors(data * context) if model.experts % n == 0]
    modes: list[Literal["ring", "ulysses"]] = ["ring"]
    if context > 1 and model.kv_heads % (tensor * context) == 0:
        modes.append("ulysses")
    splits = [False]
    if tensor > 1 and sequence_length % (tensor * context) == 0:
        splits.append(True)
    for expert in experts:
        for mode in modes:
            for split in splits:
                yield Shape(
                    tensor=tensor,
                    context=context,
                    pipeline=pipeline,
                    data=data,
                    expert=expert,
                    context_mode=mode,
                    sequence_parallel=split,
                )


def _degrees(count: int, axis: str, forbidden: frozenset[str]) -> list[int]:
    return [1] if axis in forbidden else divisors(count)


def microbatch_counts(batch_size: int, data: int) -> list[int]:
    """Numbers of microbatches: sizes 1, 2, 4, ... and the whole, from many to few."""
    sequences = -(-batch_size // data)
    sizes = {size for exponent in range(24) if (size := 1 << exponent) <= sequences}
    sizes.add(sequences)
    counts = {-(-sequences // size) for size in sizes}
    return sorted((m for m in counts if batch_size >= data * m), reverse=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """What the data-parallel ranks keep a part of, and when they reduce."""

    shard: ShardMode
    replicas: int
    gradient_sync: Literal["step", "microbatch"]


def shardings(shape: Shape, num_microbatches: int, node_size: int) -> list[Sharding]:
    """Every way to shard that the degrees allow."""
    return [
        Sharding(shard=shard, replicas=replicas, gradient_sync=sync)
        for shard in SHARDS
        if shard == "none" or shape.data * shape.context > 1
        for replicas in _replicas(shape, shard, node_size)
        if shape.data // replicas * shape.context % shape.expert == 0
        for sync in _syncs(shard, num_microbatches)
    ]


def schedules(shape: Shape, layers: int, num_microbatches: int) -> list[tuple[ScheduleName, int]]:
    """(schedule, chunks) that the pipeline degree and the layers allow."""
    if shape.pipeline == 1:
        return [("1f1b", 1)]
    return [
        (name, chunks)
        for name, chunks in SCHEDULES
        if shape.pipeline * chunks <= layers
        and (name != "interleaved" or num_microbatches % shape.pipeline == 0)
    ]


def group_plan(
    shape: Shape, *, shard: ShardMode, num_microbatches: int, recompute: Recompute
) -> Plan:
    """The plan of a group that needs least; built without checks, as every part is legal."""
    return Plan.model_construct(
        data=shape.data,
        shard=shard,
        tensor=shape.tensor,
        sequence_parallel=shape.sequence_parallel,
        pipeline=shape.pipeline,
        num_microbatches=num_microbatches,
        context=shape.context,
        context_mode=shape.context_mode,
        expert=shape.expert,
        recompute=recompute,
        gradient_sync="microbatch",
    )


def variant(plan: Plan, sharding: Sharding, schedule: tuple[ScheduleName, int]) -> Plan:
    """A group's plan with one way to shard and one schedule (a copy is 5 times a build's speed)."""
    name, chunks = schedule
    return plan.model_copy(
        update={
            "shard": sharding.shard,
            "replicas": sharding.replicas,
            "gradient_sync": sharding.gradient_sync,
            "schedule": name,
            "chunks": chunks if name == "interleaved" else 0,
        }
    )


def _replicas(shape: Shape, shard: ShardMode, node_size: int) -> list[int]:
    """One copy of the sharded state over all data ranks, or one in every node."""
    found = [1]
    inside = node_size // (shape.tensor * shape.context)
    if shard != "none" and inside > 1 and shape.data % inside == 0 and shape.data > inside:
        found.append(shape.data // inside)
    return found


def _syncs(shard: ShardMode, m: int) -> list[Literal["step", "microbatch"]]:
    if shard in ("gradients", "parameters") and m > 1:
        return ["step", "microbatch"]
    return ["step"]


def refused_degrees(
    model: ModelSpec, count: int, sequence_length: int, batch_size: int
) -> list[tuple[str, str]]:
    """(plan text, reason) for degrees that divide the cluster but not the model or the batch."""
    found: list[tuple[str, str]] = []
    for degree in divisors(count):
        if degree == 1:
            continue
        if model.heads % degree:
            found.append((f"tensor={degree}", f"does not divide {model.heads} heads"))
        elif model.kv_heads % degree:
            found.append((f"tensor={degree}", f"does not divide {model.kv_heads} key-value heads"))
        if degree > model.layers:
            found.append((f"pipeline={degree}", f"more stages than {model.layers} layers"))
        if sequence_length % (2 * degree):
            reason = f"2 x {degree} does not divide a sequence of {sequence_length} tokens"
            found.append((f"context={degree}", reason))
        if degree > batch_size:
            found.append((f"data={degree}", f"more data ranks than {batch_size} sequences"))
        if model.experts and model.experts % degree:
            found.append((f"expert={degree}", f"does not divide {model.experts} experts"))
    return found
