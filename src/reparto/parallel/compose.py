"""All strategies put together: the one file that sees them all. Line order is composition order.

    1 holding       who holds what, by arithmetic: tensor cuts matrices, the pipeline takes blocks,
                    sharding cuts the rows of what is left (`partition/place.py`)
    2 tensor        hooks on whole modules, while every module is still there
    3 expert        experts of other ranks are called by messages; their parameters are taken away
    4 pipeline      takes away the parameters of blocks that are elsewhere
    5 compile       each block that is here, if asked for
    6 recompute     wraps forward of blocks, so that it runs again what stands above, messages too
    7 data or zero  gives parameters their memory and watches their gradients: last, because it cuts
                    what the others left, and first to gather, because its hooks are outermost

Each line needs what stands above it and nothing below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reparto.comm.mesh import Mesh
from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.model.chain import Chain, TokenLoss, plain_token_loss
from reparto.parallel import data, expert, pipeline, tensor, vocab_loss, zero
from reparto.parallel.flat import aliases, put_parameters, unique_parameters
from reparto.parallel.gradients import WeightGradients
from reparto.parallel.joined import Both, Joined, Reducer, cut_local
from reparto.partition.built import refuse_unbuilt
from reparto.partition.cuts import Style, match_rules
from reparto.partition.experts import expert_numbers
from reparto.partition.flat import FlatLayout
from reparto.partition.place import Chunk, Holding, ModelMap, held_state, holding
from reparto.partition.tensors import Placement
from reparto.partition.volume import StateBytes
from reparto.schedule.actions import Schedule
from reparto.schedule.generate import generate
from reparto.schedule.lower import lower

Batch = TypeVar("Batch")
LossFunction = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A model with all strategies applied, as one rank holds it."""

    model: nn.Module
    "the module; parameters are this rank's. Callable as a whole only without a pipeline"
    strategy: Joined
    "owns the memory of weights and gradients"
    table: Mapping[str, Placement]
    "what this rank owns of every parameter"
    holding: Holding
    "the same before and after each cut, and the chunks of this rank"
    mesh: Mesh
    plan: Plan
    compute: torch.dtype
    master: torch.dtype
    device: torch.device
    parts: Mapping[int, Reducer]
    "virtual stage of this rank -> the strategy that owns its weights"
    weight_gradients: WeightGradients
    "the queue between B and W"
    balance: expert.Balance
    "the load of the model's experts; false where it has none"
    vocabulary_cut: tuple[int, int] | None
    "(first word of this rank, size of the whole vocabulary) where logits are cut, else None"

    @property
    def layouts(self) -> tuple[FlatLayout, ...]:
        """Flat memory of this rank's trainable parameters, in model order."""
        return self.holding.layouts

    def expected_state(self) -> StateBytes:
        """What arithmetic says this rank holds."""
        return held_state(
            self.holding,
            self.plan,
            compute_dtype=dtype_name(self.compute),
            master_dtype=dtype_name(self.master),
        )

    def token_loss(self, label_smoothing: float = 0.0) -> TokenLoss:
        """Cross-entropy of single tokens for the logits that this model returns.

        Every rank of a tensor group must call it; each gets the losses of all tokens.
        """
        if self.vocabulary_cut is None:
            return plain_token_loss(label_smoothing)
        first, size = self.vocabulary_cut
        return partial(
            vocab_loss.cross_entropy_tokens,
            group=self.mesh.group("tensor"),
            first_word=first,
            vocabulary=size,
            label_smoothing=label_smoothing,
        )


