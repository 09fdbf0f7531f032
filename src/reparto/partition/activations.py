"""Bytes of activations between ranks: tensor parallelism within a layer, pipelines between layers.

What a model's blocks send is a few counts a block (`BlockFlow`), so this file knows any model that
has them; `decoder_flow` has those of our decoder. Payload and wire are those of `volume.py`.

T tokens of a microbatch, D hidden width, c bytes of the compute type, n tensor degree, m
microbatches. A block *enters* a region of tensor parallelism (whole tokens in, gradients summed)
and *leaves* it (sums out):

| | plain | sequence parallel |
|---|---|---|
| enter, forward | nothing | all_gather, c T D |
| enter, backward | all_reduce, c T D | reduce_scatter, c T D |
| leave, forward | all_reduce, c T D | reduce_scatter, c T D |
| leave, backward | nothing | all_gather, c T D |

A layer with experts sends the rows of its tokens to the experts' ranks and back, and their
gradients likewise: four exchanges of c K T D with K experts a token, if loads are even.

A pipeline border carries c T D forward and c T D backward a microbatch, 1 / n of it under sequence
parallelism. Under recompute=full a block's forward messages are sent again in backward, except a
last `leave` whose result nothing has saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reparto.config.model import ModelConfig
from reparto.config.plan import Plan
from reparto.partition.place import Holding, stage_owners
from reparto.partition.volume import Message, Operation
from reparto.units import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFlow:
    """How often one block enters and leaves a region of tensor parallelism."""

    enters: int = 0
    leaves: int = 0
    enters_again: int = 0
    "in backward, under recompute=full"
    leaves_again: int = 0
    "likewise"
    loss: bool = False
    "whether a cross-entropy over a cut vocabulary follows"
    routes: bool = False
    "whether its tokens go to experts"


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What a model sends besides weights and gradients."""

    blocks: Sequence[BlockFlow]
    tokens: int
    "tokens of one microbatch of one rank"
    hidden: int
    "elements a token in the hidden state"
    smoothed: bool = False
    "whether the loss spreads its target, which is one number a token more"
    experts: int = 0
    "routed experts of a layer"
    chosen: int = 0
    "experts that a token goes to"


def decoder_flow(config: ModelConfig, *, tokens: int, label_smoothing: float = 0.0) -> Flow:
    """Our decoder: attention and feed-forward of each layer are a region, so is the head.

    Dropout after a layer's last sum has saved its mask, so that recompute makes that sum again.
    """
    again = 2 if config.dropout > 0 else 1
    return Flow(
        blocks=[
            BlockFlow(leaves=1),
            *(
                BlockFlow(
                    enters=2,
                    leaves=2,
                    enters_again=2,
                    leaves_again=again,
                    routes=config.has_experts(index),
                )
                for index in range(config.num_hidden_layers)
            ),
            BlockFlow(),
            BlockFlow(enters=1, loss=True),
        ],
        tokens=tokens,
        hidden=config.hidden_size,
        smoothed=label_smoothing > 0,
        experts=config.num_experts,
        chosen=config.num_experts_per_tok if config.num_experts else 0,
    )


def activation_messages(
    flow: Flow,
    plan: Plan,
    held: Holding,
    *,
    compute_dtype: str = "float32",
    master_dtype: str = "float32",
) -> list[Message]:
    """All messages of one step of one rank that are neither gradients nor weights of shards."""
    return [
        *_tensor_messages(flow, plan, held, compute_dtype),
        *_expert_messages(flow, plan, held, compute_dtype),
        *_pipeline_messages(flow, plan, held, compute_dtype),
        *_partial_messages(plan, held, master_dtype),
        *_tied_messages(held, plan, master_dtype),
    ]


def _tensor_messages(flow: Flow, plan: Plan, held: Holding, compute_dtype: str) -> list[Message]:
    if plan.tensor == 1:
        return []
    mine = [flow.blocks[chunk.first_block + i] for chunk in held.chunks
            for i in range(chunk.num_blocks)]  # fmt: skip
    again = plan.recompute == "full"
    enters, leaves = sum(one.enters for one in mine), sum(one.leaves for one in mine)
    enters_again = sum(one.enters_again for one in mine) if again else 0
    leaves_again = sum(one.leaves_again for one in mine) if again else 0
    state = flow.tokens * flow.hidden * DTYPE_BYTES[compute_dtype]
    m = plan.num_microbatches

    def message(what: str, operation: Operation, count: int, payload: int = state) -> Message:
        return Message(
            what=what, operation=operation, group="tensor", group_size=plan.tensor,
            payload_bytes=payload, count=count * m,
        )  # fmt: skip

    if plan.sequence_parallel:
        found = [
            message("activation", "all_gather", enters + enters_again),
            message("activation", "reduce_scatter", leaves + leaves_again),
            message("activation-gradient", "reduce_scatter", enters),
            message("activation-gradient", "all_gather", leaves),
        ]
    else:
        found = [
            message("activation", "all_reduce", leaves + leaves_again),
            message("activation-gradient", "all_reduce", enters),
        ]
    if any(one.loss for one in mine):
        wide = 8 if compute_dtype == "float64" else 4
        facts = plan.tensor * (3 if flow.smoothed else 2) * flow.tokens * wide
        found.append(message("activation", "all_gather", 1, facts))
    return [one for one in found if one.count]


