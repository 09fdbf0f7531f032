"""The validation loss, as a whole and by group: exact on any number of ranks.

Every rank sums losses and counts by group over its own samples; one all_reduce of those sums gives
everyone the same numbers, and only then is anything divided. Padding counts for nothing, so the
result does not depend on how many processes shared the work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from reparto.config.run import Run
from reparto.data.loader import Microbatch, collate_for, evaluation_batches
from reparto.trace import Kind
from reparto.train.state import TrainState

#: tokens of one forward pass without gradients: enough to be efficient, little enough to fit
_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of one pass over the validation set; equal on every rank."""

    loss: float
    "mean over all tokens, nats"
    num_tokens: int
    "tokens that were asked"
    by_group: dict[str, tuple[float, int]]
    "group -> (mean loss, tokens); groups without tokens are left out"

    @property
    def perplexity(self) -> float:
        """exp of the token mean, never a mean of perplexities."""
        return math.exp(self.loss)


def evaluate(state: TrainState) -> Evaluation:
    """Run the validation set through the model. Every rank must call it."""
    mesh, run = state.parallel.mesh, state.run
    groups = state.prepared.groups
    sums = torch.zeros(2, len(groups), dtype=torch.float64)  # losses, counts
    dataset = state.prepared.validation_dataset()
    batches = evaluation_batches(
        dataset,
        collate_for(state.prepared),
        microbatch_size=_samples_at_once(run),
        data_degree=run.partition.data,
        data_rank=mesh.grid.batch_index(mesh.rank),
    )
    was_training = state.model.training
    state.model.eval()
    try:
        with mesh.ring.span(Kind.EVALUATE, "validation"), torch.no_grad():
            for microbatch in batches:
                _add(state, microbatch, sums)
    finally:
        state.model.train(was_training)
    mesh.world.all_reduce(sums, tag="evaluation").wait()
    losses, counts = sums[0].tolist(), sums[1].tolist()
    total = sum(counts)
    return Evaluation(
        loss=sum(losses) / total if total else 0.0,
        num_tokens=int(total),
        by_group={
            name: (loss / count, int(count))
            for name, loss, count in zip(groups, losses, counts, strict=True)
            if count
        },
    )


def _samples_at_once(run: Run) -> int:
    """Under a memory limit no more than a training microbatch, which is known to fit."""
    samples = max(1, _TOKENS_AT_ONCE // run.data.sequence_length)
    if run.compute.memory_gb:
        plan = run.partition
        samples = min(samples, max(1, run.data.batch_size // plan.data // plan.num_microbatches))
    return samples


def _add(state: TrainState, microbatch: Microbatch, sums: torch.Tensor) -> None:
    """Every rank runs its part forward; one rank of each model copy adds the losses."""
    found = state.trainer.losses(microbatch)
    if found is None or not state.trainer.says_loss:
        return
    loss_BS, counts_BS = found
    groups_B = microbatch.group_ids_B
    sums[0].index_add_(0, groups_B, loss_BS.double().sum(1))
    sums[1].index_add_(0, groups_B, counts_BS.double().sum(1))
