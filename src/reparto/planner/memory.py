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

**Ends**: logits in 16 and 32 bit, and their gradient (`Software.loss_bytes` each).
**Allowance**: `reserved_bytes` adds what the allocator keeps and the driver's context; on that
count a plan fits below 97 % of what the device shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from reparto.planner.constants import shipped
from reparto.planner.job import Job
from reparto.planner.stages import Layout
from reparto.planner.step import Predictor

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
    total_bytes: float
    "their sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of every pipeline position; ranks of the other axes hold the same."""

    ranks: tuple[RankMemory, ...]
    "one for each pipeline position"
    fullest: RankMemory
    "the one that holds most"

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return self.fullest.total_bytes


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


def memory_of(job: Job, predictor: Predictor | None = None) -> Memory:
    """The peak of every pipeline position."""
    layout = (predictor or Predictor(job.cluster, shipped())).layout(job)
    per_layer = (
        layer_activation_bytes(job, moe=False),
        layer_activation_bytes(job, moe=True) if job.model.experts else 0.0,
    )
    again = 0.0
    if job.plan.recompute == "full":
        moe = bool(job.model.experts)
        again = layer_activation_bytes(job, moe=moe, recompute="none")
    known: dict[tuple[object, ...], RankMemory] = {}
    ranks: list[RankMemory] = []
    for rank, row in enumerate(layout.rows):
        # ranks that hold and keep the same have the same bytes: most of a long pipeline
        kinds = tuple(layout.stages[index] for index in row)
        key = (kinds, live_microbatches(job, rank))
        found = known.get(key)
        if found is None:
            found = known[key] = _rank(job, layout, rank, per_layer, again)
        ranks.append(found if found.pipeline_stage == rank else replace(found, pipeline_stage=rank))
    return Memory(ranks=tuple(ranks), fullest=max(ranks, key=lambda one: one.total_bytes))


def first_rank_bytes(job: Job, layout: Layout) -> float:
    """Bytes of the first pipeline position, which holds most microbatches: a quick refusal."""
    mine = [layout.stages[index] for index in layout.rows[0]]
    layers = sum(stage.dense + stage.moe for stage in mine)
    kept = float(sum(stage.dense for stage in mine)) * layer_activation_bytes(job, moe=False)
    if job.model.experts:
        kept += sum(stage.moe for stage in mine) * layer_activation_bytes(job, moe=True)
    states = sum(_states(job, layout.parameters[0], layers).values())
    return states + kept * live_microbatches(job, 0) / len(mine)


def _rank(
    job: Job, layout: Layout, rank: int, per_layer: tuple[float, float], again: float
) -> RankMemory:
    mine = [layout.stages[index] for index in layout.rows[rank]]
    items = _states(job, layout.parameters[rank], sum(stage.dense + stage.moe for stage in mine))
    layers = sum(stage.dense * per_layer[0] + stage.moe * per_layer[1] for stage in mine)
    items["activations"] = layers * live_microbatches(job, rank) / len(mine)
    # the last logits are gone before the first layer is made again: the larger one counts
    logits = 0.0
    if any(stage.last for stage in mine):
        logits = job.microbatch_tokens * job.model.vocab / job.plan.tensor
        logits *= job.software.loss_bytes
    items["logits" if logits >= again else "layer made again"] = max(logits, again)
    ordered = sorted(items.items(), key=lambda item: -item[1])
    return RankMemory(
        pipeline_stage=rank,
        items=tuple((name, size) for name, size in ordered if size > 0),
        total_bytes=sum(items.values()),
    )


def live_microbatches(job: Job, rank: int) -> float:
    """Chunk activations alive at once on a pipeline rank (all chunks of one microbatch: v)."""
    plan = job.plan
    return live_chunks(plan.schedule, plan.pipeline, plan.num_microbatches, plan.num_chunks, rank)


def live_chunks(schedule: str, p: int, m: int, v: int, rank: int) -> float:
    """The same from bare numbers; `schedule/live.py` counts it from the lists (a test compares)."""
    if schedule == "gpipe":
        return float(m * v)
    if p == 1:
        return float(v)
    if schedule == "interleaved":
        return float(min(m * v, (v - 1) * p + 2 * (p - rank - 1) + 1))
    if schedule == "zb-h1":
        return float(min(m, p))  # a deferred weight gradient keeps its activation on every rank
    if schedule == "zb-v":
        return float(min(m * v, 2 * p))
    if schedule == "dualpipe-v":
        return float(min(m * v, 2 * p + 1))
    return float(min(m, p - rank) * v)


def _states(job: Job, parameters: tuple[float, float], layers: int) -> dict[str, float]:
    plan = job.plan
    shared, routed = parameters
    width = job.element_bytes
    gradient = job.software.gradient_bytes
    master = 4 if width < 4 else 0
    cut = shared / job.group("shard").size + routed / job.group("expert_shard").size
    whole = shared + routed
    late = plan.num_microbatches > 1 and plan.gradient_sync == "step"
    if plan.shard == "parameters":
        unit = max(whole / max(1, layers), job.model.embedding_parameters / plan.tensor)
        return {
            "weights": cut * 4,
            # with a pipeline a chunk stays gathered between its first and its last action
            "gathered weights": (whole if plan.pipeline > 1 else 2 * unit) * width,
            "gradients": cut * 4 + (whole if late else unit) * gradient,
            "optimizer": cut * 8,
        }
    split = plan.shard != "none"
    # a 16-bit gradient is cast for the update, or stands beside the 32-bit one it is added to
    if split and not job.software.fused_accumulation and gradient < 4:
        master += 4
    beside = width if job.software.plain_kernels and gradient == 4 and width < 4 else 0
    owned = cut if split else whole
    reduced = cut * gradient if plan.shard == "gradients" and not late else whole * gradient
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


def least_bytes(job: Job) -> float:
    """The fullest rank of no schedule of this plan holds less: mean states, one microbatch alive.

    A true bound, because the fullest rank has at least the mean, and every schedule holds at least
    one whole microbatch of a rank's layers.
    """
    model, plan = job.model, job.plan
    routed = model.moe_layers * model.experts * model.expert_parameters
    shared = (model.parameters - routed) / (plan.tensor * plan.pipeline)
    held = routed / (plan.tensor * plan.pipeline * plan.expert)
    states = sum(
        size
        for name, size in _states(job, (shared, held), model.layers // plan.pipeline).items()
        if name != "gathered weights"
    )
    return states * 0.999 + least_layer_bytes(job) / plan.pipeline


def least_layer_bytes(job: Job) -> float:
    """Activations of all layers for one microbatch."""
    model = job.model
    layers = float(model.dense_layers_count) * layer_activation_bytes(job, moe=False)
    if model.experts:
        layers += model.moe_layers * layer_activation_bytes(job, moe=True)
    return layers


def kept_bytes(job: Job, schedule: tuple[str, int], layers: float) -> float:
    """No cut of the layers holds fewer activations on its fullest rank under a schedule.

    With l_r microbatches alive on rank r, the best cut makes layers x l_r equal, so the fullest
    rank holds all layers over the sum of 1 / l_r.
    """
    name, v = schedule
    p, m = job.plan.pipeline, job.plan.num_microbatches
    return 0.999 * layers / _sum_of_inverses(name, p, m, v)


@lru_cache(maxsize=65536)
def _sum_of_inverses(schedule: str, p: int, m: int, v: int) -> float:
    return sum(v / live_chunks(schedule, p, m, v, rank) for rank in range(p))
