"""The peers of `bench pipeline`: torch.distributed.pipelining, a contestant for each of its orders.

Each runs the same model on the same microbatches with the same clipping and fused AdamW, on gloo.
`torch:NAME` is given our cut of the layers, `torch_even:NAME` one by layer count, which is what its
own documentation does: the same number of layers for each stage, embedding with the first, norm and
head with the last.

torch has no word for a weight that is used on two stages. Where embedding and head stand on two
ranks, their gradients are summed by one all_reduce and both ranks make the same update, as is usual
with it; where a V puts both on rank 0 they are one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from reparto.bench.contestants import CLIP, Maker, Workload, batches, fresh, fused_adamw
from reparto.bench.protocol import Contestant
from reparto.comm.mesh import Mesh
from reparto.config.plan import Plan
from reparto.model.loss import cross_entropy_sum
from reparto.model.transformer import Decoder
from reparto.partition.layers import decoder_costs, pipeline_cuts

#: name -> (torch's class, virtual stages a rank, whether they lie in a V)
ORDERS: Mapping[str, tuple[type, int, bool]] = MappingProxyType(
    {
        "gpipe": (ScheduleGPipe, 1, False),
        "1f1b": (Schedule1F1B, 1, False),
        "interleaved": (ScheduleInterleaved1F1B, 2, False),
        "interleaved-zb": (ScheduleInterleavedZeroBubble, 2, False),
        "zb-v": (ScheduleZBVZeroBubble, 2, True),
        "dualpipe-v": (ScheduleDualPipeV, 2, True),
    }
)


class Part(nn.Module):
    """Some consecutive blocks of the decoder as one stage."""

    def __init__(self, model: Decoder, first: int, count: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(model.blocks()[first : first + count])
        self._prepare = model.prepare

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens (B, S) or hidden state (B, S, D) -> hidden state, or logits (B, S, V)."""
        dtype = next(self.parameters()).dtype
        context = self._prepare(hidden.shape[:2], dtype=dtype, device=hidden.device)
        for block in self.inner:
            hidden = block(hidden, context)
        return hidden


def cut_evenly(layers: int, stages: int) -> list[tuple[int, int]]:
    """`(first block, blocks)` of each stage for embedding, `layers` layers, norm and head."""
    ends = [stage * layers // stages for stage in range(stages + 1)]
    cuts = [(1 + a, b - a) for a, b in pairwise(ends)]
    first, last = cuts[0], cuts[-1]
    cuts[0] = (0, first[1] + 1)
    cuts[-1] = (cuts[-1][0], cuts[-1][1] + 2) if stages > 1 else (0, last[1] + 3)
    return cuts


def mine_of(order: str, rank: int, ranks: int) -> list[int]:
    """Virtual stages of a rank under one of `ORDERS`, in ascending order."""
    _, chunks, is_v = ORDERS[order]
    loop = [turn * ranks + rank for turn in range(chunks)]
    return [rank, 2 * ranks - 1 - rank] if is_v else loop


class TorchPipeline:
    """A model under one of torch's schedules: forward and backward of a whole batch."""

    def __init__(
        self,
        model: Decoder,
        order: str,
        *,
        rank: int,
        ranks: int,
        cuts: Sequence[tuple[int, int]],
        num_microbatches: int,
    ) -> None:
        make, chunks, _ = ORDERS[order]
        self.mine = mine_of(order, rank, ranks)
        last = len(cuts) - 1
        parts = [Part(model, *cuts[stage]) for stage in self.mine]
        stages = [
            PipelineStage(part, stage, len(cuts), torch.device("cpu"))
            for part, stage in zip(parts, self.mine, strict=True)
        ]

        def loss(output: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy_sum(output, labels)[0]

        given = stages[0] if chunks == 1 else stages
        self._schedule = make(
            given, n_microbatches=num_microbatches, loss_fn=loss, scale_grads=False
        )
        self.has_first, self.has_last = 0 in self.mine, last in self.mine
        self.parameters = list(
            {id(one): one for part in parts for one in part.parameters()}.values()
        )
        "of this rank, each once"
        self.names = {id(one): name for name, one in model.named_parameters()}
        embedding = model.model.embed_tokens.weight
        tied = model.lm_head.weight is embedding
        self.shared = embedding if tied and self.has_first != self.has_last else None
        "the tied weight, where another rank has a copy"
        ends = [place for place in range(ranks) if {0, last} & set(mine_of(order, place, ranks))]
        self._ends = dist.new_group(ends) if tied and len(ends) > 1 else None

    def run(self, input_ids_BS: Tensor, labels_BS: Tensor) -> Tensor | None:
        """Gradients of the summed loss are in `.grad` afterwards; returns the sum on the last."""
        losses: list[Tensor] = []
        given = (input_ids_BS,) if self.has_first else ()
        wanted = {"target": labels_BS, "losses": losses} if self.has_last else {}
        self._schedule.step(*given, **wanted, return_outputs=False)
        if self.shared is not None:
            assert self.shared.grad is not None
            dist.all_reduce(self.shared.grad, group=self._ends)
        return torch.stack(losses).sum() if losses else None


def torch_pipeline(workload: Workload, mesh: Mesh, plan: Plan, order: str, cut: str) -> Contestant:
    """`order` is one of `ORDERS`, `cut` is "ours" or "even"."""
    ranks, rank = dist.get_world_size(), mesh.rank
    model = fresh(workload)
    stages = ranks * ORDERS[order][1]
    config = workload.config
    if cut == "even":
        cuts: Sequence[tuple[int, int]] = cut_evenly(config.num_hidden_layers, stages)
    else:
        costs = decoder_costs(config, sequence_length=workload.sequence_length)
        owners = [place for stage in range(stages) for place in range(ranks)
                  if stage in mine_of(order, place, ranks)]  # fmt: skip
        cuts = pipeline_cuts(costs, owners, workload.num_microbatches)
    pipe = TorchPipeline(
        model, order, rank=rank, ranks=ranks, cuts=cuts,
        num_microbatches=workload.num_microbatches,
    )  # fmt: skip
    optimizer = fused_adamw([(pipe.names[id(one)], one) for one in pipe.parameters])
    source = batches(workload, 0)
    tokens = workload.sequences * workload.sequence_length
    counted = [one for one in pipe.parameters if one is not pipe.shared or pipe.has_first]

    def step() -> None:
        batch = next(source)
        pipe.run(batch.input_ids_BS, batch.labels_BS)
        gradients = [one.grad for one in pipe.parameters if one.grad is not None]
        torch._foreach_div_(gradients, tokens)
        norm = nn.utils.get_total_norm([one.grad for one in counted if one.grad is not None])
        square = norm.square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(pipe.parameters, CLIP, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    name = "torch" if cut == "ours" else "torch_even"
    return Contestant(name=f"{name}:{order}", step=step)


def _maker(order: str, cut: str) -> Maker:
    return lambda workload, mesh, plan: torch_pipeline(workload, mesh, plan, order, cut)


PEERS: Mapping[str, Maker] = MappingProxyType(
    {f"torch:{order}": _maker(order, "ours") for order in ORDERS}
    | {f"torch_even:{order}": _maker(order, "even") for order in ORDERS}
)
