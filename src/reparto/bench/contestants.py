"""What the contestants of all benchmarks share, ours, and the peers of `bench data` and `zero`:
the naive twin, DDP, FSDP2, one process.

Peers of another benchmark have a file of their own with a `PEERS` table, which `worker.py` joins.

All get the same model, initial weights, batches, clipping and fused AdamW, one thread a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

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
from reparto.train.state import share_model
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
    num_microbatches: int = 1
    "parts that the sequences are cut into"


Maker = Callable[[Workload, Mesh, Plan], Contestant]


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


def in_microbatches(batch: Microbatch, count: int) -> list[Microbatch]:
    """A batch in `count` equal parts."""
    rows = len(batch.sample_ids) // count
    parts = [slice(start, start + rows) for start in range(0, rows * count, rows)]
    return [
        Microbatch(
            input_ids_BS=batch.input_ids_BS[part],
            labels_BS=batch.labels_BS[part],
            group_ids_B=batch.group_ids_B[part],
            sample_ids=batch.sample_ids[part],
            num_tokens=rows * batch.input_ids_BS.shape[1],
        )
        for part in parts
    ]


def our_trainer(workload: Workload, mesh: Mesh, plan: Plan) -> Trainer[Microbatch]:
    """Our trainer, with its agreement word, records and all."""
    run = Run(
        seed=SEED,
        steps=1000,
        partition=plan.model_copy(update={"num_microbatches": workload.num_microbatches}),
        synchronize=Synchronize(learning_rate=RATE, warmup_steps=0, clip_norm=CLIP),
    )
    parallel, chain = share_model(run, Decoder(workload.config), workload.config, mesh, {})
    trainer: Trainer[Microbatch] = Trainer(
        parallel, chain=chain, synchronize=run.synchronize, steps=run.steps
    )
    trainer.make_optimizer()
    return trainer


def ours(workload: Workload, mesh: Mesh, plan: Plan, name: str = "ours") -> Contestant:
    """Our trainer as a contestant."""
    trainer = our_trainer(workload, mesh, plan)
    source = batches(workload, mesh.grid.batch_index(mesh.rank))
    count = [0]

    def step() -> None:
        count[0] += 1
        parts = in_microbatches(next(source), workload.num_microbatches)
        trainer.step(parts, number=count[0], position=0)

    return Contestant(name=name, step=step)


def fused_adamw(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer of every peer; parameters decay by their names, as ours do."""
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
    optimizer = fused_adamw(list(model.named_parameters()))
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


def fresh(workload: Workload) -> Decoder:
    """The model with its initial weights, the same for every contestant."""
    return build(workload.config, seed=SEED)


def ddp(workload: Workload, mesh: Mesh, plan: Plan) -> Contestant:
    """torch's DistributedDataParallel, gradients as bucket views."""
    model = DistributedDataParallel(fresh(workload), gradient_as_bucket_view=True)
    return _loop("ddp", workload, mesh.rank, model, list(model.parameters()), lambda: None)


def naive(workload: Workload, mesh: Mesh, plan: Plan) -> Contestant:
    """Add devices, change nothing else: torch's own all_reduce for every gradient, one by one,
    after backward.
    """
    model = fresh(workload)
    parameters = list(model.parameters())
    ring = Ring(None, rank=mesh.rank, capacity=4096)
    group = torch_mesh(mesh.grid, mesh.rank, ring=ring, timeout_s=300.0).group("reduce")

    def reduce() -> None:
        reduce_naively(parameters, group)
        for one in parameters:
            if one.grad is not None:
                one.grad.div_(group.size)

    return _loop("naive", workload, mesh.rank, model, parameters, reduce)


def single(workload: Workload, mesh: Mesh, plan: Plan) -> Contestant:
    """One process with one thread on one rank's part of the batch; the other core is idle."""
    model = fresh(workload)
    return _loop(
        "ideal", workload, mesh.rank, model, list(model.parameters()), lambda: None, alone=True
    )


def apart(workload: Workload, mesh: Mesh, plan: Plan) -> Contestant:
    """Both processes at once, each on its part, with no word between them: what two busy cores
    that share memory and caches leave of twice one process, before any communication.
    """
    model = fresh(workload)
    return _loop("apart", workload, mesh.rank, model, list(model.parameters()), lambda: None)


def fsdp2(workload: Workload, mesh: Mesh, plan: Plan) -> Contestant:
    """torch's fully_shard, every layer a unit, as its documentation does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fresh(workload)
    for layer in model.model.layers:
        fully_shard(layer, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    return _loop("fsdp2", workload, mesh.rank, model, list(model.parameters()), lambda: None)


PEERS: Mapping[str, Maker] = MappingProxyType(
    {"ddp": ddp, "naive": naive, "ideal": single, "apart": apart, "fsdp2": fsdp2}
)