def apply(
    model: nn.Module,
    *,
    mesh: Mesh,
    plan: Plan,
    initial: Callable[[str], Tensor],
    decays: Callable[[str], bool],
    blocks: Sequence[nn.Module] | None = None,
    rules: Mapping[str, str] | None = None,
    costs: Sequence[float] | None = None,
    compute: torch.dtype = torch.float32,
    master: torch.dtype = torch.float32,
    device: torch.device | None = None,
    compile_blocks: bool = False,
) -> Parallel:
    """Share `model` out over `mesh` by `plan`. Its parameters may be on `meta`.

    blocks   modules that forward calls one after another; default: the whole model
    rules    module path pattern -> style, for tensor parallelism (`partition/cuts.py`)
    costs    relative compute of each block, by which a pipeline is cut; default: all alike
    initial  global name -> whole initial tensor; asked only for what this rank holds a part of
    decays   global name -> whether weight decay applies
    compile_blocks  run each block that has layers through torch.compile; hooks stay outside, and
             weight gradients are left to autograd, so a W of the schedule is empty

    A `Chain` has blocks, rules and costs. Raises `UserError` for what the model cannot do.
    """
    refuse_unbuilt(plan)
    device = device or torch.device("cpu")
    blocks = list(blocks) if blocks is not None else [model]
    world = model_map(model, blocks, decays=decays, rules=rules, costs=costs)
    held = holding(world, plan, mesh.rank, gradient_bytes=master.itemsize)
    styles = match_rules(rules, world.paths or ()) if rules is not None else {}

    weight_gradients = WeightGradients(enabled=not compile_blocks)
    if plan.tensor > 1:
        tensor.apply(
            model, styles=styles, table=held.tensor_held, group=mesh.group("tensor"),
            sequence_parallel=plan.sequence_parallel, overlap=tensor.overlaps(device),
            weight_gradients=weight_gradients,
        )  # fmt: skip
    elif not compile_blocks:
        tensor.defer_linears(model, styles, weight_gradients)

    mine = {chunk.pipeline_stage: blocks_of(chunk, blocks) for chunk in held.chunks}
    if plan.expert > 1:
        expert.apply(model, styles=styles, group=mesh.group("expert"))
        here_now = {world.stored(name) for chunk in held.chunks
                    for name in (*chunk.names, *chunk.borrows)}  # fmt: skip
        numbers = expert_numbers(world.rules, world.shapes)
        expert.keep_only(model, [name for name in numbers if name not in here_now])
    if plan.pipeline > 1:
        pipeline.keep_only(model, [block for chunk in mine.values() for block in chunk])

    here = [block for chunk in mine.values() for block in chunk]
    if compile_blocks:
        _compile(here)
    _recompute(blocks, here, plan)

    def local_initial(name: str) -> Tensor:
        stored = world.stored(name)
        return cut_local(initial(stored), held.tensor_held[stored].held)

    parts = {
        chunk.pipeline_stage: _strategy(
            chunk, mesh=mesh, plan=plan, table=held.table, initial=local_initial,
            compute=compute, master=master, device=device, several=len(held.chunks) > 1,
        )
        for chunk in held.chunks
    }  # fmt: skip
    keeper = {name: parts[chunk.pipeline_stage] for chunk in held.chunks for name in chunk.names}
    put_parameters(model, lambda name, old: keeper[name].memory(name))
    for chunk in held.chunks:
        uses = {name: 1 + sum(name in other.borrows for other in held.chunks)
                for name in chunk.names}  # fmt: skip
        parts[chunk.pipeline_stage].attach(
            model, mine[chunk.pipeline_stage], uses=uses, deferred=weight_gradients
        )
    return Parallel(
        model=model,
        strategy=Joined(
            parts, names={chunk.pipeline_stage: chunk.names for chunk in held.chunks},
            held=held, stored=world.stored, mesh=mesh, master=master,
        ),
        table=held.table, holding=held, mesh=mesh, plan=plan, compute=compute, master=master,
        device=device, parts=parts, weight_gradients=weight_gradients,
        balance=expert.Balance(model, mesh),
        vocabulary_cut=_vocabulary_cut(world, styles, held, plan),
    )  # fmt: skip


