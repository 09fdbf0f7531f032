"""Tensors in flat memory, and parameters put in their place in a module.

`partition/flat.py` says where every parameter lies; this file makes the copies. No strategy: all
strategies that keep gradients or weights in one buffer use it.

    N shards   P elements of one piece   R rows   C columns (all dims but the first)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reparto.partition.flat import FlatLayout, Slot
from reparto.partition.tensors import Rectangle


@dataclass(frozen=True, kw_only=True, slots=True)
class Owned:
    """The part of one parameter that this rank updates: what the optimizer and checkpoint see."""

    name: str
    "global name"
    rectangle: Rectangle
    "where the part lies in the global tensor"
    weight: Tensor
    "master weight, the rectangle's shape; a packed one goes on with the rectangles `below`"
    gradient: Tensor | None
    "sum of gradients over all ranks and microbatches, between reduction and update; None before"
    decays: bool
    "whether weight decay applies"
    counts: bool
    "whether this rank adds it to the global norm; False where another rank holds an equal copy"
    below: tuple[Rectangle, ...] = ()
    "further rectangles, where a packed weight (q|k|v) was cut in each of its parts"

    def parts(self, tensor: Tensor) -> list[tuple[Rectangle, Tensor]]:
        """Any tensor of the weight's shape (gradient, moment), cut in its rectangles."""
        if not self.below:
            return [(self.rectangle, tensor)]
        boxes = (self.rectangle, *self.below)
        rows = tensor.split_with_sizes([box.size[0] for box in boxes])
        return list(zip(boxes, rows, strict=True))


def copy_in(whole_NP: Tensor, layout: FlatLayout, slot: Slot, tensor: Tensor, *, add: bool) -> None:
    """Write (or add) a full tensor into its slot of all pieces; casts on the way."""
    source_RC = tensor.reshape(slot.rows, slot.columns)
    for run in layout.runs(slot):
        width = run.rows * slot.columns
        place = whole_NP[
            run.first_rank : run.first_rank + run.count, slot.offset : slot.offset + width
        ]
        last = run.first_row + run.count * run.rows
        part = source_RC[run.first_row : last].reshape(run.count, width)
        if add:
            place.add_(part)
        else:
            place.copy_(part)


def copy_out(tensor: Tensor, layout: FlatLayout, slot: Slot, whole_NP: Tensor) -> None:
    """Read a full tensor out of its slot of all pieces."""
    target_RC = tensor.view(slot.rows, slot.columns)
    for run in layout.runs(slot):
        width = run.rows * slot.columns
        place = whole_NP[
            run.first_rank : run.first_rank + run.count, slot.offset : slot.offset + width
        ]
        last = run.first_row + run.count * run.rows
        target_RC[run.first_row : last].view(run.count, width).copy_(place)


def own_rows(piece_P: Tensor, layout: FlatLayout, slot: Slot, shard: int) -> Tensor:
    """The rows of `slot` that `shard` keeps, as a view of its piece in the tensor's own shape."""
    _, rows = layout.rows_of(slot, shard)
    flat = piece_P[slot.offset : slot.offset + rows * slot.columns]
    return flat.view(rows, *slot.shape[1:]) if slot.shape else flat.view(())


def cut_rows(tensor: Tensor, layout: FlatLayout, slot: Slot, shard: int) -> Tensor:
    """The same rows as a view of a full tensor."""
    start, rows = layout.rows_of(slot, shard)
    return tensor.narrow(0, start, rows) if slot.shape else tensor


def keeps_any(layout: FlatLayout, slot: Slot, shard: int) -> bool:
    """Whether the shard has at least one row of the slot."""
    return layout.rows_of(slot, shard)[1] > 0


def unique_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Global name -> parameter, tied ones once under their first name, in model order."""
    return dict(model.named_parameters())


def aliases(model: nn.Module) -> dict[str, str]:
    """Alias -> first name, for every parameter that stands at more than one place."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            found[name] = original
    return found


def places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """id of parameter -> every (module, attribute) where it stands."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, attribute))
    return found


def put_parameters(model: nn.Module, value: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Replace every parameter by a new one over `value(name, old)`, keeping ties and freezing.

    Needed because a parameter on `meta` cannot be given memory in place.
    """
    where = places(model)
    for name, old in unique_parameters(model).items():
        new = nn.Parameter(value(name, old), requires_grad=old.requires_grad)
        for module, attribute in where[id(old)]:
            module.register_parameter(attribute, new)


def block_parameters(model: nn.Module, blocks: list[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """The parameters of every block; one shared by blocks counts for the first.

    Parameters outside all blocks come in a list of their own at the front: they may be used at any
    time, so whoever gathers by block must keep them for the whole step.
    """
    names = {id(one): name for name, one in unique_parameters(model).items()}
    taken: set[int] = set()
    found: list[dict[str, nn.Parameter]] = []
    for block in blocks:
        mine: dict[str, nn.Parameter] = {}
        for parameter in block.parameters():
            if id(parameter) not in taken:
                taken.add(id(parameter))
                mine[names[id(parameter)]] = parameter
        found.append(mine)
    outside = {name: one for name, one in unique_parameters(model).items() if id(one) not in taken}
    return [outside, *found]


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclass-like outputs of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fresh zeroed flat memory."""
    return torch.zeros(numel, dtype=dtype, device=device)
