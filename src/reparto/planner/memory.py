"""Bytes of one rank, item by item, at the moment when most is held.

**States** (elements P a rank, n shards; Rajbhandari 2020, section 3): compute weight 2, gradient 4
(or 2), master 4, moments 8. ZeRO 1, 2, 3 divide what they name by n. Under `shard=parameters` the
master is the only full-precision weight and two gathered units stand beside the pieces.

**Activations** of one layer and one microbatch (Korthikanti 2022, table 2, written out by tensor,
so that grouped heads, gates and flash kernels are covered), bytes a token:

| kept for | bytes | cut by tensor |
|---|---|---|
| two norms' inputs | 4 h | with sequence parallel |
| inputs of q k v and of the feed-forward part | 4 h | with sequence parallel |
| q, k, v, attention's output | 2 (2 a d + 2 kv d) | yes |
| scores, dropped scores and mask, unless flash | 5 a s | yes |
| feed-forward, plain / gated | 4 f / 6 f | yes |
| two dropout masks | 2 h | with sequence parallel |

With selective recompute the scores go; with full recompute only a layer's input (2 h) stays, plus
one layer's activations while it is made again. How many microbatches are alive comes from the
schedule: min(p - rank, m) under 1F1B, (Narayanan 2021) x (1 + (p - 1) / (p v)) interleaved.

**Ends**: logits in 16 and 32 bit, and their gradient (`Software.loss_bytes` each). **Allowance**: `reserved_bytes` adds what the
allocator keeps and the driver's context; a plan "fits" below 94 % of the device on that count.
"""

from __future__ import annotations

from dataclasses import dataclass

from reparto.planner.constants import shipped
from reparto.planner.cost import Costs
from reparto.planner.job import Job
from reparto.planner.kernels import Kernels
from reparto.planner.links import Links
from reparto.planner.stages import Stage, ranks_of, stage_list

#: the driver's context and the communication library's own buffers, a device
CONTEXT_BYTES = 2e9
#: what a caching allocator keeps over what is allocated
FRAGMENTATION = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of one rank at its peak."""

    pipeline_stage: int
    "position on the pipeline axis"
    items: tuple[tuple[str, float], ...]
    "what is held, largest first"

    @property
    def total_bytes(self) -> float:
        return sum(size for _, size in self.items)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of every pipeline position; ranks of the other axes hold the same."""

    ranks: tuple[RankMemory, ...]
    "one for each pipeline position"

    @property
    def peak_bytes(self) -> float:
        return max(rank.total_bytes for rank in self.ranks)

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total_bytes)


def reserved_bytes(allocated: float) -> float:
    """What the driver shows when so much is allocated."""
    return allocated * FRAGMENTATION + CONTEXT_BYTES


def fits(job: Job, memory: Memory | None = None) -> bool:
    """Whether the fullest rank stays below what the device gives."""
    found = memory or memory_of(job)
    return reserved_bytes(found.peak_bytes) <= usable_bytes(job)


def usable_bytes(job: Job) -> float:
    """Device memory that a plan may fill."""
    return 0.97 * job.cluster.memory_bytes


def memory_of(job: Job, costs: Costs | None = None) -> Memory:
    """The peak of every pipeline position."""
    if costs is None:
        constants = shipped()
        kernels = Kernels(job.cluster.accelerator, constants, job.cluster.measured)
        costs = Costs(kernels, Links(job.cluster, constants), constants)
    stages = stage_list(job, costs)
    rows = ranks_of(job, stages)
    return Memory(ranks=tuple(_rank(job, stages, rows, rank) for rank in range(len(rows))))


def _rank(job: Job, stages: tuple[Stage, ...], rows: list[list[int]], rank: int) -> RankMemory:
    plan = job.plan
    mine = [stages[index] for index in rows[rank]]
    items = _states(job, mine)
    per_layer = {moe: layer_activation_bytes(job, moe=moe) for moe in (False, True)}
    layers = sum(stage.dense * per_layer[False] + stage.moe * per_layer[True] for stage in mine)
    live = live_microbatches(job, rank)
    items["activations"] = layers * live / len(mine)
    again: dict[str, float] = {}
    if plan.recompute == "full":
        kept = layer_activation_bytes(job, moe=bool(job.model.experts), recompute="none")
        again["layer made again"] = kept
    # the last logits are gone before the first layer is made again: the larger one counts
    items.update(max(again, _ends(job, mine), key=lambda part: sum(part.values())))
    ordered = sorted(items.items(), key=lambda item: -item[1])
    return RankMemory(pipeline_stage=rank, items=tuple((k, v) for k, v in ordered if v > 0))


