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

#: schedules that make weight gradients apart from input gradients (`schedule/generate.py`)
_SPLIT_BACKWARD = ("zb-h1", "zb-v", "dualpipe-v")


def unit_shapes(blocks: Sequence[Shapes], *, plan: Plan, gradient_bytes: int) -> list[Shapes]:
    """The parameters that are reduced or gathered together, in the order of the model.

    blocks          the parameters of every block, in model order; a shared one in its first block
    gradient_bytes  bytes of one element of a reduced gradient

    `none`          buckets of `bucket_bytes` of single parameters, cut from the model's end
    `optimizer`, `gradients`
                    whole blocks joined up to `bucket_bytes`, from the end, so that one unit's
                    gradients are complete before the next one's begin and few buffers live at once
    `parameters`    one unit a block, because a block is what is gathered together; a block with
                    less than a twentieth of the mean joins the one after it (the last: before it)
    """
    filled = [dict(block) for block in blocks if block]
    if plan.shard == "parameters":
        return _join_small(filled)
    if plan.shard == "none":
        filled = [{name: shape} for block in filled for name, shape in block.items()]
    groups = buckets(
        [sum(map(_numel, block.values())) for block in filled],
        element_bytes=gradient_bytes,
        bucket_bytes=plan.bucket_bytes,
    )
    return [
        {name: shape for index in sorted(group) for name, shape in filled[index].items()}
        for group in reversed(groups)
    ]


def _join_small(blocks: list[dict[str, tuple[int, ...]]]) -> list[Shapes]:
    sizes = [sum(map(_numel, block.values())) for block in blocks]
    least = sum(sizes) / max(1, len(sizes)) / 20
    units: list[dict[str, tuple[int, ...]]] = []
    waiting: dict[str, tuple[int, ...]] = {}
    for block, size in zip(blocks, sizes, strict=True):
        if size < least:
            waiting |= block
            continue
        units.append(waiting | block)
        waiting = {}
    if waiting:
        if units:
            units[-1] |= waiting
        else:
            units.append(waiting)
    return list(units)


def unit_layouts(
    blocks: Sequence[Shapes], *, plan: Plan, gradient_bytes: int, shards: int | None = None
) -> list[FlatLayout]:
    """The flat layouts that the plan's data or shard strategy makes of the model's blocks, cut for
    `shards` ranks (default: the plan's shard group).
    """
    if shards is None:
        shards = plan.num_shards if plan.shard != "none" else 1
    return [
        flat_layout(unit, num_shards=shards)
        for unit in unit_shapes(blocks, plan=plan, gradient_bytes=gradient_bytes)
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
    kept: Sequence[bool] = (),
    groups: str = "",
) -> list[Message]:
    """The data-parallel and sharding messages of one optimizer step.

    Gradients are reduced in `master_dtype`; weights travel in `compute_dtype`. Under
    `shard=parameters` every microbatch gathers each unit for forward and again for backward. `kept`
    names the units that the last block of forward uses: backward takes those as they are. Without
    it that is the last unit alone; a head tied to the embedding makes it the first unit too. A
    pipeline gathers a stage once a step. `groups` is the beginning of the groups' names: `expert_`
    for experts that are shared out, which 1 / expert of the ranks reduce among themselves.
    """
    master, compute = DTYPE_BYTES[master_dtype], DTYPE_BYTES[compute_dtype]
    m = plan.num_microbatches
    reduces = m if plan.gradient_sync == "microbatch" else 1
    found: list[Message] = []
    ranks = plan.data * plan.context // (plan.expert if groups else 1)
    for layout in layouts:
        whole = layout.whole_numel
        if plan.shard == "none":
            if ranks > 1:
                found.append(
                    Message(
                        what="gradient",
                        operation="all_reduce",
                        group=f"{groups}reduce",
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
                    group=f"{groups}shard",
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
                    group=f"{groups}shard",
                    group_size=layout.num_shards,
                    payload_bytes=whole * compute,
                    hidden_behind="",
                )
            )
    if plan.shard == "parameters" and layouts and layouts[0].num_shards > 1:
        found += _unshard_messages(
            layouts,
            plan=plan,
            groups=groups,
            compute_bytes=compute,
            kept=kept or [index == len(layouts) - 1 for index in range(len(layouts))],
        )
    return found


#: numbers in the agreement word of a step, eight bytes each (`train/agree.py`)
WORD_FIELDS = 9


