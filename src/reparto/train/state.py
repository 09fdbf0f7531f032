"""Everything a rank needs to train, built from a run: model, strategies, optimizer, data.

`build` is a pure wiring of rooms below; it does the same on every rank and under every plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from reparto.comm.mesh import Mesh
from reparto.config.model import ModelConfig, decays, tied_parameters
from reparto.config.run import Run
from reparto.data.dataset import TokenSample
from reparto.data.loader import Loader, Microbatch, collate_for
from reparto.data.prepared import Prepared
from reparto.model.loss import cross_entropy_sum
from reparto.model.transformer import Decoder, initial_tensor
from reparto.model.weights import open_weights
from reparto.parallel.compose import Parallel, apply
from reparto.train.step import LossFunction, Trainer

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """One rank's part of a run."""

    run: Run
    model_config: ModelConfig
    model: Decoder
    parallel: Parallel
    trainer: Trainer[Microbatch]
    loader: Loader[TokenSample, Microbatch]
    prepared: Prepared
    weights_digest: str
    "sha256 over the initial weights of the whole model, the same under every plan"


def build(run: Run, prepared: Prepared, mesh: Mesh, *, position: int = 0) -> TrainState:
    """Wire a run on this rank. `position` is the samples consumed so far, over all ranks."""
    model_config = run.model.resolved(prepared.vocab_size)
    model = Decoder(model_config)
    digests: dict[str, str] = {}
    parallel = share_decoder(run, model, model_config, mesh, digests)
    loader: Loader[TokenSample, Microbatch] = Loader(
        prepared.train_dataset(),
        collate_for(prepared),
        seed=run.seed,
        batch_size=run.data.batch_size,
        data_degree=run.partition.data,
        data_rank=mesh.grid.batch_index(mesh.rank),
        num_microbatches=run.partition.num_microbatches,
        position=position,
        workers=run.data.loader_workers,
    )
    trainer: Trainer[Microbatch] = Trainer(
        parallel,
        loss=decoder_loss(run.synchronize.label_smoothing),
        synchronize=run.synchronize,
        steps=run.steps,
    )
    trainer.make_optimizer()
    joined = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return TrainState(
        run=run,
        model_config=model_config,
        model=model,
        parallel=parallel,
        trainer=trainer,
        loader=loader,
        prepared=prepared,
        weights_digest=hashlib.sha256(joined.encode()).hexdigest() if digests else "",
    )


def share_decoder(
    run: Run, model: Decoder, config: ModelConfig, mesh: Mesh, digests: dict[str, str]
) -> Parallel:
    """Apply the run's plan to our decoder. Rank 0 notes a digest of every tensor as it is drawn."""
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    master = DTYPES[run.compute.master]

    given = None
    if run.model.weights is not None:
        given = open_weights(Path(run.model.weights), shapes, tied=tied_parameters(config))

    def initial(name: str) -> Tensor:
        if given is not None:
            whole = given.read(name).to(master)
        else:
            whole = initial_tensor(name, shapes[name], seed=run.seed, config=config, dtype=master)
        if mesh.rank == 0:
            digests[name] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
        return whole

    return apply(
        model,
        mesh=mesh,
        plan=run.partition,
        blocks=model.blocks(),
        initial=initial,
        decays=decays,
        compute=DTYPES[run.compute.precision],
        master=master,
    )


def decoder_loss(label_smoothing: float) -> LossFunction[Microbatch]:
    """Next-token cross-entropy of our decoder: `(sum over valid tokens, their count)`."""

    def loss(model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(
            logits(model, microbatch), microbatch.labels_BS, label_smoothing=label_smoothing
        )

    return loss


def logits(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """(B, S, V) of our decoder, which is told of packed documents and of sample numbers."""
    found: Tensor = model(
        microbatch.input_ids_BS,
        position_ids_BS=microbatch.position_ids_BS,
        segment_ids_BS=microbatch.segment_ids_BS,
        sample_ids_B=sample_ids(microbatch),
    )
    return found


def sample_ids(microbatch: Microbatch) -> Tensor:
    """(B,) dataset index of each sequence; padding rows count on from the last."""
    rows = microbatch.input_ids_BS.shape[0]
    known = list(microbatch.sample_ids)
    return torch.tensor(known + list(range(rows - len(known))), dtype=torch.int64)
