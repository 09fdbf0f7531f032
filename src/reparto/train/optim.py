"""AdamW over the rows this rank owns, the learning-rate schedules, and clipping by one norm.

The arithmetic of Adam is torch's fused kernel: one pass over weight, gradient and both moments,
where a chain of elementwise operations makes about ten. What is ours is what distribution changes:
which rows are updated, which of them decay (read from the placement table by name, never guessed
from a flat shard's shape), and the one factor that every gradient is multiplied by,

    factor = (1 / T) * min(1, clip_norm / (norm + 1e-6)),      T = valid tokens of the whole batch,

which goes into the kernel, so that dividing and clipping cost no pass of their own. The small term
is added once, to the global norm, not once a shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reparto.parallel.flat import Owned

CLIP_EPSILON = 1e-6


def clip_coefficient(norm: float, clip_norm: float) -> float:
    """min(1, clip_norm / (norm + 1e-6)); 1 when clipping is off (`clip_norm <= 0`)."""
    if clip_norm <= 0:
        return 1.0
    return min(1.0, clip_norm / (norm + CLIP_EPSILON))


def square_sum(owned: Sequence[Owned]) -> float:
    """Sum of squares of the gradients that this rank counts, in float64."""
    norms = [
        torch.linalg.vector_norm(one.gradient)
        for one in owned
        if one.counts and one.gradient is not None
    ]
    if not norms:
        return 0.0
    return float(torch.stack(norms).double().square().sum())


def learning_rate(
    update: int,
    *,
    base: float,
    schedule: str,
    warmup_steps: int,
    steps: int,
    final_share: float,
    decay_share: float = 0.2,
) -> float:
    """The rate of update number `update`, counted from 1 in optimizer steps.

    Never in microbatches and never in processes, so accumulation and ranks do not move it.

    constant        base after the warm-up
    warmup-cosine   linear to base over `warmup_steps`, then half a cosine to final_share * base
    warmup-stable-decay  linear, base, then linear to final_share * base over the last decay_share
    """
    if update <= warmup_steps:
        return base * update / max(1, warmup_steps)
    if schedule == "constant":
        return base
    final = final_share * base
    if schedule == "warmup-cosine":
        done = min(1.0, (update - warmup_steps) / max(1, steps - warmup_steps))
        return final + (base - final) * 0.5 * (1.0 + math.cos(math.pi * done))
    assert schedule == "warmup-stable-decay", schedule
    decay_steps = max(1, round(decay_share * steps))
    left = max(0, steps - update)
    return base if left >= decay_steps else final + (base - final) * left / decay_steps


class AdamW:
    """Decoupled weight decay (Loshchilov, Hutter 2019) on owned rows."""

    def __init__(
        self,
        owned: Sequence[Owned],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._weights = {one.name: one.weight for one in owned}
        decaying = [one.weight for one in owned if one.decays]
        others = [one.weight for one in owned if not one.decays]
        groups = [
            {"params": decaying, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._engine = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}],
            lr=0.0, betas=betas, eps=eps, fused=True,
        )  # fmt: skip
        for one in owned:  # moments exist from the start, so that bytes do not jump in step 1
            self._engine.state[one.weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=one.weight.device),
                "exp_avg": torch.zeros_like(one.weight),
                "exp_avg_sq": torch.zeros_like(one.weight),
            }

    def step(self, owned: Sequence[Owned], *, rate: float, factor: float) -> None:
        """Update every owned row with `factor * gradient` at learning rate `rate`."""
        for one in owned:
            self._weights[one.name].grad = one.gradient
        for group in self._engine.param_groups:
            group["lr"] = rate
        # the fused kernel divides by grad_scale on its way; this is how torch's own scaler uses it
        device = self._engine.param_groups[0]["params"][0].device
        self._engine.grad_scale = torch.tensor(1.0 / factor, device=device)  # type: ignore[attr-defined]
        self._engine.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        self._engine.step()
        for weight in self._weights.values():
            weight.grad = None

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """`(exp_avg, exp_avg_sq)` of one parameter's owned rows."""
        state = self._engine.state[self._weights[name]]
        return state["exp_avg"], state["exp_avg_sq"]

    def load(self, name: str, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> None:
        """Take up saved moments of one parameter's owned rows."""
        state = self._engine.state[self._weights[name]]
        state["exp_avg"].copy_(exp_avg)
        state["exp_avg_sq"].copy_(exp_avg_sq)
        state["step"].fill_(step)

    def state_bytes(self) -> int:
        """Bytes of both moments."""
        return sum(
            state[key].nbytes
            for state in self._engine.state.values()
            for key in ("exp_avg", "exp_avg_sq")
        )