def _expert_messages(flow: Flow, plan: Plan, held: Holding, compute_dtype: str) -> list[Message]:
    """Rows of experts for even loads. What a rank sends is T K rows whatever the load; the payload
    is that of the larger side, so an uneven load only adds to it.
    """
    found: list[Message] = []
    if flow.experts and plan.world_size > 1:
        layers = sum(one.routes for one in flow.blocks)
        found.append(
            Message(
                what="expert-load", operation="all_reduce", group="world",
                group_size=plan.world_size, payload_bytes=8 * layers * (2 * flow.experts + 2),
            )
        )  # fmt: skip
    mine = sum(flow.blocks[chunk.first_block + i].routes for chunk in held.chunks
               for i in range(chunk.num_blocks))  # fmt: skip
    if plan.expert == 1 or not mine:
        return found
    times = mine * plan.num_microbatches
    forward = times * (2 if plan.recompute == "full" else 1)
    rows = flow.tokens * flow.chosen * flow.hidden * DTYPE_BYTES[compute_dtype]
    for what, count, payload in (
        ("route", forward, 8 * flow.experts),
        ("dispatch", forward, rows),
        ("combine", forward, rows),
        ("combine-gradient", times, rows),
        ("dispatch-gradient", times, rows),
    ):
        found.append(
            Message(
                what=what, operation="all_to_all", group="expert", group_size=plan.expert,
                payload_bytes=payload, count=count,
            )
        )  # fmt: skip
    return found


def _pipeline_messages(flow: Flow, plan: Plan, held: Holding, compute_dtype: str) -> list[Message]:
    if plan.pipeline == 1:
        return []
    owners = stage_owners(plan)
    payload = flow.tokens * flow.hidden * DTYPE_BYTES[compute_dtype]
    payload //= plan.tensor if plan.sequence_parallel else 1
    found = []
    for chunk in held.chunks:
        stage = chunk.pipeline_stage
        before = stage > 0 and owners[stage - 1] != owners[stage]
        after = stage + 1 < len(owners) and owners[stage + 1] != owners[stage]
        pairs: list[tuple[bool, str, Operation]] = [
            (before, "activation", "recv"),
            (before, "activation-gradient", "send"),
            (after, "activation", "send"),
            (after, "activation-gradient", "recv"),
        ]
        found += [
            Message(
                what=what, operation=operation, group="pipeline", group_size=plan.pipeline,
                payload_bytes=payload, count=plan.num_microbatches,
                hidden_behind="other microbatches",
            )
            for there, what, operation in pairs
            if there
        ]  # fmt: skip
    return found


def _partial_messages(plan: Plan, held: Holding, master_dtype: str) -> list[Message]:
    names = [slot.name for layout in held.layouts for slot in layout.slots]
    numel = sum(
        held.table[name].held_numel for name in names if "tensor" in held.table[name].partial_over
    )
    if plan.tensor == 1 or not numel:
        return []
    return [
        Message(
            what="partial", operation="all_reduce", group="tensor", group_size=plan.tensor,
            payload_bytes=numel * DTYPE_BYTES[master_dtype],
        )
    ]  # fmt: skip


def _tied_messages(held: Holding, plan: Plan, master_dtype: str) -> list[Message]:
    found: list[Message] = []
    sides: list[tuple[str, int, Operation, Operation]] = [
        (stored, len(peers), "recv", "send") for stored, peers in held.copied_to.items()
    ]
    sides += [(local, 1, "send", "recv") for local in held.copies]
    for name, count, gradient, weight in sides:
        payload = held.table[name].held_numel * DTYPE_BYTES[master_dtype]
        if payload:
            found += [
                Message(what=what, operation=operation, group="pipeline",
                        group_size=plan.pipeline, payload_bytes=payload, count=count)
                for what, operation in (("tied-gradient", gradient), ("tied-weight", weight))
            ]  # fmt: skip
    return found
