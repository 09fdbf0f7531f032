"""Tensor parallelism: the ranks of a group share every matrix and hold all tokens.

Equation.  y = f(x A) B,  A = [A_1 ... A_n] by columns, B = [B_1; ...; B_n] by rows:
           rank r makes f(x A_r) B_r, and y is the sum. f acts on elements or heads, so the wide
           part in the middle is never whole anywhere; heads of attention are such columns.

| what | plain | sequence parallel | payload of each |
|---|---|---|---|
| forward: layer (attention, feed-forward) | 2 all_reduce | 2 all_gather, 2 reduce_scatter | c T D |
| backward: layer | 2 all_reduce | 2 reduce_scatter, 2 all_gather | c T D |
| forward: embedding | all_reduce | reduce_scatter | c T D |
| backward: embedding | | all_gather | c T D |
| forward: head | | all_gather | c T D |
| backward: head | all_reduce | reduce_scatter | c T D |
| gradients of what is not cut | | all_reduce, once a step | 4 x their elements |

All exposed on processors. Where the links have a processor of their own (`overlaps`), weight
gradients are made while a gradient travels.
(T tokens of a microbatch, D hidden width, c bytes of the compute type.)

Sequence parallelism moves the same bytes on the wire (an all_reduce is a reduce_scatter and an
all_gather) and keeps 1 / n of what lies between the matmuls: norms and dropout work on a rank's
part of the sequence. Norm weights then see a part of the tokens, so their gradients are summed.

It pays while a layer's matmuls take longer than its messages: with 12 D^2 weights a layer,
24 D^2 T / (n speed)  >  2 * 2 (n-1)/n c T D / bandwidth,  that is
D > c (n-1) speed / (6 bandwidth), whatever T (speed in FLOP/s, bandwidth in bytes/s). Source: the
counts of Shoeybi et al. 2019 (Megatron-LM), section 3, and Korthikanti et al. 2022, section 4.2.2.

The strategy acts on a plain module through a rule table (`partition/cuts.py`). A model file holds
no parallel code; modules get hooks, linear layers a new forward. Rejected: tensors that carry their
placement (DTensor), which dispatch every operation of the model through Python, 25 % of a small
step; and replacing modules by parallel ones, which changes the names in a checkpoint.

    B batch   S sequence   D hidden   F features of a matmul
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from reparto.comm.autograd import all_gather, all_reduce, all_reduce_gradient, reduce_scatter
from reparto.comm.collectives import Communicator
from reparto.errors import UserError
from reparto.model.dropout import ElementDropout
from reparto.model.transformer import Head
from reparto.parallel.gradients import During, WeightGradients
from reparto.partition.cuts import CUTS_LAST_DIM, ENTERS, Style
from reparto.partition.tensors import Placement, split_evenly

_LINEAR = ("column", "row", "row_partial", "vocab_column")
Forward = Callable[..., Tensor]


def split_naively(x_BD: Tensor, a_FD: Tensor, b_DF: Tensor, degree: int) -> Tensor:
    """The naive twin: relu(x A) B made part by part on one rank, and summed.

    The whole idea in a loop: no rank needs another's part until the sum.
    """
    total = torch.zeros(x_BD.shape[0], b_DF.shape[0], dtype=x_BD.dtype)
    for rank in range(degree):
        start, size = split_evenly(a_FD.shape[0], degree, rank)
        inner_BF = torch.relu(x_BD @ a_FD[start : start + size].T)
        total += inner_BF @ b_DF[:, start : start + size].T
    return total


def overlaps(device: torch.device) -> bool:
    """Whether a message travels beside matmuls, and not at their expense.

    On two cores it does not. With the weight gradients put into the wait, backward of `tensor=2`
    at 10M takes 1.01 of the time without (quartiles 0.98 to 1.05) through shared memory, where the
    cores move the bytes, and 1.07 (1.03 to 1.09) over gloo, whose threads take turns with them:
    they are handed back through autograd, where otherwise they are made in their bucket.
    """
    return device.type != "cpu"


class Region:
    """Where activations enter and leave the part that a tensor group computes together."""

    def __init__(self, group: Communicator, *, sequence_parallel: bool, overlap: bool) -> None:
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.overlap = overlap

    def riders(self, modules: Sequence[nn.Linear]) -> During | None:
        """What makes the weight gradients of `modules` while their input's gradient is summed."""
        return During(modules) if self.overlap else None

    def enter(self, x_BSD: Tensor, tag: str, riders: During | None) -> Tensor:
        """Whole tokens for everyone; in backward the ranks' gradients are summed.

        While they are, `riders` make their weight gradients.
        """
        if self.sequence_parallel:
            return all_gather(x_BSD, self.group, dim=x_BSD.dim() - 2, tag=tag, riders=riders)
        return all_reduce_gradient(x_BSD, self.group, tag=tag, riders=riders)

    def leave(self, x_BSD: Tensor, tag: str) -> Tensor:
        """The sum over ranks, of which each keeps its part of the sequence if they are cut."""
        if self.sequence_parallel:
            return reduce_scatter(x_BSD, self.group, dim=x_BSD.dim() - 2, tag=tag)
        return all_reduce(x_BSD, self.group, tag=tag)


class Entry:
    """A module whose input enters a region for all linear layers inside."""

    def __init__(self) -> None:
        self.modules: list[nn.Linear] = []
        "the layers that take what has entered"
        self.entered = False
        "whether a forward has begun"
        self.during: During | None = None
        "of the forward that goes on, where messages overlap"


