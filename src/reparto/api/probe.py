"""What must be known of a foreign module before it is shared out, learnt by watching it run.

Our own models say which blocks they consist of. A foreign one says nothing, and sharding needs to
know: the weights of a block are whole only while the block runs, so a block that is never called as
a module, or whose weight somebody else reads (`F.linear(x, self.embedding.weight)`), would meet
freed memory. Two samples are therefore sent through the whole module once, before anything is cut:

    which blocks run, in which order          order of gathering
    who reads a weight while its block rests  that block is kept whole for the whole step instead
    which buffers forward changes             ranks would drift apart: refused (BatchNorm)
    does the loss of two samples add up       a mean in place of a sum is refused

The cost is four forward passes of at most two samples, once. Rejected: to take every child of the
module for a block, which is wrong for a tied head and for torch's own MultiheadAttention, whose
`out_proj` is read and never called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from reparto.errors import UserError
from reparto.parallel.flat import tensors_in

#: how far the sum over two samples may be from the sum of both, relative: rounding, not arithmetic
_ADDS_UP = 1e-3


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one forward pass showed."""

    order: tuple[nn.Module, ...]
    "candidates that were called, by their first call"
    leaking: Mapping[nn.Module, str]
    "candidates that cannot be gathered by themselves, and why"
    called: bool
    "whether the loss called the module itself, `model(...)`"
    early: tuple[str, ...]
    "parameters that were read before that"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the whole probe came to."""

    blocks: tuple[nn.Module, ...]
    "modules to gather by, in the order of their calls"
    leaking: bool
    "whether some module was kept out of them because others read its weights"
    random: bool
    "whether forward draws random numbers (dropout)"
    warnings: tuple[str, ...]


def check_module(model: nn.Module) -> None:
    """Refuse what has no values to share out."""
    lazy = [name for name, one in model.named_parameters() if is_lazy(one)]
    if lazy:
        raise UserError(
            f"`{lazy[0]}` has no shape before the first batch",
            where="build",
            nearest="run one batch through the module inside `build`, or give its input size",
        )
    odd = [name for name, one in model.named_parameters() if not one.is_floating_point()]
    if odd:
        raise UserError(
            f"`{odd[0]}` is no floating-point parameter",
            where="build",
            legal="weights of real numbers",
            nearest="register it as a buffer, which is left as it is",
        )
    if not any(one.requires_grad for one in model.parameters()):
        raise UserError("the module has no trainable parameter", where="build")


def is_meta(model: nn.Module) -> bool:
    """Whether the parameters have shapes but no values."""
    return any(one.is_meta for one in model.parameters())


def candidates(model: nn.Module) -> list[nn.Module]:
    """Disjoint submodules that could be blocks: entries of the largest list, and what is beside it.

    A parameter that stands directly in a module above them belongs to none.
    """
    lists = [
        one
        for one in model.modules()
        if isinstance(one, (nn.ModuleList, nn.Sequential))
        and not isinstance(one, ParametrizationList)
        and len(one) > 1
    ]
    largest = max(lists, key=_num_elements, default=None)
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if largest is not None and any(one is largest for one in child.modules()):
                visit(child)
            elif _num_elements(child):
                found.setdefault(child)

    visit(model)
    return list(found) or [model]


def _num_elements(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


# --- watching one pass ----------------------------------------------------------------------------


#: properties of a tensor that read its elements, unlike `shape`, `dtype` or `device`
_READING_PROPERTIES = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "data", "real", "imag")
)
#: functions that are given a tensor and look at no element
_BLIND = frozenset(
    ("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point",
     "is_complex", "is_contiguous", "requires_grad_", "type", "__hash__", "__len__", "__repr__")
)  # fmt: skip


def _reads_elements(func: Callable[..., object]) -> bool:
    name = getattr(func, "__name__", "")
    return func in _READING_PROPERTIES if name == "__get__" else name not in _BLIND


class _Reads(TorchFunctionMode):
    """Calls `read(parameter)` for every parameter that a torch function is given."""

    def __init__(self, read: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        if _reads_elements(func):
            for one in tensors_in([*args, named]):
                if isinstance(one, nn.Parameter):
                    self._read(one)
        return func(*args, **named)


def watch(model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], object]) -> Seen:
    """Call `run` and note which of `blocks` it calls, and who reads parameters meanwhile."""
    homes: dict[int, list[nn.Module]] = {}
    for block in blocks:
        for parameter in block.parameters():
            homes.setdefault(id(parameter), []).append(block)
    names = {id(one): name for name, one in model.named_parameters()}
    running: list[nn.Module] = []
    order: dict[nn.Module, None] = {}
    leaking: dict[nn.Module, str] = {}
    early: dict[str, None] = {}
    entered: list[nn.Module] = []

    def read(parameter: nn.Parameter) -> None:
        name = names.get(id(parameter))
        if name is None:
            return
        if not entered:
            early[name] = None
        here = homes.get(id(parameter), [])
        if not any(home in running for home in here):
            leaking.update(dict.fromkeys(here, f"`{name}` is read while its block does not run"))

    def before(module: nn.Module, inputs: object) -> None:
        running.append(module)
        order.setdefault(module)

    def after(module: nn.Module, inputs: object, output: object) -> None:
        running.remove(module)
        if next(tensors_in(output), None) is None:
            leaking[module] = f"it returns a {type(output).__name__} with no tensor to follow back"

    def enter(module: nn.Module, inputs: object) -> None:
        entered.append(module)

    handles = [model.register_forward_pre_hook(enter)]
    for block in blocks:
        handles += [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
    try:
        with _Reads(read):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return Seen(
        order=tuple(order),
        leaking=leaking,
        called=bool(entered),
        early=tuple(early),
    )


def find_blocks(
    model: nn.Module,
    given: Sequence[nn.Module] | None,
    run: Callable[[], object],
    *,
    cut_weights: bool,
) -> tuple[list[nn.Module], Seen]:
    """The blocks to gather by, in the order of their calls, and what was seen.

    given        the user's own; each must keep what a block promises
    run          sends a batch through the module
    cut_weights  whether weights are cut, so that reading at the wrong time is an error
    """
    asked = list(given) if given is not None else candidates(model)
    seen = watch(model, asked, run)
    if cut_weights:
        _refuse_unseen(seen)
    if given is not None:
        faults = dict(seen.leaking)
        faults.update({one: "forward does not call it" for one in asked if one not in seen.order})
        if faults and cut_weights:
            names = {one: name or "the module itself" for name, one in model.named_modules()}
            told = "\n".join(
                f"    {names.get(one, 'foreign')}: {why}" for one, why in faults.items()
            )
            raise UserError(
                f"{len(faults)} of {len(asked)} blocks cannot be gathered by themselves:\n{told}",
                where="blocks",
                legal="modules that forward calls, whose weights nobody else reads",
                nearest="leave `blocks` out, so that they are found",
            )
        called = list(seen.order)
        return (called if len(called) == len(asked) else asked), seen
    return [one for one in seen.order if one not in seen.leaking] or [model], seen


def _refuse_unseen(seen: Seen) -> None:
    nearest = "call it as `model(...)` first, or use shard=gradients, which keeps weights whole"
    if not seen.called:
        raise UserError("does not call the module it is given", where="loss", nearest=nearest)
    if seen.early:
        raise UserError(
            f"reads `{seen.early[0]}` before the module runs, when only a part of it is in memory",
            where="loss",
            nearest=nearest,
        )


# --- the loss ------------------------------------------------------------------------------------


def checked_loss(
    loss: Callable[..., object], model: nn.Module, batch: object
) -> tuple[Tensor, Tensor]:
    """`(sum, count)` as tensors. Raises `UserError` for anything else."""
    found = loss(model, batch)
    if not isinstance(found, tuple) or len(found) != 2:
        raise UserError(
            f"returned a {type(found).__name__}",
            where="loss",
            legal="(sum of losses, how many were summed)",
            nearest="return losses.sum(), losses.numel()",
        )
    total, count = found
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
        raise UserError(
            "its first value is not one number",
            where="loss",
            legal="a tensor with the sum of losses",
            nearest="return losses.sum(), losses.numel()",
        )
    if not isinstance(count, Tensor):
        count = torch.tensor(count)
    if count.numel() != 1 or float(count) < 0 or float(count) != int(count):
        raise UserError(
            f"counted {count.tolist()}",
            where="loss",
            legal="a whole number, 0 or more: the losses that were summed",
            nearest="return losses.sum(), losses.numel()",
        )
    return total.reshape(()), count.reshape(())


def check_adds_up(one: tuple[float, int], other: tuple[float, int], both: tuple[float, int]) -> str:
    """Compare the loss of two samples together with that of each alone.

    Returns a warning if they depend on each other. Raises `UserError` for a mean, which would make
    the step depend on how the batch is cut.
    """
    if not all(math.isfinite(total) for total, _ in (one, other, both)):
        return ""  # a bad sample is for the step to find, which skips it on all ranks
    expected, size = one[0] + other[0], abs(one[0]) + abs(other[0])
    counts_add = both[1] == one[1] + other[1]
    if counts_add and abs(both[0] - expected) <= _ADDS_UP * size:
        return ""
    if size and abs(both[0] - expected / 2) <= _ADDS_UP * size:
        raise UserError(
            f"two samples give {both[0]:.6g} of {both[1]}, each alone {one[0]:.6g} of {one[1]} and "
            f"{other[0]:.6g} of {other[1]}: a mean, which depends on how the batch is cut",
            where="loss",
            legal="(sum of losses, how many were summed)",
            nearest='reduction="sum", and count what was summed',
        )
    return (
        f"the loss of two samples ({both[0]:.6g} of {both[1]}) is not the sum of the two "
        f"({expected:.6g} of {one[1] + other[1]}): the result depends on how the batch is cut, "
        "so plans will differ"
    )


@contextmanager
def random_numbers_apart(seed: int | None = None) -> Iterator[None]:
    """Torch's generator started from `seed`, and as it was again afterwards.

    `torch.manual_seed` does the same and imports torch._dynamo to do so, 2 s a process.
    """
    state = torch.default_generator.get_state()
    if seed is not None:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model.eval()`, and every module's own flag again afterwards."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def probe(
    model: nn.Module,
    loss: Callable[..., object],
    batches: Sequence[object],
    given: Sequence[nn.Module] | None,
    *,
    cut_weights: bool,
    many: bool,
) -> Found:
    """Send two samples through the whole module. It is left as it was.

    batches  both samples together, then each alone (only the first, where there is one sample)
    many     whether several ranks share a batch
    """
    kept = {name: one.detach().clone() for name, one in model.named_buffers()}
    with torch.no_grad(), random_numbers_apart():
        state = torch.default_generator.get_state()
        blocks, seen = find_blocks(
            model, given, lambda: checked_loss(loss, model, batches[0]), cut_weights=cut_weights
        )
        random = not torch.equal(state, torch.default_generator.get_state())
        changed = [name for name, one in model.named_buffers() if not _same(one, kept.get(name))]
        if changed and many:
            _refuse_changed(model, changed)
        for name, one in model.named_buffers():
            if name in changed and name in kept:
                one.copy_(kept[name])
        warning = ""
        if len(batches) == 3:
            with evaluating(model):
                found = [checked_loss(loss, model, batch) for batch in batches]
            both, one_alone, other = ((float(total), int(count)) for total, count in found)
            warning = check_adds_up(one_alone, other, both)
    return Found(
        blocks=tuple(blocks),
        leaking=bool(seen.leaking),
        random=random,
        warnings=(warning,) if warning else (),
    )


def _same(one: Tensor, other: Tensor | None) -> bool:
    """Equal in every bit: a buffer may hold what is no number, and stay as it is."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor, in order, as a flat uint8 tensor in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _refuse_changed(model: nn.Module, changed: Sequence[str]) -> None:
    owners = {name.rpartition(".")[0] for name in changed}
    kinds = sorted({type(model.get_submodule(owner)).__name__ for owner in owners})
    raise UserError(
        f"forward changes buffers of {', '.join(kinds)} ({', '.join(changed[:4])}"
        f"{', ...' if len(changed) > 4 else ''}): every rank would keep its own",
        where="build",
        legal="over several data ranks, modules whose buffers stay as they are",
        nearest="GroupNorm or LayerNorm in place of BatchNorm; or call .eval() on those modules in "
        "`build`, which freezes their statistics",
    )
