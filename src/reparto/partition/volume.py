"""Bytes are a function: what every collective of every strategy moves, before anything runs.

Two numbers for each message:

`payload_bytes`  the larger of input and output on this rank. It is what the recorder writes, so a
                 test compares the two and they must be equal to the byte.
`wire_bytes`     what the ideal algorithm must send from one rank: the lower bound that a measured
                 time is held against. S is the payload, n the group.

| operation | payload | wire |
|---|---|---|
| all_reduce | S | 2 (n-1)/n S |
| all_gather, reduce_scatter, all_to_all | S (the gathered side) | (n-1)/n S |
| broadcast, send, recv | S | S |

Source of the bounds: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reparto.config.plan import Plan
from reparto.partition.flat import FlatLayout, buckets, flat_layout
from reparto.units import DTYPE_BYTES

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"
]


def wire_bytes(operation: Operation, payload_bytes: float, group_size: int) -> float:
    """Bytes that one rank must send for `operation`, by the ideal algorithm."""
    if group_size <= 1:
        return 0.0
    share = (group_size - 1) / group_size
    if operation == "all_reduce":
        return 2 * share * payload_bytes
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return share * payload_bytes
    return float(payload_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One collective of a step, as a rank sees it, and how often it happens in the step."""

    what: str
    "what it carries, the first word of the recorder's tag: gradient, weight, word, ..."
    operation: Operation
    group: str
    "name of the group it runs in (`partition/grid.py`)"
    group_size: int
    payload_bytes: int
    "payload of one such message"
    count: int = 1
    "how many in a step"
    hidden_behind: str = ""
    "the computation it overlaps, empty if it is exposed by nature"

    @property
    def total_payload_bytes(self) -> int:
        return self.payload_bytes * self.count

    @property
    def total_wire_bytes(self) -> float:
        return wire_bytes(self.operation, self.payload_bytes, self.group_size) * self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of training state on one rank, between the end of backward and the update."""

    parameters: int
    "weights that compute reads, and the float32 master where the compute type is smaller"
    gradients: int
    "gradients held when backward ends: the most that is held at once"
    optimizer: int
    "both moments of Adam"

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


Shapes = Mapping[str, tuple[int, ...]]


def unit_layouts(
    units: Sequence[Shapes], *, plan: Plan, decays: Mapping[str, bool], gradient_bytes: int
) -> list[FlatLayout]:
    """The flat layouts that the plan's data or shard strategy makes of the model's blocks.

    units           the parameters of every block, in model order
    gradient_bytes  bytes of one element of a reduced gradient

    `shard=parameters` keeps one unit a block, because a block is what is gathered together; the
    other modes fill buckets of `bucket_bytes`, last parameters first.
    """
    shards = plan.num_shards if plan.shard != "none" else 1
    if plan.shard == "parameters":
        return [flat_layout(unit, decays=decays, num_shards=shards) for unit in units if unit]
    flat: dict[str, tuple[int, ...]] = {}
    for unit in units:
        flat.update(unit)
    names = list(flat)
    groups = buckets(
        [_numel(shape) for shape in flat.values()],
        element_bytes=gradient_bytes,
        bucket_bytes=plan.bucket_bytes,
    )
    return [
        flat_layout(
            {names[i]: flat[names[i]] for i in sorted(group)}, decays=decays, num_shards=shards
        )
        for group in groups
    ]


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


def reduction_messages(
    layouts: Sequence[FlatLayout],
    *,
    plan: Plan,
    compute_dtype: str = "float32",
    master_dtype: str = "float32",
) -> list[Message]:
    """The data-parallel and sharding messages of one optimizer step.

    Gradients are reduced in `master_dtype`; weights travel in `compute_dtype`. Under
    `shard=parameters` every microbatch gathers each unit for forward and again for backward,
    except the last unit of forward, which backward takes as it is, and units that stay gathered.
    """
    master, compute = DTYPE_BYTES[master_dtype], DTYPE_BYTES[compute_dtype]
    m = plan.num_microbatches
    reduces = m if plan.gradient_sync == "microbatch" else 1
    found: list[Message] = []
    ranks = plan.data * plan.context
    for layout in layouts:
        whole = layout.whole_numel
        if plan.shard == "none":
            if ranks > 1:
                found.append(
                    Message(
                        what="gradient",
                        operation="all_reduce",
                        group="reduce",
                        group_size=ranks,
                        payload_bytes=whole * master,
                        count=reduces,
                        hidden_behind="backward",
                    )
                )
            continue
        if layout.num_shards > 1:
            found.append(
                Message(
                    what="gradient",
                    operation="reduce_scatter",
                    group="shard",
                    group_size=layout.num_shards,
                    payload_bytes=whole * master,
                    count=reduces,
                    hidden_behind="backward",
                )
            )
        if plan.replicas > 1:
            found.append(
                Message(
                    what="replica",
                    operation="all_reduce",
                    group="replicas",
                    group_size=plan.replicas,
                    payload_bytes=layout.piece_numel * master,
                    count=reduces,
                    hidden_behind="backward",
                )
            )
        if layout.num_shards > 1 and plan.shard != "parameters":
            found.append(
                Message(
                    what="weight",
                    operation="all_gather",
                    group="shard",
                    group_size=layout.num_shards,
                    payload_bytes=whole * compute,
                    hidden_behind="",
                )
            )
    if plan.shard == "parameters" and plan.num_shards > 1:
        found += _unshard_messages(layouts, plan=plan, compute_bytes=compute)
    return found


def _unshard_messages(
    layouts: Sequence[FlatLayout], *, plan: Plan, compute_bytes: int
) -> list[Message]:
    m = plan.num_microbatches
    last = len(layouts) - 1
    return [
        Message(
            what="weight",
            operation="all_gather",
            group="shard",
            group_size=layout.num_shards,
            payload_bytes=layout.whole_numel * compute_bytes,
            # forward and backward gather it, but what forward used last, backward uses first
            count=m if index == last else 2 * m,
            hidden_behind="the neighbouring block",
        )
        for index, layout in enumerate(layouts)
    ]


def state_bytes(
    layouts: Sequence[FlatLayout],
    *,
    plan: Plan,
    compute_dtype: str = "float32",
    master_dtype: str = "float32",
) -> StateBytes:
    """Parameter, gradient and optimizer bytes a rank, padding of the flat layout included.

    W = elements of all weights, s = elements of this rank's pieces, one microbatch unless said:

    | shard | parameters | gradients | optimizer |
    |---|---|---|---|
    | none | W | W | 2 W |
    | optimizer | W | W + s | 2 s |
    | gradients | W | s + the largest unit (W + s with several microbatches and `step`) | 2 s |
    | parameters | s + gathered units | as above | 2 s |

    A compute type smaller than the master type adds s (or W) of master weights. Under
    `shard=parameters` the largest unit and the one gathered ahead of it stand beside the pieces
    during a step; that transient is not counted here but in the planner's working memory.
    """
    master, compute = DTYPE_BYTES[master_dtype], DTYPE_BYTES[compute_dtype]
    pieces = sum(layout.piece_numel for layout in layouts)
    natural = sum(_numel(slot.shape) for layout in layouts for slot in layout.slots)
    largest = max((layout.whole_numel for layout in layouts), default=0)
    whole = sum(layout.whole_numel for layout in layouts)
    second_copy = compute_dtype != master_dtype
    sharded = plan.shard != "none"
    if plan.shard == "parameters":
        parameters = pieces * master
    elif sharded:
        parameters = natural * compute + (pieces * master if second_copy else 0)
    else:
        parameters = natural * compute + (natural * master if second_copy else 0)
    if not sharded:
        gradients = natural * master
    elif plan.shard == "optimizer" or (
        plan.num_microbatches > 1 and plan.gradient_sync == "step"
    ):
        gradients = (whole + pieces) * master
    else:
        gradients = (largest + pieces) * master
    return StateBytes(
        parameters=parameters,
        gradients=gradients,
        optimizer=2 * (pieces if sharded else natural) * master,
    )
