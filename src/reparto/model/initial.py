"""Initial weights as a function of the global name, so that no plan can change them.

Every tensor is drawn whole on the CPU in float32 from a generator seeded by (seed, global name),
then cast, then moved; whoever needs a part cuts it from the whole. One rank therefore holds at
most one whole tensor at a time (the largest of the 1b preset: 256 MiB), and a run on 1 device and
on 64 starts from the same bits. The price is that every rank draws every tensor it holds a part
of: about 10 ns an element on one core. Rejected: drawing only the part from a counter-based
generator, which is cheaper at scale but makes a normal deviate depend on our own integer hash.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from reparto.config.model import ModelConfig, tied_parameters

#: the projections that add to the residual stream: of attention, feed-forward parts and experts
_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")


def _generator_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"initial:{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def initial_tensor(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The whole initial tensor of the parameter with this global name and global shape.

    Norm weights are ones and biases zeros. Matrices are normal with mean 0 and deviation
    `initializer_range`; those that write to the residual stream are divided by sqrt(2 * layers),
    so that the stream's variance does not grow with depth (Radford et al. 2019, section 2.3).
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype, device=device)
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype, device=device)
    deviation = config.initializer_range
    if name.endswith(_RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * config.num_hidden_layers)
    generator = torch.Generator("cpu").manual_seed(_generator_seed(seed, name))
    drawn = torch.empty(shape, dtype=torch.float32, device="cpu")
    drawn.normal_(0.0, deviation, generator=generator)
    return drawn.to(dtype=dtype).to(device)


def materialise(
    model: nn.Module,
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Replace every parameter of an uncut model by its initial tensor, and tie what is tied.

    This is the one-device path; strategies call `initial_tensor` and keep their part.
    """
    for name, parameter in list(model.named_parameters()):
        whole = initial_tensor(
            name, tuple(parameter.shape), seed=seed, config=config, dtype=dtype, device=device
        )
        _set_parameter(model, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    for alias, name in tied_parameters(config).items():
        _set_parameter(model, alias, model.get_parameter(name))


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path).register_parameter(leaf, parameter)
