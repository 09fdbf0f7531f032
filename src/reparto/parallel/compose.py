"""All strategies put together: the one file that sees them all. Line order is composition order.

    1 table         every parameter whole on every rank: names, shapes, decay, ties
    2 recompute     wraps forward of blocks, inside the hooks, so that weights are gathered first
    3 data or zero  gives parameters their memory: last, because it cuts what the others left

Each line needs what stands above it and nothing below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reparto.comm.mesh import Mesh
from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.parallel import data, zero
from reparto.parallel.flat import aliases, block_parameters, unique_parameters
from reparto.partition.flat import FlatLayout, flat_layout
from reparto.partition.grid import AXES
from reparto.partition.tensors import Placement, initial_table
from reparto.partition.volume import StateBytes, state_bytes, unit_layouts


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A model with all strategies applied, as one rank holds it."""

    model: nn.Module
    "the module to call; parameters are this rank's"
    strategy: data.Buckets | zero.Zero
    "reduces gradients, and owns the memory of weights and gradients"
    table: Mapping[str, Placement]
    "what this rank owns of every parameter"
    layouts: tuple[FlatLayout, ...]
    "flat memory of the trainable parameters, in model order"
    kept: tuple[bool, ...]
    "per layout: whether backward starts with its weights as forward left them"
    mesh: Mesh
    plan: Plan
    compute: torch.dtype
    master: torch.dtype

    def expected_state(self) -> StateBytes:
        """What `partition/volume.py` says this rank holds."""
        return state_bytes(
            self.layouts,
            plan=self.plan,
            compute_dtype=dtype_name(self.compute),
            master_dtype=dtype_name(self.master),
        )


def apply(
    model: nn.Module,
    *,
    mesh: Mesh,
    plan: Plan,
    blocks: Sequence[nn.Module],
    initial: Callable[[str], Tensor],
    decays: Callable[[str], bool],
    compute: torch.dtype = torch.float32,
    master: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Parallel:
    """Share `model` out over `mesh` by `plan`.

    blocks   modules that forward calls one after another
    initial  global name -> whole initial tensor
    decays   global name -> whether weight decay applies
    """
    refuse_unbuilt(plan)
    device = device or torch.device("cpu")
    shapes = {name: tuple(one.shape) for name, one in unique_parameters(model).items()}
    frozen = {name for name, one in unique_parameters(model).items() if not one.requires_grad}
    table = initial_table(
        shapes, decays={name: decays(name) for name in shapes}, frozen=frozen, axes=AXES
    )
    by_block = block_parameters(model, list(blocks))
    trainable = [{name: shapes[name] for name in block if name not in frozen} for block in by_block]
    layouts = unit_layouts(trainable, plan=plan, gradient_bytes=master.itemsize)
    last = set(_names_of(model, blocks[-1]))
    kept = tuple(any(slot.name in last for slot in one.slots) for one in layouts)

    _recompute(blocks, plan.recompute)

    strategy: data.Buckets | zero.Zero
    if plan.shard == "none":
        table = data.place(table)
        strategy = data.Buckets(
            model, layouts=layouts, mesh=mesh, plan=plan, table=table, initial=initial,
            compute=compute, master=master, device=device,
        )  # fmt: skip
    else:
        table = zero.place(table, plan, shard=mesh.group("shard").index)
        frozen_layouts = [
            flat_layout({name: shapes[name] for name in block if name in frozen},
                        num_shards=plan.num_shards)
            for block in by_block if frozen & block.keys()
        ]  # fmt: skip
        strategy = zero.Zero(
            model, units=layouts, frozen_units=frozen_layouts, blocks=blocks, mesh=mesh, plan=plan,
            table=table, initial=initial, compute=compute, master=master, device=device,
        )  # fmt: skip

    for alias, name in aliases(model).items():
        table[alias] = table[name].with_(name=alias, tied_to=name)
    return Parallel(
        model=model, strategy=strategy, table=table, layouts=tuple(layouts), kept=kept,
        mesh=mesh, plan=plan, compute=compute, master=master,
    )  # fmt: skip


def _names_of(model: nn.Module, block: nn.Module) -> list[str]:
    names = {id(one): name for name, one in unique_parameters(model).items()}
    return [names[id(one)] for one in block.parameters()]


def _recompute(blocks: Sequence[nn.Module], mode: str) -> None:
    """full: whole layers are run again in backward. selective: only their attention core."""
    if mode == "none":
        return
    for block in blocks:
        if not list(block.children()):
            continue  # embedding, norm and head keep little that they could make again
        chosen = [block]
        if mode == "selective":
            chosen = [one for name, one in block.named_modules() if name.endswith(".core")]
        for module in chosen:
            module.forward = partial(_checkpointed, module.forward)


def _checkpointed(forward: Callable[..., object], *inputs: object, **named: object) -> object:
    # no random state to keep: dropout masks are a function of position (model/dropout.py)
    run = partial(forward, **named) if named else forward
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`, as configs spell it."""
    return str(dtype).removeprefix("torch.")


def refuse_unbuilt(plan: Plan) -> None:
    """Axes whose strategy this version does not have yet are refused, never ignored."""
    for field in ("tensor", "pipeline", "context", "expert"):
        if getattr(plan, field) > 1:
            raise UserError(
                f"{field} parallelism is not built yet",
                where=f"partition.{field}",
                legal="1",
                nearest=plan.model_copy(update={field: 1}).text,
            )