def live_microbatches(job: Job, rank: int) -> float:
    """Chunk activations alive at once on a pipeline rank (all chunks of one microbatch: v)."""
    plan = job.plan
    p, m, v = plan.pipeline, plan.num_microbatches, plan.num_chunks
    if plan.schedule == "gpipe":
        return float(m * v)
    if p == 1:
        return float(v)
    if plan.schedule == "interleaved":
        return float(min(m * v, (v - 1) * p + 2 * (p - rank - 1) + 1))
    if plan.schedule == "zb-v":
        return float(min(m * v, 2 * p))
    if plan.schedule == "dualpipe-v":
        return float(min(m * v, 2 * p + 1))
    return float(min(m, p - rank) * v)


def _states(job: Job, mine: list[Stage]) -> dict[str, float]:
    plan = job.plan
    parts = [s.parameters(job.model, tensor=plan.tensor, expert=plan.expert) for s in mine]
    shared, routed = sum(p[0] for p in parts), sum(p[1] for p in parts)
    width = job.element_bytes
    gradient = job.software.gradient_bytes
    master = 4 if width < 4 else 0
    cut = shared / job.group("shard").size + routed / job.group("expert_shard").size
    whole = shared + routed
    if plan.shard == "parameters":
        layers = max(1, sum(stage.dense + stage.moe for stage in mine))
        unit = max(whole / layers, job.model.embedding_parameters / plan.tensor)
        return {
            "weights": cut * 4,
            "gathered weights": 2 * unit * width,
            "gradients": cut * 4 + unit * gradient,
            "optimizer": cut * 8,
        }
    split = plan.shard != "none"
    # a 16-bit gradient is cast for the update, or stands beside the 32-bit one it is added to
    if not job.software.fused_accumulation and gradient < 4:
        master += 4
    beside = width if job.software.plain_kernels and gradient == 4 and width < 4 else 0
    owned = cut if split else whole
    reduced = cut * gradient if plan.shard == "gradients" else whole * gradient
    return {
        "weights": whole * width,
        "gradients": reduced + beside * whole,
        "optimizer": owned * (8 + master),
    }


def layer_activation_bytes(job: Job, *, moe: bool, recompute: str | None = None) -> float:
    """Bytes that one layer keeps for one microbatch."""
    model, plan, software = job.model, job.plan, job.software
    tokens, t, width = job.microbatch_tokens, job.plan.tensor, job.element_bytes
    mode = plan.recompute if recompute is None else recompute
    outside = t if plan.sequence_parallel else 1
    h = model.hidden
    if mode == "full":
        return tokens * width * h / outside
    heads = model.heads * (model.head_dim + model.value_dim) / t
    kv = model.kv_heads * (model.head_dim + model.value_dim) / t
    inner = model.ffn
    entries = 4.0 * h / outside
    if moe:
        inner = model.expert_ffn * model.active_experts + model.shared_ffn
        entries += 2.0 * model.active_experts * h
    matrices = (3 if model.gated else 2) + (1 if software.plain_kernels and model.gated else 0)
    kept = entries + heads + kv + matrices * inner / t
    if mode == "selective" and software.recomputed_matmuls:
        # only the input, attention's output and the matmul outputs that are not made again
        widths = 2.0 * h + heads + kv + (2 if model.gated else 1) * inner / t
        kept = h / outside + heads / 2 + (1 - software.recomputed_matmuls) * widths
    masks = 2.0 * h / outside if software.dropout else 0.0
    scores = 0.0
    if not software.flash and mode != "selective":
        per_score = 2 * width + 1 if software.dropout else width
        scores = per_score * model.heads / t * job.sequence_length
    return tokens * (kept * width + masks + scores)


def _ends(job: Job, mine: list[Stage]) -> dict[str, float]:
    found: dict[str, float] = {}
    if any(stage.last for stage in mine):
        logits = job.microbatch_tokens * job.model.vocab / job.plan.tensor
        found["logits"] = logits * job.software.loss_bytes
    return found
