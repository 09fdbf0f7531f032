"""What is asked: one model on one cluster under one plan, with batch, precision and software."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reparto.config.cluster import Cluster
from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.planner.links import Group
from reparto.planner.model_spec import ModelSpec

#: compute types that a prediction knows
PRECISIONS = ("fp32", "bf16", "fp8", "fp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """What the software does, as far as it changes time or memory; not whose it is."""

    flash: bool = True
    "attention in one kernel that keeps no scores"
    fused: bool = True
    "element-wise work compiled or hand-fused, rather than one kernel an operation"
    overlap_data: bool = True
    "gradients are reduced (and sharded weights gathered) beside compute"
    overlap_tensor: bool = False
    "tensor-parallel collectives are cut up and run beside the matmuls they feed"
    gradient_bytes: int = 4
    "bytes of one element of a gradient as it is accumulated and reduced"
    dropout: bool = False
    "keeps dropout masks"
    fused_accumulation: bool = True
    "a weight gradient is added to the accumulated one inside its matmul"
    flash_kernel: str = "vendor"
    "whose flash kernel: first (2022, Triton), second (FlashAttention 2), vendor (cuDNN and later)"
    loss_bytes: int = 6
    "bytes held for each logit when the loss's backward starts: 6 fused, 14 the framework's own"
    plain_kernels: bool = False
    "no fused activation function, and 16-bit gradients beside the accumulated ones"
    recomputed_matmuls: float = 0.0
    "share of the matmuls that selective recompute makes again (per-operator policies: a half)"
    scatter_messages: bool = True
    "tensor ranks each send a part of what goes to the next pipeline stage"


#: what `reparto train` runs: PyTorch's own kernels, sums added in place, whole messages
REPARTO = Software(
    fused=False,
    flash_kernel="second",
    loss_bytes=8,
    plain_kernels=True,
    scatter_messages=False,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One prediction's question."""

    model: ModelSpec
    "sizes"
    cluster: Cluster
    "devices and links"
    plan: Plan
    "how the work is shared out"
    batch_size: int
    "sequences a step over all ranks"
    sequence_length: int
    "tokens of one sequence"
    precision: str = "bf16"
    "compute type of the large matmuls; the rest is 16-bit (32-bit under fp32)"
    software: Software = Software()
    "what the software does"
    stage_layers: tuple[int, ...] = ()
    "layers of every virtual stage; empty: cut by cost"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UserError(
                f"{self.precision!r} is no compute type",
                where="precision",
                legal=", ".join(PRECISIONS),
                nearest="bf16",
            )
        if self.batch_size < 1:
            raise UserError(f"{self.batch_size}", where="batch_size", legal="1 or more sequences")
        if not 1 <= self.sequence_length <= 100_000_000:
            raise UserError(
                f"{self.sequence_length}", where="sequence_length", legal="1 to 100000000 tokens"
            )

    @property
    def microbatch_size(self) -> int:
        """Sequences of one microbatch on one data rank, the padded one."""
        return max(1, math.ceil(self.batch_size / (self.plan.data * self.plan.num_microbatches)))

    @property
    def microbatch_tokens(self) -> float:
        """Tokens of one microbatch on one rank (a context rank holds a part of each sequence)."""
        return self.microbatch_size * self.sequence_length / self.plan.context

    @property
    def step_tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.batch_size * self.sequence_length

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation as it crosses a link."""
        return 4 if self.precision == "fp32" else 2

    def group(self, axis: str) -> Group:
        """The group of an axis in the rank order pipeline, replicas, data, context, tensor."""
        plan = self.plan
        if axis == "tensor":
            return Group(plan.tensor, 1)
        if axis == "context":
            return Group(plan.context, plan.tensor)
        if axis == "expert":
            return Group(plan.expert, plan.tensor)
        if axis == "reduce":
            return Group(plan.data * plan.context, plan.tensor)
        within = plan.context * plan.tensor
        if axis == "pipeline":
            return Group(plan.pipeline, plan.data * within)
        if axis == "replicas":
            return Group(plan.replicas, plan.data // plan.replicas * within)
        shards = plan.data // plan.replicas * plan.context
        if axis == "shard":
            return Group(shards, plan.tensor)
        assert axis == "expert_shard", axis
        return Group(max(1, shards // plan.expert), plan.tensor * plan.expert)
