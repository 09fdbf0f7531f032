"""How far predictions lie from published runs, beside what a constant efficiency would have said.

Errors are relative to the measured value. `time`, `baseline`, `leave_one_out` and `memory` are
means over sources, each weighted equally; `by_source` lists them. `leave_one_out` refits all
constants without the source it then predicts, and so does its baseline.

The baseline is one efficiency for each generation of accelerators (share of the peak of the row's
compute type, recomputation counted as work): the median over sources of each source's median. It
knows no shapes, links or schedules, and it is hard to beat: on Narayanan's table 1 a constant beats
the best public simulator out of sample. A figure without it means little.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reparto.planner.calibrate import Linear, fit, linearise, predict_s
from reparto.planner.constants import Constants, read_constants, shipped
from reparto.planner.interval import factor
from reparto.planner.job import Software
from reparto.planner.memory import fits, memory_of, reserved_bytes
from reparto.planner.model_spec import ModelSpec
from reparto.planner.published import Run, Unusable, read_rows, run_of
from reparto.planner.step import Predictor

Key = tuple[str, ModelSpec, str, int, int, int, str, Software]
Summary = dict[str, float | int | None]


def validate(path: Path | str, *, leave_one_out: bool = True) -> dict[str, object]:
    """Score a table of published runs; the object of `plan --validate`."""
    rows = read_rows(Path(path))
    runs: list[Run] = []
    skipped: list[dict[str, str]] = []
    for row in rows:
        try:
            run = run_of(row)
        except Unusable as error:
            skipped.append({"id": row["id"], "why": str(error)})
            continue
        if run.step_s or run.memory_bytes or run.out_of_memory:
            runs.append(run)
        else:
            skipped.append({"id": run.id, "why": "prints neither step time nor memory"})
    constants = shipped()
    timed = [run for run in runs if run.step_s and not run.out_of_memory]
    seconds = predictions(timed, constants)
    ours = _errors(timed, seconds)
    base = _errors(timed, constant_efficiency(timed, timed))
    found: dict[str, object] = {
        "rows": len(rows),
        "taken": len(runs),
        "skipped": skipped,
        "time": summary(ours),
        "baseline": summary(base),
    }
    left_out = left_out_base = None
    if leave_one_out and len({run.source for run in timed}) > 1:
        left_out, left_out_base = _leave_one_out(timed, constants)
        found["leave_one_out"] = {
            **summary(left_out),
            "baseline": summary(left_out_base),
            "dense_a100_h100": summary(_dense(timed, left_out)),
        }
    else:
        found["leave_one_out"] = None
    memory = _memory_errors(runs)
    allocated = [run for run in runs if run.memory_kind == "allocated"]
    found["memory"] = summary(memory)
    found["memory_allocated"] = summary(_memory_errors(allocated))
    found["by_source"] = _by_source(ours, base, left_out, left_out_base, memory)
    found["dense_a100_h100"] = {
        **summary(_dense(timed, ours)),
        "baseline": summary(_dense(timed, base)),
    }
    found["sweeps"] = sweeps(timed, seconds)
    found["out_of_memory"] = _out_of_memory(runs)
    if timed:
        found["interval"] = {
            "says": 0.8,
            "holds": _coverage(timed, ours),
            "holds_left_out": _coverage(timed, left_out) if left_out else None,
        }
    return found


def predictions(runs: Sequence[Run], constants: Constants) -> list[float]:
    """Predicted step seconds."""
    cache: dict[object, Predictor] = {}
    return [predict_s(run, constants, cache) for run in runs]


Errors = dict[str, list[float]]


def _errors(runs: Sequence[Run], seconds: Sequence[float]) -> Errors:
    found: Errors = defaultdict(list)
    for run, predicted in zip(runs, seconds, strict=True):
        assert run.step_s
        found[run.source].append(100 * (predicted / run.step_s - 1))
    return dict(found)


def _dense(runs: Sequence[Run], errors: Errors) -> Errors:
    """The part of `errors` that belongs to dense models on Ampere and Hopper."""
    found: Errors = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for run in runs:
        error = errors[run.source][seen[run.source]]
        seen[run.source] += 1
        generation = run.job.cluster.accelerator.generation
        if not run.job.model.experts and generation in ("ampere", "hopper"):
            found[run.source].append(error)
    return dict(found)


def summary(errors: Mapping[str, Sequence[float]]) -> Summary:
    """Mean over sources of each source's figure, in percent."""
    if not errors:
        return {"mean_abs_pct": None, "median_abs_pct": None, "p90_abs_pct": None, "bias_pct": None,
                "sources": 0, "n": 0}  # fmt: skip

    def over(figure: Callable[[Sequence[float]], float]) -> float:
        return round(statistics.fmean(figure(values) for values in errors.values()), 2)

    return {
        "mean_abs_pct": over(lambda v: statistics.fmean(map(abs, v))),
        "median_abs_pct": over(lambda v: statistics.median(map(abs, v))),
        "p90_abs_pct": over(lambda v: quantile(sorted(map(abs, v)), 0.9)),
        "bias_pct": over(statistics.fmean),
        "sources": len(errors),
        "n": sum(map(len, errors.values())),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the order statistics."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


# --- the baseline --------------------------------------------------------------------------------


def ideal_s(run: Run) -> float:
    """Seconds at full peak, recomputation counted."""
    job = run.job
    model = job.model
    flops = model.model_flops(job.step_tokens, job.sequence_length, causal=False)
    if job.plan.recompute == "full":
        head = 6 * job.step_tokens * model.embedding_parameters
        flops += (flops - head) / 3
    device = job.cluster.accelerator
    peak = {
        "fp4": device.peak_fp4_tflops or device.peak_fp8_tflops,
        "fp8": device.peak_fp8_tflops,
        "fp32": device.peak_fp32_tflops,
    }.get(job.precision, 0.0) or device.peak_bf16_tflops
    return flops / (job.cluster.count * peak * 1e12)


def constant_efficiency(known: Sequence[Run], asked: Sequence[Run]) -> list[float]:
    """Step seconds at one efficiency a generation, learnt from `known`."""
    by_source: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in known:
        assert run.step_s
        share = ideal_s(run) / run.step_s
        by_source[run.job.cluster.accelerator.generation][run.source].append(share)
    shares = {
        generation: statistics.median(statistics.median(part) for part in sources.values())
        for generation, sources in by_source.items()
    }
    overall = statistics.median(shares.values()) if shares else 0.4
    return [
        ideal_s(run) / shares.get(run.job.cluster.accelerator.generation, overall) for run in asked
    ]


def _leave_one_out(timed: Sequence[Run], constants: Constants) -> tuple[Errors, Errors]:
    table = read_constants()
    linear = linearise(timed, table, constants)
    ours: Errors = {}
    base: Errors = {}
    for source in dict.fromkeys(run.source for run in timed):
        kept = [i for i, run in enumerate(timed) if run.source != source]
        asked = [run for run in timed if run.source == source]
        known = [timed[i] for i in kept]
        part = Linear(
            names=linear.names,
            point=linear.point,
            jacobian=tuple(linear.jacobian[i] for i in kept),
        )
        refitted = fit(known, table, constants, linear=part)
        ours.update(_errors(asked, predictions(asked, refitted)))
        base.update(_errors(asked, constant_efficiency(known, asked)))
    return ours, base


# --- memory --------------------------------------------------------------------------------------


def _memory_errors(runs: Sequence[Run]) -> Errors:
    found: Errors = defaultdict(list)
    for run in runs:
        if run.memory_bytes and not run.out_of_memory:
            predicted = memory_of(run.job).peak_bytes
            if run.memory_kind == "reserved":
                predicted = reserved_bytes(predicted)
            found[run.source].append(100 * (predicted / run.memory_bytes - 1))
    return dict(found)


def _out_of_memory(runs: Sequence[Run]) -> dict[str, int]:
    failed = [run for run in runs if run.out_of_memory]
    ran = [run for run in runs if not run.out_of_memory]
    return {
        "known": len(failed),
        "called": sum(not fits(run.job) for run in failed),
        "ran": len(ran),
        "ran_but_called": sum(not fits(run.job) for run in ran),
    }


# --- other views ---------------------------------------------------------------------------------


def _by_source(
    ours: Errors, base: Errors, left: Errors | None, left_base: Errors | None, memory: Errors
) -> dict[str, dict[str, Summary]]:
    found: dict[str, dict[str, Summary]] = {}
    for name in [*ours, *(s for s in memory if s not in ours)]:
        views = {"time": ours, "baseline": base, "leave_one_out": left,
                 "leave_one_out_baseline": left_base, "memory": memory}  # fmt: skip
        found[name] = {
            view: summary({name: errors[name]})
            for view, errors in views.items()
            if errors and name in errors
        }
    return found


def sweeps(runs: Sequence[Run], seconds: Sequence[float]) -> list[dict[str, object]]:
    """Groups that differ in the plan alone: rank agreement, and the cost of the predicted best."""
    groups: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for run, predicted in zip(runs, seconds, strict=True):
        job = run.job
        assert run.step_s
        key = (run.source, job.model, job.cluster.accelerator.name, job.cluster.count,
               job.sequence_length, job.batch_size, job.precision, job.software)  # fmt: skip
        groups[key].append((predicted, run.step_s))
    found: list[dict[str, object]] = []
    for key, pairs in groups.items():
        if len(pairs) < 3:
            continue
        best = min(measured for _, measured in pairs)
        chosen = min(pairs)[1]
        found.append(
            {
                "group": f"{key[0]}: {key[1].name} on {key[3]} {key[2]}",
                "n": len(pairs),
                "spearman": round(spearman(pairs), 3),
                "top1_regret_pct": round(100 * (chosen / best - 1), 2),
            }
        )
    return found


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation; ties take their mean rank."""
    left, right = _ranks([a for a, _ in pairs]), _ranks([b for _, b in pairs])
    mean = statistics.fmean(left)
    top = sum((a - mean) * (b - mean) for a, b in zip(left, right, strict=True))
    below = math.sqrt(sum((a - mean) ** 2 for a in left) * sum((b - mean) ** 2 for b in right))
    return top / below if below else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def _coverage(runs: Sequence[Run], errors: Errors) -> float:
    """How often the measured time lies in the interval that says it holds four times in five."""
    inside: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        ratio = 1 + errors[run.source][len(inside[run.source])] / 100
        wide = factor(run.job)
        inside[run.source].append(float(1 / wide <= ratio <= wide))
    return round(statistics.fmean(statistics.fmean(held) for held in inside.values()), 3)