def apply(
    model: nn.Module,
    *,
    styles: Mapping[str, Style],
    table: Mapping[str, Placement],
    group: Communicator,
    sequence_parallel: bool,
    overlap: bool,
    weight_gradients: WeightGradients,
) -> None:
    """Make the modules that `styles` names work on their part of every weight.

    Parameters are given memory later, by whoever owns it; `table` says which rectangles.
    Raises `UserError` for a style on a module of another kind.
    """
    region = Region(group, sequence_parallel=sequence_parallel, overlap=overlap)
    entries = {path: Entry() for path, style in styles.items() if style.name in ENTERS}
    for path, style in styles.items():
        module = model.get_submodule(path)
        if style.name in _LINEAR:
            _check_kind(module, nn.Linear, path, style)
            assert isinstance(module, nn.Linear)
            entry = next((entries[e] for e in entries if path.startswith(e + ".")), None)
            if entry is not None and style.name not in CUTS_LAST_DIM:
                entry.modules.append(module)
            _cut_linear(module, path, style, region, weight_gradients, entry)
        elif style.name == "vocab_rows":
            _check_kind(module, nn.Embedding, path, style)
            _cut_embedding(module, path, table[f"{path}.weight"].held[0].start[0], region)
        elif style.name in ENTERS:
            _enter_once(module, path, region, entries[path])
            if style.name == "enter_leave":
                _leave_once(module, path, region)
    if sequence_parallel:
        for module in model.modules():
            if isinstance(module, ElementDropout):
                module.register_forward_pre_hook(_place_dropout(group.index))


def _check_kind(module: nn.Module, kind: type[nn.Module], path: str, style: Style) -> None:
    own = type(module).forward not in (nn.Linear.forward, Head.forward)
    if isinstance(module, kind) and not (kind is nn.Linear and own):
        return
    raise UserError(
        f"`{path}` is a {type(module).__name__}, but `{style.name}` cuts a plain {kind.__name__}",
        where="rules",
        legal=f"a module that computes what {kind.__name__} does",
    )


def defer_linears(
    model: nn.Module, styles: Mapping[str, Style], weight_gradients: WeightGradients
) -> None:
    """Without a tensor group: let the matmuls that rules name put their weight gradients off."""
    for path, style in styles.items():
        module = model.get_submodule(path)
        if style.name in _LINEAR:
            _check_kind(module, nn.Linear, path, style)
            assert isinstance(module, nn.Linear)
            forward = _plain_linear(module, weight_gradients)
            module.forward = forward  # type: ignore[method-assign]


def _plain_linear(module: nn.Linear, weights: WeightGradients) -> Forward:
    def forward(x: Tensor, *unused: object) -> Tensor:
        return weights.linear(x, module.weight, module.bias)

    return forward


def _cut_linear(
    module: nn.Linear,
    path: str,
    style: Style,
    region: Region,
    weights: WeightGradients,
    entry: Entry | None,
) -> None:
    def column(x_BSD: Tensor, *unused: object) -> Tensor:
        if entry is None:
            during = region.riders([module])
            x_BSD = region.enter(x_BSD, path, during)
        else:
            assert entry.entered, f"{path} is called outside the module it is in"
            during = entry.during
        return weights.linear(x_BSD, module.weight, module.bias, during=during)

    def row(x_BSF: Tensor, *unused: object) -> Tensor:
        out_BSD = region.leave(weights.linear(x_BSF, module.weight, None), path)
        # after the sum: once, and with the whole gradient, or a part of the sequence's
        return out_BSD if module.bias is None else out_BSD + module.bias

    def row_partial(x_BSF: Tensor, *unused: object) -> Tensor:
        return weights.linear(x_BSF, module.weight, None)

    if style.name == "row_partial" and module.bias is not None:
        raise UserError(
            f"`{path}` has a bias, which every rank would add to its term of the sum",
            where="rules",
            legal="row_partial for a linear layer without bias",
        )
    forward: Forward = {"row": row, "row_partial": row_partial}.get(style.name, column)
    module.forward = forward  # type: ignore[method-assign]


def _cut_embedding(module: nn.Module, path: str, first: int, region: Region) -> None:
    """Ids of other ranks look up row 0 and are zeroed, so that the sum has each id's row once."""
    elsewhere: list[Tensor] = []

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert isinstance(module, nn.Embedding)
        local_BS = inputs[0] - first
        here_BS = (local_BS >= 0) & (local_BS < module.weight.shape[0])
        elsewhere.append(~here_BS)
        return (torch.where(here_BS, local_BS, 0), *inputs[1:])

    def after(module: nn.Module, inputs: object, rows_BSD: Tensor) -> Tensor:
        return region.leave(rows_BSD.masked_fill(elsewhere.pop()[..., None], 0.0), path)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _enter_once(module: nn.Module, path: str, region: Region, entry: Entry) -> None:
    """Let the first tensor that the module is called with enter the region."""

    def before(
        module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        entry.entered = True
        during = entry.during = region.riders(entry.modules)
        if inputs and isinstance(inputs[0], Tensor):
            return (region.enter(inputs[0], path, during), *inputs[1:]), named
        key = next(name for name, value in named.items() if isinstance(value, Tensor))
        value = named[key]
        assert isinstance(value, Tensor)
        return inputs, {**named, key: region.enter(value, path, during)}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _leave_once(module: nn.Module, path: str, region: Region) -> None:
    """What the module returns is one term of a sum over the group."""

    def after(module: nn.Module, inputs: object, out_BSD: Tensor) -> Tensor:
        return region.leave(out_BSD, path)

    module.register_forward_hook(after)


def _place_dropout(index: int) -> Callable[[nn.Module, tuple[object, ...]], None]:
    """Masks follow the global position: say where this rank's part of the sequence begins."""

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        assert isinstance(module, ElementDropout) and isinstance(inputs[0], Tensor)
        module.first_token = index * inputs[0].shape[1]

    return before
