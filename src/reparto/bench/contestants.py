"""The contestants of `bench data` and `bench zero`: ours, the naive twin, DDP, FSDP2, one process.

All get the same model, initial weights, batches, clipping and fused AdamW, one thread a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reparto.bench.protocol import Contestant
from reparto.comm.mesh import Mesh, torch_mesh
from reparto.config.model import ModelConfig, decays
from reparto.config.plan import Plan
from reparto.config.run import Run, Synchronize
from reparto.data.loader import Microbatch
from reparto.model.loss import cross_entropy_sum
from reparto.model.transformer import Decoder, build
from reparto.parallel.data import reduce_naively
from reparto.trace import Ring
from reparto.train.state import share_decoder
from reparto.train.step import Trainer

SEED = 1
CLIP = 1.0
RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every contestant computes in a step, on each rank."""

    config: ModelConfig
    sequences: int
    "sequences a rank and step"
    sequence_length: int


def batches(workload: Workload, rank: int) -> Iterator[Microbatch]:
    """Endless random tokens, other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (workload.sequences, workload.sequence_length + 1)
    while True:
        tokens = torch.randint(0, workload.config.vocab_size, shape, generator=generator)
        yield Microbatch(
            input_ids_BS=tokens[:, :-1].contiguous(),
            labels_BS=tokens[:, 1:].contiguous(),
            group_ids_B=torch.zeros(workload.sequences, dtype=torch.int64),
            sample_ids=tuple(range(workload.sequences)),
            num_tokens=workload.sequences * workload.sequence_length,
        )


def ours(workload: Workload, mesh: Mesh, plan: Plan) -> Contestant:
    """Our trainer, with its agreement word, records and all."""
    run = Run(
        seed=SEED,
        steps=1000,
        partition=plan,
        synchronize=Synchronize(learning_rate=RATE, warmup_steps=0, clip_norm=CLIP),
    )
    parallel, chain = share_decoder(run, Decoder(workload.config), workload.config, mesh, {})
    trainer: Trainer[Microbatch] = Trainer(
        parallel, chain=chain, synchronize=run.synchronize, steps=run.steps
    )
    trainer.make_optimizer()
    source = batches(workload, mesh.grid.batch_index(mesh.rank))
    count = [0]

    def step() -> None:
        count[0] += 1
        trainer.step([next(source)], number=count[0], position=0)

    return Contestant(name="ours", step=step)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if decays(n)], "weight_decay": 0.1},
        {"params": [p for n, p in named if not decays(n)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)


def _loop(
    name: str,
    workload: Workload,
    rank: int,
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    reduce: Callable[[], None],
    *,
    alone: bool = False,
) -> Contestant:
    optimizer = _optimizer(model)
    source = batches(workload, rank)
    tokens = workload.sequences * workload.sequence_length

    def step() -> None:
        batch = next(source)
        loss, _ = cross_entropy_sum(model(batch.input_ids_BS), batch.labels_BS)
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        reduce()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(name=name, step=step, alone=alone)


def _fresh(workload: Workload) -> Decoder:
    return build(workload.config, seed=SEED)


def ddp(workload: Workload, mesh: Mesh) -> Contestant:
    """torch's DistributedDataParallel, gradients as bucket views."""
    model = DistributedDataParallel(_fresh(workload), gradient_as_bucket_view=True)
    return _loop("ddp", workload, mesh.rank, model, list(model.parameters()), lambda: None)


def naive(workload: Workload, mesh: Mesh) -> Contestant:
    """Add devices, change nothing else: torch's own all_reduce for every gradient, one by one,
    after backward.
    """
    model = _fresh(workload)
    parameters = list(model.parameters())
    ring = Ring(None, rank=mesh.rank, capacity=4096)
    group = torch_mesh(mesh.grid, mesh.rank, ring=ring, timeout_s=300.0).group("reduce")

    def reduce() -> None:
        reduce_naively(parameters, group)
        for one in parameters:
            if one.grad is not None:
                one.grad.div_(group.size)

    return _loop("naive", workload, mesh.rank, model, parameters, reduce)


def single(workload: Workload, mesh: Mesh) -> Contestant:
    """One process with one thread on one rank's part of the batch; the other core is idle."""
    model = _fresh(workload)
    return _loop(
        "ideal", workload, mesh.rank, model, list(model.parameters()), lambda: None, alone=True
    )


def apart(workload: Workload, mesh: Mesh) -> Contestant:
    """Both processes at once, each on its part, with no word between them: what two busy cores
    that share memory and caches leave of twice one process, before any communication.
    """
    model = _fresh(workload)
    return _loop("apart", workload, mesh.rank, model, list(model.parameters()), lambda: None)


def fsdp2(workload: Workload, mesh: Mesh) -> Contestant:
    """torch's fully_shard, every layer a unit, as its documentation does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _fresh(workload)
    for layer in model.model.layers:
        fully_shard(layer, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    return _loop("fsdp2", workload, mesh.rank, model, list(model.parameters()), lambda: None)


def dtensor(workload: Workload, mesh: Mesh) -> Contestant:
    """torch's parallelize_module: attention and feed-forward cut by column, then by row; embedding
    and head whole on every rank, since they are one tied table.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _fresh(workload)
    for layer in model.model.layers:
        styles = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        styles |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        rows = {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, device_mesh, {**styles, **rows})
    cut = [one for one in model.parameters() if isinstance(one, DTensor)]
    whole = [one for one in model.parameters() if not isinstance(one, DTensor)]
    decay = {id(one) for name, one in model.named_parameters() if decays(name)}
    optimizer = torch.optim.AdamW(
        [
            {"params": members, "weight_decay": rate}
            for kind in (cut, whole)
            for rate in (0.1, 0.0)
            if (members := [one for one in kind if (id(one) in decay) == (rate > 0)])
        ],
        lr=RATE, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    source = batches(workload, 0)
    tokens = workload.sequences * workload.sequence_length

    def step() -> None:
        batch = next(source)
        loss, _ = cross_entropy_sum(model(batch.input_ids_BS), batch.labels_BS)
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        norms = [nn.utils.get_total_norm([one.grad for one in kind if one.grad is not None])
                 for kind in (cut, whole)]  # fmt: skip
        plain = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
        norm = torch.stack(plain).square().sum().sqrt()
        for kind in (cut, whole):
            nn.utils.clip_grads_with_norm_(kind, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(name="dtensor", step=step)
