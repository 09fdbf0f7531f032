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
    decay_steps = max(1, min(round(decay_share * steps), steps - warmup_steps))
    left = max(0, steps - update)
    return base if left >= decay_steps else final + (base - final) * left / decay_steps


class AdamW:
    """Decoupled weight decay (Loshchilov, Hutter 2019) on owned rows.

    The kernel is called as the operator it is. `torch.optim.AdamW` around it would import
    torch._dynamo when it is made: 2.3 s of processor time and 72 MB in every worker.
    """

    def __init__(
        self,
        owned: Sequence[Owned],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._betas, self._eps = betas, eps
        self._rows = {
            one.name: _Rows(one.weight, weight_decay if one.decays else 0.0) for one in owned
        }

    def step(self, owned: Sequence[Owned], *, rate: float, factor: float) -> None:
        """Update every owned row with `factor * gradient` at learning rate `rate`."""
        by_decay: dict[float, list[tuple[_Rows, Tensor]]] = {}
        for one in owned:
            if one.gradient is None:  # nothing was reduced for it
                continue
            rows = self._rows[one.name]
            by_decay.setdefault(rows.decay, []).append((rows, one.gradient))
        for decay, members in by_decay.items():
            self._update(members, rate=rate, decay=decay, factor=factor)

    def _update(
        self, members: Sequence[tuple[_Rows, Tensor]], *, rate: float, decay: float, factor: float
    ) -> None:
        rows = [one for one, _ in members]
        gradients = [gradient for _, gradient in members]
        device, scale = rows[0].weight.device, None
        if rows[0].weight.dtype == torch.float64 or factor == 0.0:
            # the kernel's divisor is float32, so exact runs scale beforehand
            torch._foreach_mul_(gradients, factor)
        else:
            scale = torch.tensor(1.0 / factor, device=device)
        torch._foreach_add_([one.step for one in rows], 1)
        torch.ops.aten._fused_adamw_(
            [one.weight for one in rows],
            gradients,
            [one.exp_avg for one in rows],
            [one.exp_avg_sq for one in rows],
            [],
            [one.step for one in rows],
            lr=rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=None if scale is None else torch.zeros((), device=device),
        )

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """`(exp_avg, exp_avg_sq)` of one parameter's owned rows."""
        rows = self._rows[name]
        return rows.exp_avg, rows.exp_avg_sq

    def load(self, name: str, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> None:
        """Take up saved moments of one parameter's owned rows."""
        rows = self._rows[name]
        rows.exp_avg.copy_(exp_avg)
        rows.exp_avg_sq.copy_(exp_avg_sq)
        rows.step.fill_(step)

    def state_bytes(self) -> int:
        """Bytes of both moments."""
        return sum(rows.exp_avg.nbytes + rows.exp_avg_sq.nbytes for rows in self._rows.values())


class _Rows:
    """One parameter's owned rows and what Adam remembers of them."""

    __slots__ = ("decay", "exp_avg", "exp_avg_sq", "step", "weight")

    def __init__(self, weight: Tensor, decay: float) -> None:
        # moments exist from the start, so that bytes do not jump in step 1
        self.weight, self.decay = weight, decay
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
        self.step = torch.zeros((), dtype=torch.float32, device=weight.device)
