"""From a function that builds a module to that module shared out over the ranks of a plan.

    1 build     the same on every rank, and proven to be
    2 probe     two samples through the whole module: blocks, and what cannot be right (`probe.py`)
    3 share     `parallel/compose.py` cuts it; from here on each rank holds its part

Between 1 and 3 every rank holds the module whole, once. A module that does not fit is built on
`meta`, with `initial` to give one weight at a time; then there is nothing to probe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from reparto.api.agree import compare, tensor_facts
from reparto.api.probe import Found, candidates, check_module, is_meta, probe, random_numbers_apart
from reparto.comm.mesh import Mesh
from reparto.config.plan import Plan
from reparto.config.run import Synchronize
from reparto.errors import UserError, nearest_word
from reparto.parallel.compose import Parallel, apply
from reparto.parallel.flat import tensors_in, unique_parameters

#: precision -> (forward and backward, sums and updates)
TYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "float64": (torch.float64, torch.float64),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a training is; see `Session.trainer`."""

    steps: int
    batch_size: int
    seed: int
    synchronize: Synchronize
    precision: str
    save_every: int

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("seed", 0), ("save_every", 0)):
            if getattr(self, name) < least:
                raise UserError(
                    f"{getattr(self, name)} is too small", where=name, legal=f"{least} or more"
                )
        if self.precision not in TYPES:
            raise UserError(
                f"`{self.precision}` is not known",
                where="precision",
                legal=", ".join(TYPES),
                nearest=nearest_word(self.precision, TYPES),
            )

    def fixed(self) -> dict[str, JsonValue]:
        """What a resume must not change."""
        return {
            "steps": self.steps,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "precision": self.precision,
            "synchronize": self.synchronize.model_dump(mode="json"),
        }


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A module shared out, and what the probe said about it."""

    parallel: Parallel
    warnings: tuple[str, ...]
    evaluates_with_graph: bool
    "whether evaluation must keep a graph, because some weights are read outside of all blocks"


def build_equal(
    build: Callable[[], nn.Module],
    *,
    mesh: Mesh,
    settings: Settings,
    num_samples: int,
    on_meta: bool,
) -> nn.Module:
    """The module of `build`, proven equal on all ranks with everything else a step rests on.

    on_meta  whether weights may lack values, because they come from elsewhere

    Raises `UserError` on every rank alike, naming the tensors and settings that differ.
    """
    with random_numbers_apart(settings.seed):
        model = build()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"returned a {type(model).__name__}", where="build", legal="a torch.nn.Module"
        )
    check_module(model)
    if is_meta(model) and not on_meta:
        raise UserError(
            "the module is on `meta`, so its weights have no values",
            where="build",
            nearest="give `initial`, a function from a parameter's name to its first value",
        )
    facts = {
        "samples in the dataset": str(num_samples),
        **{key: str(value) for key, value in settings.fixed().items()},
        **tensor_facts(model),
    }
    compare(
        mesh,
        facts,
        tag="start",
        differ=lambda text: UserError(
            f"ranks would start from different things:\n{text}",
            where="build",
            legal="the same module, data and settings on every rank",
            nearest="make weights from torch's generator alone (it is seeded before `build`), "
            "and let neither rank, time nor environment into them",
        ),
    )
    return model


def share(
    model: nn.Module,
    *,
    mesh: Mesh,
    plan: Plan,
    precision: str,
    loss: Callable[..., object],
    batches: Callable[[], Sequence[object]],
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None,
    initial: Callable[[str], Tensor] | None,
    decays: Callable[[str], bool] | None,
) -> Shared:
    """Probe the module and cut it by the plan. `batches` gives what `probe` wants.

    Raises `UserError` for what cannot be shared out.
    """
    compute, master = TYPES[precision]
    if initial is None:
        values = {name: one.data for name, one in unique_parameters(model).items()}
        initial = lambda name: values[name].to(master)  # noqa: E731
    given = None if blocks is None else list(blocks(model))
    if given is not None and not given:
        raise UserError("there are none", where="blocks", nearest="leave `blocks` out")
    model.to(compute)
    if is_meta(model):
        chosen = tuple(given or candidates(model))
        found = Found(blocks=chosen, leaking=True, random=False, warnings=())
    else:
        found = probe(
            model, loss, batches(), given,
            cut_weights=plan.shard == "parameters", many=plan.data > 1,
        )  # fmt: skip
    _check_recompute(plan.recompute, found)
    before = unique_parameters(model)
    parallel = apply(
        model,
        mesh=mesh,
        plan=plan,
        blocks=found.blocks,
        initial=initial,
        decays=decays or (lambda name: before[name].dim() >= 2),
        compute=compute,
        master=master,
    )
    _seat_again(model, before)
    inside = {id(one) for block in found.blocks for one in block.parameters()}
    outside = any(id(one) not in inside for one in model.parameters())
    return Shared(
        parallel=parallel,
        warnings=found.warnings,
        # without a graph, weights outside of the blocks go when the last block has run
        evaluates_with_graph=plan.shard == "parameters" and (outside or found.leaking),
    )


def _check_recompute(mode: str, found: Found) -> None:
    """Refuse a recompute that would give other gradients, or that would do nothing."""
    if mode == "none":
        return
    if found.random:
        raise UserError(
            "forward draws random numbers (dropout), which a second forward would draw anew",
            where="plan",
            legal="recompute=none for such a module",
            nearest="recompute=none, or dropout of 0",
        )
    parts = [block for block in found.blocks if list(block.children())]
    cores = [name for block in parts for name, _ in block.named_modules() if name.endswith(".core")]
    if not (cores if mode == "selective" else parts):
        needed = "a submodule named `core`" if mode == "selective" else "submodules"
        raise UserError(
            f"recompute={mode} acts on blocks with {needed}, and there is none",
            where="plan",
            legal="recompute=none" + (", recompute=full" if mode == "selective" and parts else ""),
        )


def _seat_again(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Parameters were replaced; a module that kept a reference of its own would train the old ones.

    torch's recurrent layers do keep a list, which is made anew. Others are refused by name.
    """
    names = {id(one): name for name, one in before.items()}
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [
                getattr(module, name, None) for name in module._flat_weights_names
            ]
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                continue
            stale = [names[id(one)] for one in tensors_in(value) if id(one) in names]
            if stale:
                raise UserError(
                    f"`{path + '.' if path else ''}{attribute}` keeps a reference to the weight "
                    f"`{stale[0]}`, which is replaced when the module is shared out",
                    where="build",
                    legal="weights that are reached as attributes of their modules",
                    nearest=f"read self.{stale[0].rpartition('.')[2]} in forward",
                )
