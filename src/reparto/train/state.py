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
from reparto.config.huggingface import hub_names
from reparto.config.model import ModelConfig, decays, tied_parameters
from reparto.config.run import Run
from reparto.data.dataset import TokenSample
from reparto.data.loader import Loader, Microbatch, collate_for
from reparto.data.prepared import Prepared
from reparto.model.chain import Chain, Tokens, decoder_chain
from reparto.model.transformer import Decoder, initial_tensor
from reparto.model.weights import open_weights
from reparto.parallel.compose import Parallel, apply
from reparto.train.step import Trainer

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
    model: nn.Module
    parallel: Parallel
    trainer: Trainer[Microbatch]
    loader: Loader[TokenSample, Microbatch]
    prepared: Prepared
    weights_digest: str
    "sha256 over the initial weights of the whole model, the same under every plan"


def build(run: Run, prepared: Prepared, mesh: Mesh, *, position: int = 0) -> TrainState:
    """Wire a run on this rank. `position` is the samples consumed so far, over all ranks."""
    model_config = run.model.resolved(prepared.vocab_size)
    model = model_of(run.model.source, model_config)
    digests: dict[str, str] = {}
    parallel, chain = share_model(run, model, model_config, mesh, digests)
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
        chain=chain,
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


def model_of(source: str, config: ModelConfig) -> nn.Module:
    """Our decoder, or transformers' Llama of the same sizes and names; on the meta device."""
    if source == "huggingface":
        from reparto.model.huggingface import llama

        return llama(config)
    return Decoder(config)


def share_model(
    run: Run, model: nn.Module, config: ModelConfig, mesh: Mesh, digests: dict[str, str]
) -> tuple[Parallel, Chain[Microbatch]]:
    """Apply the run's plan to a model of `model_of`, and say how a microbatch runs through it.

    Rank 0 notes a digest of every tensor that it draws.
    """
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    master = DTYPES[run.compute.master]
    given = None
    if run.model.weights is not None:
        given = open_weights(
            Path(run.model.weights), shapes,
            tied=tied_parameters(config), names=hub_names(config, shapes),
        )  # fmt: skip

    def initial(name: str) -> Tensor:
        if given is not None:
            whole = given.read(name).to(master)
        else:
            whole = initial_tensor(name, shapes[name], seed=run.seed, config=config, dtype=master)
        if mesh.rank == 0:
            digests[name] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
        return whole

    compute = DTYPES[run.compute.precision]
    chain = chain_of(
        model,
        config,
        dtype=compute,
        sequence_length=run.data.sequence_length,
        label_smoothing=run.synchronize.label_smoothing,
    )
    parallel = apply(
        model,
        mesh=mesh,
        plan=run.partition,
        blocks=chain.blocks,
        rules=chain.rules,
        costs=chain.costs,
        initial=initial,
        decays=decays,
        compute=compute,
        master=master,
        compile_blocks=run.compute.compile,
    )
    return parallel, chain


def chain_of(
    model: nn.Module,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    sequence_length: int,
    label_smoothing: float,
) -> Chain[Microbatch]:
    """A model of `model_of` over the loader's microbatches: packed documents and sample numbers
    included.
    """
    if not isinstance(model, Decoder):
        from reparto.model.huggingface import llama_chain

        return llama_chain(
            model,
            config,
            read=_tokens,
            dtype=dtype,
            sequence_length=sequence_length,
            label_smoothing=label_smoothing,
        )
    return decoder_chain(
        model,
        read=_tokens,
        dtype=dtype,
        sequence_length=sequence_length,
        label_smoothing=label_smoothing,
    )


def _tokens(microbatch: Microbatch) -> Tokens:
    return Tokens(
        input_ids_BS=microbatch.input_ids_BS,
        labels_BS=microbatch.labels_BS,
        position_ids_BS=microbatch.position_ids_BS,
        segment_ids_BS=microbatch.segment_ids_BS,
        sample_ids_B=sample_ids(microbatch),
    )


def sample_ids(microbatch: Microbatch) -> Tensor:
    """(B,) dataset index of each sequence; padding rows count on from the last."""
    rows = microbatch.input_ids_BS.shape[0]
    known = list(microbatch.sample_ids)
    return torch.tensor(known + list(range(rows - len(known))), dtype=torch.int64)
