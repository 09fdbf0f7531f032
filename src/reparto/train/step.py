"""One optimizer step, the same for every plan.

    1 forward and backward   the executor runs the schedule; gradients leave as they become ready
    2 agree                  one word: finite? stop? loss, tokens, norm, who has data left
    3 update                 skipped on all ranks alike if any rank was not finite
    4 publish                compute gets the new weights

The loss is a sum over tokens; the global token count comes with the word, and the division is
folded into the update. So neither the number of microbatches nor an uneven split can change the
step: there is no mean of means anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from reparto.config.run import Synchronize
from reparto.model.chain import Chain
from reparto.parallel.compose import LossFunction, Parallel, executor
from reparto.parallel.expert import Load
from reparto.trace import Kind
from reparto.train.agree import Agreed, Word, agree
from reparto.train.optim import AdamW, clip_coefficient, learning_rate, square_sum

__all__ = ["LossFunction", "StepResult", "Trainer"]

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to; equal on every rank but `untouched`."""

    loss: float
    "mean loss of the valid tokens of the whole batch, nats"
    num_tokens: int
    "valid tokens of the whole batch"
    norm: float
    "global gradient norm before clipping"
    learning_rate: float
    "rate of this update"
    skipped: bool
    "whether the update was left out because something was not finite"
    agreed: Agreed
    "the word"
    untouched: tuple[str, ...]
    "trainable parameters that no loss of this rank reached"
    load: Load | None
    "of experts, where the model has them"


class Trainer(Generic[Batch]):
    """A parallel model with its optimizer: `step` is the whole of training."""

    def __init__(
        self,
        parallel: Parallel,
        *,
        synchronize: Synchronize,
        steps: int,
        chain: Chain[Batch] | None = None,
        loss: LossFunction[Batch] | None = None,
    ) -> None:
        """The model's `chain`, or a `loss(model, microbatch)` that returns `(sum over valid tokens,
        their count)` and calls the whole model, which a pipeline cannot have.
        """
        self.parallel = parallel
        self.synchronize = synchronize
        self.steps = steps
        self.updates = 0
        "updates really made; a skipped step makes none"
        self._executor = executor(parallel, chain=chain, loss=loss)
        self._chain = chain
        parallel.strategy.begin_step()
        self.optimizer: AdamW | None = None

    def step(
        self,
        microbatches: Sequence[Batch],
        *,
        number: int,
        position: int,
        stop: bool = False,
        has_next: bool = True,
        before_update: Callable[[Agreed], None] | None = None,
    ) -> StepResult:
        """Step `number` (from 1) on this rank's microbatches.

        position       samples consumed before this step, over all ranks; must agree everywhere
        stop           this rank was asked to stop after this step
        before_update  called with reduced gradients in place (`verify` reads them here)

        Raises `Fault` if ranks disagree or a peer is lost.
        """
        parallel, ring = self.parallel, self.parallel.mesh.ring
        ring.set_step(number)
        parallel.strategy.begin_step()
        parallel.balance.begin_step()
        sums = self._executor.run(microbatches)
        parallel.strategy.settle()
        load = parallel.balance.settle()
        owned = parallel.strategy.owned()
        with ring.span(Kind.OPTIMIZER, "norm"):
            squares = square_sum(owned)
            here = self.says_loss
            loss_sum = float(sums.loss) if here else 0.0
            tokens = int(sums.count) if here else 0
        agreed = agree(
            parallel.mesh,
            Word(
                finite=math.isfinite(float(sums.loss)) and math.isfinite(squares),
                stop=stop,
                has_next=has_next,
                guard=0,
                fingerprint=ring.fingerprint,
                position=position,
                squares=squares if math.isfinite(squares) else 0.0,
                loss=loss_sum if math.isfinite(loss_sum) else 0.0,
                tokens=tokens,
            ),
        )
        if before_update is not None:
            before_update(agreed)
        rate = self.rate(number)
        skip = bool(agreed.unfinite) or agreed.tokens == 0
        norm = agreed.norm / agreed.tokens if agreed.tokens else 0.0
        if not skip:
            with ring.span(Kind.OPTIMIZER, "adamw"), torch.no_grad():
                clip = clip_coefficient(norm, self.synchronize.clip_norm)
                self._optimizer().step(owned, rate=rate, factor=clip / agreed.tokens)
            parallel.strategy.publish()
            if load is not None:
                parallel.balance.follow(load)
            self.updates += 1
        return StepResult(
            loss=agreed.loss / agreed.tokens if agreed.tokens else 0.0,
            num_tokens=agreed.tokens,
            norm=norm,
            learning_rate=rate,
            skipped=skip,
            agreed=agreed,
            untouched=sums.untouched,
            load=load,
        )

    def rate(self, number: int) -> float:
        """The learning rate of update `number`, from the schedule alone."""
        table = self.synchronize
        return learning_rate(
            number,
            base=table.learning_rate,
            schedule=table.learning_rate_schedule,
            warmup_steps=table.warmup(self.steps),
            steps=self.steps,
            final_share=table.final_share,
        )

    def losses(self, microbatch: Batch) -> tuple[Tensor, Tensor] | None:
        """Forward alone: the loss of every token, not smoothed, and which tokens count.

        Every rank calls it with the microbatch of its data index; those of the last pipeline stage
        get the losses (all ranks of a tensor group the same ones), the others None. `says_loss`
        tells which ranks together speak for every token once. Needs a chain.
        """
        assert self._chain is not None, "a loss function says only sums"
        output = self._executor.outputs(microbatch)
        if output is None:
            return None
        with torch.no_grad():
            return self._chain.losses(output, microbatch, self.parallel.token_loss())

    @property
    def peak_live(self) -> int:
        """Most activations, in chunks, that this rank has held at once."""
        return self._executor.peak_live

    @property
    def says_loss(self) -> bool:
        """Whether this rank speaks for its tokens: one rank of each model copy does."""
        return self._executor.has_loss and self.parallel.mesh.coordinates["tensor"] == 0

    def _optimizer(self) -> AdamW:
        if self.optimizer is None:
            self.make_optimizer()
        assert self.optimizer is not None
        return self.optimizer

    def make_optimizer(self) -> AdamW:
        """The optimizer over this rank's owned rows, with zero moments."""
        table = self.synchronize
        self.optimizer = AdamW(
            self.parallel.strategy.owned(),
            betas=(table.beta1, table.beta2),
            eps=table.eps,
            weight_decay=table.weight_decay,
        )
        return self.optimizer
