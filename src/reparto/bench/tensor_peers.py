"""The peers of `bench tensor`: torch's DTensor under three plans, of which the fastest counts.

All cut attention and feed-forward by column, then by row. They differ in the rest:

    dtensor:whole      the tied embedding and head stand whole on every rank
    dtensor:vocab      the table is cut by words and the logits stay cut: torch's `loss_parallel`
    dtensor:sequence   that, and norms and residuals are cut by tokens: torch's SequenceParallel
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from reparto.bench.contestants import CLIP, RATE, Maker, Workload, batches, fresh
from reparto.bench.protocol import Contestant
from reparto.comm.mesh import Mesh
from reparto.config.model import decays
from reparto.config.plan import Plan
from reparto.model.loss import cross_entropy_sum
from reparto.model.transformer import Decoder

#: what is cut beside the layers' matmuls
CUTS = ("whole", "vocab", "sequence")


def dtensor_model(workload: Workload, cut: str) -> Decoder:
    """The model after torch's `parallelize_module`; `cut` is one of `CUTS`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fresh(workload)
    by_token = cut == "sequence"
    flow = Shard(1) if by_token else Replicate()
    for layer in model.model.layers:
        styles: dict[str, ParallelStyle] = {
            name: ColwiseParallel()
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                         "mlp.gate_proj", "mlp.up_proj")
        }  # fmt: skip
        styles |= {name: RowwiseParallel(output_layouts=flow)
                   for name in ("self_attn.o_proj", "mlp.down_proj")}  # fmt: skip
        if by_token:
            styles |= {name: SequenceParallel(use_local_output=True)
                       for name in ("input_layernorm", "post_attention_layernorm")}  # fmt: skip
            styles |= {
                name: PrepareModuleInput(
                    input_layouts=(flow, None),
                    desired_input_layouts=(Replicate(), None),
                    use_local_output=True,
                )
                for name in ("self_attn", "mlp")
            }
        parallelize_module(layer, device_mesh, styles)
    if cut == "whole":
        return model
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    ends: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=flow),
        "lm_head": ColwiseParallel(
            input_layouts=flow, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if by_token:
        ends["model.norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, device_mesh, ends)
    if tied:  # each end was cut for itself, in the same way
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def loss_of(logits: Tensor, labels_BS: Tensor) -> Tensor:
    """The summed loss; of cut logits inside `computing`."""
    from torch.distributed.tensor import DTensor

    if not isinstance(logits, DTensor):
        return cross_entropy_sum(logits, labels_BS)[0]
    return functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten(), reduction="sum")


def computing(cut: str) -> AbstractContextManager[None]:
    """What stands around loss and backward."""
    from torch.distributed.tensor.parallel import loss_parallel

    return nullcontext() if cut == "whole" else loss_parallel()


def dtensor(workload: Workload, mesh: Mesh, plan: Plan, cut: str) -> Contestant:
    """The same as a contestant."""
    from torch.distributed.tensor import DTensor

    model = dtensor_model(workload, cut)
    sliced = [one for one in model.parameters() if isinstance(one, DTensor)]
    whole = [one for one in model.parameters() if not isinstance(one, DTensor)]
    kinds = [kind for kind in (sliced, whole) if kind]
    decay = {id(one) for name, one in model.named_parameters() if decays(name)}
    optimizer = torch.optim.AdamW(
        [
            {"params": members, "weight_decay": rate}
            for kind in kinds
            for rate in (0.1, 0.0)
            if (members := [one for one in kind if (id(one) in decay) == (rate > 0)])
        ],
        lr=RATE, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    source = batches(workload, 0)
    tokens = workload.sequences * workload.sequence_length

    def step() -> None:
        batch = next(source)
        with computing(cut):
            loss = loss_of(model(batch.input_ids_BS), batch.labels_BS)
            (loss / tokens).backward()  # type: ignore[no-untyped-call]
        norms = [nn.utils.get_total_norm([one.grad for one in kind if one.grad is not None])
                 for kind in kinds]  # fmt: skip
        plain = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
        norm = torch.stack(plain).square().sum().sqrt()
        for kind in kinds:
            nn.utils.clip_grads_with_norm_(kind, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(name=f"dtensor:{cut}", step=step)


def _maker(cut: str) -> Maker:
    return lambda workload, mesh, plan: dtensor(workload, mesh, plan, cut)


PEERS: Mapping[str, Maker] = MappingProxyType({f"dtensor:{cut}": _maker(cut) for cut in CUTS})
