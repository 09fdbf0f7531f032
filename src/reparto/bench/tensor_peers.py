"""The peers of `bench tensor`: torch's DTensor."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from reparto.bench.contestants import CLIP, RATE, Maker, Workload, batches, fresh
from reparto.bench.protocol import Contestant
from reparto.comm.mesh import Mesh
from reparto.config.model import decays
from reparto.config.plan import Plan
from reparto.model.loss import cross_entropy_sum
from reparto.model.transformer import Decoder


def dtensor_model(workload: Workload) -> Decoder:
    """torch's parallelize_module: attention and feed-forward cut by column, then by row; the tied
    embedding and head whole on every rank. Cutting that table too, logits gathered, was no faster:
    forward and backward 787 against 791 ms at 10M, 260 against 234 ms at 1M. Not tried:
    `loss_parallel`, which leaves the logits cut, and SequenceParallel.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fresh(workload)
    for layer in model.model.layers:
        styles = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        styles |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        rows = {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(layer, device_mesh, {**styles, **rows})
    return model


def dtensor(workload: Workload, mesh: Mesh, plan: Plan) -> Contestant:
    """The same as a contestant."""
    from torch.distributed.tensor import DTensor

    model = dtensor_model(workload)
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


PEERS: Mapping[str, Maker] = MappingProxyType({"dtensor": dtensor})
