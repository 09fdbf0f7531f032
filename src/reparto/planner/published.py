"""Published runs: from a row of a table to a question that the planner can answer.

A row gives what its authors printed. What they did not print is filled by rules that look at the
row's other columns, never at its id or source: layers from the parameter count, gated or not from
the parameter count, the software's habits from attention, sharding and the words of the note.
A row that cannot be asked is skipped with the reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from reparto.config.cluster import Cluster, Tier
from reparto.config.plan import Plan, ScheduleName, ShardMode
from reparto.errors import UserError
from reparto.planner.hardware import find_accelerator
from reparto.planner.job import Job, Software
from reparto.planner.model_spec import ModelSpec, load_model, model_names

Row = Mapping[str, str]

#: what a table must have; other columns may be empty or missing
NEEDED = ("id", "source", "gpu", "n_gpus", "global_batch", "seq_len")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One published run."""

    id: str
    "the row's name"
    source: str
    "repository or arXiv id"
    job: Job
    "the question"
    step_s: float | None
    "measured seconds of a step"
    memory_bytes: float | None
    "measured memory of one device"
    memory_kind: str
    "allocated, or reserved: what the driver shows, caches and context included"
    out_of_memory: bool
    "the run is known to have failed for memory"


class Unusable(Exception):
    """A row that cannot be asked; the message says why."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises `UserError` if it is no such table."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where="--validate") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no table: {error}", where="--validate") from error
    if not rows:
        raise UserError(f"{path} holds no rows", where="--validate", legal=", ".join(NEEDED))
    missing = [name for name in NEEDED if name not in rows[0]]
    if missing:
        raise UserError(
            f"{path} lacks the columns {', '.join(missing)}",
            where="--validate",
            legal=", ".join(NEEDED) + " and the others of published_runs.csv",
        )
    return rows


def source_of(text: str) -> str:
    """The repository or arXiv id that a source text names; without one, its first words."""
    paper = re.search(r"arXiv:\s*(\d{4}\.\d{4,5})", text)
    repository = re.match(r"\s*(?:https?://github\.com/)?([\w.-]+/[\w.-]+)", text)
    if repository and not (paper and paper.start() < repository.start()):
        return repository[1]
    return f"arXiv:{paper[1]}" if paper else text[:40].strip()


def run_of(row: Row) -> Run:
    """The question of one row. Raises `Unusable`."""
    try:
        job = _job(row)
    except UserError as error:
        raise Unusable(str(error).splitlines()[0]) from error
    words = row.get("note", "").lower()
    shown = [row.get(key, "") for key in ("measured_step_s", "measured_mem_gb", "status")]
    failed = any("oom" in text.lower() for text in shown) or bool(
        re.search(r"\boom\b|out[- ]of[- ]memory", words)
    )
    memory = number(row.get("measured_mem_gb", ""))
    reserved = any(
        word in words for word in ("nvidia-smi", "snapshot", "max_reserved", "last node")
    )
    binary = "gib" in words
    return Run(
        id=row["id"],
        source=source_of(row["source"]),
        job=job,
        step_s=_measured_step(row, job),
        memory_bytes=memory * ((1 << 30) if binary else 1e9) if memory else None,
        memory_kind="reserved" if reserved else "allocated",
        out_of_memory=failed,
    )


def number(text: str) -> float | None:
    """The first number of a text, or None."""
    found = re.search(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", text.replace(",", ""))
    return float(found[0]) if found else None


def whole(row: Row, key: str, default: int | None = None) -> int:
    """A whole number from a row."""
    value = number(row.get(key, ""))
    if value is None:
        if default is None:
            raise Unusable(f"{key} is not published")
        return default
    return round(value)


def _measured_step(row: Row, job: Job) -> float | None:
    seconds = number(row.get("measured_step_s", ""))
    if seconds:
        return seconds
    rate = number(row.get("tokens_per_s_per_gpu", ""))
    return job.step_tokens / (rate * job.cluster.count) if rate else None


def _job(row: Row) -> Job:
    model = _model(row)
    plan, batch, layers = _plan(row, model)
    return Job(
        model=model,
        cluster=_cluster(row),
        plan=plan,
        batch_size=batch,
        sequence_length=whole(row, "seq_len"),
        precision=_precision(row.get("precision", "")),
        software=_software(row, plan),
        stage_layers=layers,
    )


def _cluster(row: Row) -> Cluster:
    device = find_accelerator(row["gpu"])
    count = whole(row, "n_gpus")
    node = whole(row, "gpus_per_node", device.node_size)
    if device.node_size > 8:
        node = max(node, device.node_size)
    node = min(node, count)
    inside = number(row.get("intra_bw", "")) or device.node_gb_s
    network = device.network_gb_s
    text = row.get("inter_bw", "")
    given = number(text)
    if given and "bit" in text.lower():
        network = given / 8 / (max(1, whole(row, "gpus_per_node", 8)) if "node" in text else 1)
    tiers = [Tier(name="node", size=node, gb_s=min(inside, device.node_gb_s), latency_us=3.0)]
    if count > node:
        tiers.append(Tier(name="network", size=count, gb_s=network, latency_us=8.0))
    return Cluster(name=row["gpu"], accelerator=device, count=count, tiers=tuple(tiers))


def _precision(text: str) -> str:
    text = text.lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text:
        return "fp8"
    return "fp32" if text in ("fp32", "float32", "tf32") else "bf16"


def _software(row: Row, plan: Plan) -> Software:
    words = row.get("note", "").lower()
    attention = row.get("attention", "").lower()
    flash = "flash" in attention and "non-flash" not in attention
    if not attention:
        flash = find_accelerator(row["gpu"]).generation not in ("volta", "ampere")
    classic = not flash
    deepspeed = "deepspeed" in words
    by_layer = plan.shard == "parameters"
    low = _precision(row.get("precision", "")) in ("fp8", "fp4")
    sdpa = "sdpa" in attention
    # 8-bit training outside FSDP comes with the vendor's library, and so do its attention kernels
    vendor = not sdpa and not by_layer and (low or "te" in attention or "nemo" in words)
    compiled = bool(re.search(r"\bcompiled?\b", words)) or "te" in attention
    return Software(
        flash=flash,
        fused=compiled if by_layer else not deepspeed,
        overlap_data=not classic,
        overlap_tensor=plan.sequence_parallel and (low or "nemo" in words),
        gradient_bytes=2 if classic or by_layer else 4,
        dropout=classic,
        # flash-attn's package brings a loss that works in place; PyTorch's own keeps three copies
        loss_bytes=14 if sdpa else 4 if by_layer else 6 if vendor or classic else 8,
        plain_kernels=flash and not (vendor or by_layer),
        recomputed_matmuls=0.5 if "per-op" in row.get("recompute", "").lower() else 0.0,
        fused_accumulation=not deepspeed,
        flash_kernel="vendor"
        if vendor
        else "first"
        if by_layer and not (compiled or sdpa)
        else "second",
    )


def _plan(row: Row, model: ModelSpec) -> tuple[Plan, int, tuple[int, ...]]:
    tensor, pipeline = whole(row, "tp", 1), whole(row, "pp", 1)
    context, expert = whole(row, "cp", 1), whole(row, "ep", 1)
    count = whole(row, "n_gpus")
    data = max(1, count // (tensor * pipeline * context))
    chunks = whole(row, "vpp", 1)
    text = row.get("schedule", "").lower()
    schedule = _schedule(text, chunks)
    if schedule in ("zb-v", "dualpipe-v"):
        chunks = 2
    elif schedule == "interleaved":
        chunks = max(chunks, 2)
    batch = whole(row, "global_batch")
    micro = whole(row, "micro_batch", 1)
    microbatches = max(1, round(batch / (data * micro)))
    stage = number(row.get("zero_stage", ""))
    modes: dict[int, ShardMode] = {0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}
    shard = modes.get(int(stage), "none") if stage is not None else "none"
    recompute = row.get("recompute", "").lower()
    plan = Plan(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        # a published expert degree may span tensor ranks too; here it folds over data x context
        expert=min(expert, data * context) if model.experts else 1,
        shard=shard,
        chunks=chunks,
        schedule=schedule,
        num_microbatches=microbatches,
        sequence_parallel=tensor > 1 and row.get("sequence_parallel", "") in ("1", "True", "true"),
        recompute="full"
        if recompute.startswith("full")
        else "selective"
        if recompute.startswith("selective")
        else "none",
        gradient_sync="microbatch" if shard == "parameters" else "step",
    )
    return plan, batch, _published_cut(model.layers, pipeline * chunks)


def _schedule(text: str, chunks: int) -> ScheduleName:
    if "dual" in text:
        return "dualpipe-v"
    if "zb-v" in text or "zbv" in text:
        return "zb-v"
    if "zb" in text or "zero" in text:
        return "zb-h1"
    if "interleaved" in text or "1f1b-i" in text or chunks > 1:
        return "interleaved"
    return "gpipe" if "gpipe" in text else "1f1b"


def _published_cut(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages; where that fails, embedding and head stand for one layer each."""
    if stages > layers + 2:
        raise Unusable(f"{layers} layers on {stages} stages")
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return (each - 1, *([each] * (stages - 2)), each - 1)
    return ()