def model_map(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    decays: Callable[[str], bool],
    rules: Mapping[str, str] | None = None,
    costs: Sequence[float] | None = None,
) -> ModelMap:
    """The model as arithmetic sees it: names, shapes, ties, blocks."""
    unique = unique_parameters(model)
    where = {
        (id(module), attribute): f"{path}.{attribute}" if path else attribute
        for path, module in model.named_modules()
        for attribute, one in module._parameters.items()
        if one is not None
    }
    return ModelMap(
        shapes={name: tuple(one.shape) for name, one in unique.items()},
        aliases=aliases(model),
        blocks=[
            [
                where[id(module), attribute]
                for module in block.modules()
                for attribute, one in module._parameters.items()
                if one is not None
            ]
            for block in blocks
        ],
        decays={name: decays(name) for name in unique},
        frozen=frozenset(name for name, one in unique.items() if not one.requires_grad),
        rules=rules,
        paths=[path for path, _ in model.named_modules() if path],
        costs=costs or None,
    )


def blocks_of(chunk: Chunk, blocks: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """The modules of a chunk."""
    return blocks[chunk.first_block : chunk.first_block + chunk.num_blocks]


def _strategy(
    chunk: Chunk,
    *,
    mesh: Mesh,
    plan: Plan,
    table: Mapping[str, Placement],
    initial: Callable[[str], Tensor],
    compute: torch.dtype,
    master: torch.dtype,
    device: torch.device,
    several: bool,
) -> Reducer:
    stage = f"{chunk.pipeline_stage}:" if several else ""
    found: list[tuple[Reducer, Sequence[str]]] = []
    for part in chunk.parts:
        label = f"{stage}experts:" if part.groups else stage
        one: Reducer
        if plan.shard == "none":
            one = data.Buckets(
                names=part.names, layouts=part.layouts, mesh=mesh, plan=plan, table=table,
                initial=initial, compute=compute, master=master, device=device, label=label,
                groups=part.groups,
            )  # fmt: skip
        else:
            one = zero.Zero(
                units=part.layouts, frozen_units=part.frozen_layouts, mesh=mesh, plan=plan,
                table=table, initial=initial, compute=compute, master=master, device=device,
                label=label, groups=part.groups,
            )  # fmt: skip
        found.append((one, part.names))
    return found[0][0] if len(found) == 1 else Both(found)


def _vocabulary_cut(
    world: ModelMap, styles: Mapping[str, Style], held: Holding, plan: Plan
) -> tuple[int, int] | None:
    if plan.tensor == 1:
        return None
    for path, style in styles.items():
        if style.name == "vocab_column":
            one = held.tensor_held[world.stored(f"{path}.weight")]
            return one.held[0].start[0], one.shape[0]
    return None


# --- execution -----------------------------------------------------------------------------------


def schedule_of(plan: Plan) -> Schedule:
    """The plan's schedule, lowered for its sharding and synchronisation."""
    schedule = generate(
        plan.schedule if plan.pipeline > 1 else "1f1b",
        pipeline=plan.pipeline,
        chunks=plan.num_chunks if plan.pipeline > 1 else 1,
        num_microbatches=plan.num_microbatches,
    )
    return lower(
        schedule,
        # without a pipeline, weights are gathered by block: less memory than a whole stage
        shard_parameters=plan.shard == "parameters" and plan.pipeline > 1,
        gradient_sync=plan.gradient_sync,
    )


def executor(
    parallel: Parallel,
    *,
    chain: Chain[Batch] | None = None,
    loss: LossFunction[Batch] | None = None,
) -> pipeline.Executor[Batch]:
    """What runs the plan's schedule: on a `chain`, or on a `loss(model, microbatch)` that calls the
    whole model, which only a plan without a pipeline can have.
    """
    plan = parallel.plan
    if chain is not None:
        stages = [_chain_stage(parallel, chain, chunk) for chunk in parallel.holding.chunks]
    elif loss is None or plan.pipeline > 1:
        raise UserError(
            f"pipeline={plan.pipeline} needs the model as a list of blocks",
            where="partition.pipeline",
            legal="1, or a Chain of the model",
            nearest=plan.model_copy(update={"pipeline": 1, "chunks": 0}).text,
        )
    else:
        whole = loss
        stages = [
            pipeline.Stage(
                index=0,
                forward=lambda hidden, batch: torch.empty(0),
                loss=lambda output, batch: whole(parallel.model, batch),
                reduction=parallel.parts[0],
            )
        ]
    return pipeline.Executor(
        schedule_of(plan),
        position=parallel.mesh.coordinates["pipeline"],
        stages=stages,
        group=parallel.mesh.group("pipeline"),
        weight_gradients=parallel.weight_gradients,
        ring=parallel.mesh.ring,
        dtype=parallel.compute,
        device=parallel.device,
        reduce_each=plan.gradient_sync == "microbatch",
    )


def _chain_stage(parallel: Parallel, chain: Chain[Batch], chunk: Chunk) -> pipeline.Stage[Batch]:
    plan, index = parallel.plan, chunk.pipeline_stage
    blocks = blocks_of(chunk, chain.blocks)
    last = chunk.first_block + chunk.num_blocks == len(chain.blocks)
    token_loss = parallel.token_loss(chain.label_smoothing)

    def forward(hidden: Tensor | None, batch: Batch) -> Tensor:
        return chain.run(
            blocks, chain.enter(batch) if hidden is None else hidden, chain.context(batch)
        )

    def loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, counted = chain.losses(output, batch, token_loss)
        return losses.sum(), counted.sum()

    def shape_after(block: int) -> Callable[[Batch], Sequence[int]]:
        def shape(batch: Batch) -> Sequence[int]:
            whole = list(chain.hidden_shape(batch, block))
            if plan.sequence_parallel:
                whole[-2] //= plan.tensor
            return whole

        return shape

    borrows: dict[int, list[str]] = {}
    for name in chunk.borrows:
        owner = next(one for one in parallel.holding.chunks if name in one.names)
        borrows.setdefault(owner.pipeline_stage, []).append(name)
    return pipeline.Stage(
        index=index,
        forward=forward,
        loss=loss if last else None,
        input_shape=shape_after(chunk.first_block - 1) if index else None,
        output_shape=None if last else shape_after(chunk.first_block + chunk.num_blocks - 1),
        reduction=parallel.parts[index],
        borrows=borrows,
    )


def _compile(blocks: Sequence[nn.Module]) -> None:
    """Block by block: all layers are alike, so they are compiled once, and gathering weights,
    sending and recomputing stay outside. A whole model compiled at once would have its messages
    inside the graph, where their order is the compiler's.
    """
    for block in blocks:
        if list(block.children()):
            block.forward = torch.compile(block.forward)


def _recompute(blocks: Sequence[nn.Module], mine: Sequence[nn.Module], plan: Plan) -> None:
    """full: whole layers are run again in backward. selective: only their attention core."""
    if plan.recompute == "none":
        return
    if plan.recompute == "selective" and not any(map(_cores, blocks)):
        raise UserError(
            "recompute=selective runs modules named `core` again, and this model has none",
            where="partition.recompute",
            legal="none, full",
            nearest=plan.model_copy(update={"recompute": "full"}).text,
        )
    for block in mine:
        if not list(block.children()):
            continue  # embedding, norm and head keep little that they could make again
        for module in _cores(block) if plan.recompute == "selective" else [block]:
            module.forward = partial(_checkpointed, module.forward)


def _cores(block: nn.Module) -> list[nn.Module]:
    return [one for name, one in block.named_modules() if name.split(".")[-1] == "core"]


def _checkpointed(forward: Callable[..., object], *inputs: object, **named: object) -> object:
    # no random state to keep: dropout masks are a function of position (model/dropout.py)
    run = partial(forward, **named) if named else forward
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`, as configs spell it."""
    return str(dtype).removeprefix("torch.")