def word_messages(world_size: int) -> list[Message]:
    """The one control message of a step: every rank's word before all ranks."""
    if world_size == 1:
        return []
    return [
        Message(
            what="word",
            operation="all_gather",
            group="world",
            group_size=world_size,
            payload_bytes=8 * WORD_FIELDS * world_size,
        )
    ]


def _unshard_messages(
    layouts: Sequence[FlatLayout],
    *,
    plan: Plan,
    groups: str,
    compute_bytes: int,
    kept: Sequence[bool],
) -> list[Message]:
    m = plan.num_microbatches
    return [
        Message(
            what="weight",
            operation="all_gather",
            group=f"{groups}shard",
            group_size=layout.num_shards,
            payload_bytes=layout.whole_numel * compute_bytes,
            count=1 if plan.pipeline > 1 else m if stays else 2 * m,
            hidden_behind="the neighbouring block" if plan.pipeline == 1 else "",
        )
        for layout, stays in zip(layouts, kept, strict=True)
    ]


def state_bytes(
    layouts: Sequence[FlatLayout],
    *,
    plan: Plan,
    compute_dtype: str = "float32",
    master_dtype: str = "float32",
) -> StateBytes:
    """Parameter, gradient and optimizer bytes a rank, padding of the flat layout included.

    W = elements of all weights, s = elements of this rank's pieces:

    | shard | parameters | gradients, at their peak | optimizer |
    |---|---|---|---|
    | none | W | W; 2 W if reduced each of several microbatches | 2 W |
    | optimizer | W | W + s | 2 s |
    | gradients | W | s and the unit that fills beside the one that is sent | 2 s |
    | parameters | s | the same | 2 s |

    Several microbatches that are reduced once keep the full gradients of all units until then, and
    so does a schedule that puts weight gradients off.
    A compute type smaller than the master type adds s (or W) of master weights. Under
    `shard=parameters` the units gathered for compute, and on gloo the messages of a reduce_scatter
    before they are added, stand beside this; both are working memory, not state.
    """
    master, compute = DTYPE_BYTES[master_dtype], DTYPE_BYTES[compute_dtype]
    natural = sum(_numel(slot.shape) for layout in layouts for slot in layout.slots)
    second_copy = compute_dtype != master_dtype
    each = plan.num_microbatches > 1 and plan.gradient_sync == "microbatch"
    if plan.shard == "none":
        return StateBytes(
            parameters=natural * (compute + (master if second_copy else 0)),
            gradients=natural * master * (2 if each else 1),
            optimizer=2 * natural * master,
        )
    owned = sum(layout.piece_numel for layout in layouts)
    if plan.shard == "parameters":
        parameters = owned * master
    else:
        parameters = natural * compute + (owned * master if second_copy else 0)
    return StateBytes(
        parameters=parameters,
        gradients=_peak_gradient_numel(layouts, plan) * master,
        optimizer=2 * owned * master,
    )


def _peak_gradient_numel(layouts: Sequence[FlatLayout], plan: Plan) -> int:
    """Replays one step of `parallel/zero.py`: units fill and leave from the last to the first."""
    windows = plan.num_microbatches if plan.gradient_sync == "microbatch" else 1
    frees = plan.shard != "optimizer"
    split = plan.pipeline > 1 and plan.schedule in _SPLIT_BACKWARD
    order = list(reversed(layouts))
    buffers: dict[int, int] = {}
    pieces: dict[int, int] = {}
    peak = 0
    for window in range(windows):
        # every unit fills before the last microbatch; where W comes after B, norms fill theirs in B
        if plan.num_microbatches > windows or split:
            buffers = {index: layout.whole_numel for index, layout in enumerate(order)}
        for index, layout in enumerate(order):
            arriving = order[index - 1].piece_numel if window and index else 0
            buffers[index] = layout.whole_numel
            peak = max(peak, sum(buffers.values()) + sum(pieces.values()) + arriving)
            if frees and index:
                del buffers[index - 1]
            pieces[index] = layout.piece_numel
            arriving = layout.piece_numel if window else 0
            if window and not frees:  # nothing is waited for until the window ends
                arriving = sum(one.piece_numel for one in order[: index + 1])
            peak = max(peak, sum(buffers.values()) + sum(pieces.values()) + arriving)
        if frees:
            buffers.clear()
    return peak