def _model(row: Row) -> ModelSpec:
    known = _catalogued(row.get("model_name", ""))
    if not row.get("hidden") or (not row.get("layers") and not row.get("params_b")):
        if known is None:
            raise Unusable("layers or hidden size are not published")
        return known
    hidden, ffn = whole(row, "hidden"), whole(row, "ffn_hidden", 4 * whole(row, "hidden"))
    heads = whole(row, "heads", max(1, hidden // 128))
    experts = whole(row, "experts", 0)
    base = ModelSpec(
        name=row.get("model_name", "") or "model",
        layers=whole(row, "layers", 1),
        hidden=hidden,
        heads=heads,
        kv_heads=whole(row, "kv_heads", heads),
        head_dim=max(1, hidden // heads),
        ffn=ffn,
        vocab=whole(row, "vocab", 51200),
        gated=ffn != 4 * hidden,
        tied=ffn == 4 * hidden,
        experts=experts,
        active_experts=whole(row, "top_k", 1) if experts else 0,
        expert_ffn=ffn if experts else 0,
    )
    if known is not None and known.hidden == base.hidden and known.experts == base.experts:
        base = replace(known, layers=base.layers)
    published = number(row.get("params_b", ""))
    if published:
        base = _closest(base, published * 1e9, bool(row.get("layers")), whole(row, "pp", 1))
    return base


def _closest(base: ModelSpec, parameters: float, layers_known: bool, stages: int) -> ModelSpec:
    """The variant whose parameter count is nearest: layers, gated and tied where not printed."""
    if not layers_known:
        ends = base.embedding_parameters * (1 if base.tied else 2)
        layers = (parameters - ends) / base.layer_parameters(False)
        return replace(base, layers=max(1, round(layers / stages)) * stages)
    if base.experts:
        return base
    variants = [replace(base, gated=g, tied=t) for g in (False, True) for t in (False, True)]
    return min(variants, key=lambda m: (abs(m.parameters - parameters), m.tied is not base.tied))


def _catalogued(name: str) -> ModelSpec | None:
    """The named model, if the package knows it."""
    wanted = re.sub(r"[^a-z0-9]", "", name.lower()).replace("llama31", "llama3")
    for known in model_names():
        if len(known) > 4 and re.sub(r"[^a-z0-9]", "", known) in wanted:
            return load_model(known)
    return None
