"""`reparto plan --model M --cluster C`, `--validate`, `--what-if`: asks the planner, shows it.

Plain functions that take parsed options; people read stderr, the JSON object goes to stdout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from reparto.cli.console import console
from reparto.config.cluster import Cluster
from reparto.errors import UserError
from reparto.planner.answer import Objective, PlanSearch
from reparto.planner.constants import shipped
from reparto.planner.goodput import checkpoint_seconds, goodput
from reparto.planner.hardware import load_cluster
from reparto.planner.job import PRECISIONS
from reparto.planner.model_spec import ModelSpec, load_model
from reparto.planner.render import (
    legend,
    memory_bars,
    plan_table,
    rejected_table,
    timeline_svg,
    validation_table,
)
from reparto.planner.search import plan_search
from reparto.planner.step import Predictor
from reparto.planner.validate import validate
from reparto.planner.what_if import WhatIf, parse_what_if
from reparto.units import human_seconds

#: models below this many parameters are asked about as a run of ours would train them
SMALL = 1_000_000_000


def search_plans(
    *,
    model: str,
    cluster: str,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    objective: str = "time",
    forbid: Sequence[str] = (),
    precision: str = "bf16",
    what_if: Sequence[str] = (),
    total_tokens: float | None = None,
    svg: Path | None = None,
    json_out: bool = False,
) -> PlanSearch:
    """Search, print tables to stderr and, with `json_out`, the object to stdout.

    what_if  each entry is one change; the answer for the changed question stands beside the first
    """
    out = console()
    spec, machine = load_model(model), load_cluster(cluster)
    if precision not in PRECISIONS:
        raise UserError(f"{precision!r}", where="--precision", legal=", ".join(PRECISIONS))
    tokens = sequence_length or default_sequence(spec)
    sequences = batch_size or default_batch(spec, machine, tokens)

    def ask(change: WhatIf) -> PlanSearch:
        wanted = change.objective or objective
        return plan_search(
            spec,
            change.cluster(machine),
            batch_size=change.batch_size(sequences),
            sequence_length=change.sequence_length(tokens),
            objective=_objective(wanted),
            forbid=[*forbid, *change.forbid],
            precision=precision,
        )

    answer = ask(WhatIf())
    show(answer, out)
    values = answer.to_json()
    values["batch_size"], values["sequence_length"] = sequences, tokens
    changed: list[dict[str, object]] = []
    for text in what_if:
        other = ask(parse_what_if(text))
        out.rule(f"what if {text}")
        show(other, out)
        ratio = other.best.step_s / answer.best.step_s
        out.print(f"{text}: the best step takes {ratio:.3f} x")
        changed.append({"what_if": text, "step_ratio": ratio, **other.to_json()})
    if changed:
        values["what_if"] = changed
    if total_tokens:
        values["run"] = _whole_run(answer, total_tokens, out)
    if svg is not None:
        predictor = Predictor(answer.best.job.cluster, shipped())
        svg.write_text(timeline_svg(answer.best, predictor), encoding="utf-8")
        out.print(f"timeline: {svg}")
    if json_out:
        print(json.dumps(values))
    return answer


def _objective(text: str) -> Objective:
    found: dict[str, Objective] = {
        "time": "time", "cost": "cost", "energy": "energy", "memory": "memory"
    }  # fmt: skip
    if text not in found:
        raise UserError(f"{text!r}", where="--objective", legal=", ".join(found), nearest="time")
    return found[text]


def show(answer: PlanSearch, out: Console) -> None:
    """The three tables of one answer."""
    out.print(plan_table(answer))
    for line in memory_bars(answer.best.job, answer.best.memory):
        out.print(line)
    out.print(legend())
    out.print(rejected_table(answer))


def _whole_run(answer: PlanSearch, total_tokens: float, out: Console) -> dict[str, object]:
    job = answer.best.job
    found = goodput(
        job.cluster,
        step_s=answer.best.step_s,
        step_tokens=job.step_tokens,
        total_tokens=total_tokens,
        checkpoint_s=checkpoint_seconds(job.cluster, job.model.parameters),
    )
    price = f", about ${found.cost:,.0f}" if found.cost else ""
    out.print(
        f"{total_tokens:.3g} tokens: {human_seconds(found.expected_s)} expected, goodput "
        f"{100 * found.goodput:.1f} %, {found.stops:.1f} stops, a checkpoint every "
        f"{found.interval_steps} steps{price}"
    )
    return {name: getattr(found, name) for name in found.__slots__}


def default_sequence(model: ModelSpec) -> int:
    """Tokens of a sequence when nobody said: as in the demo run, or 4,096."""
    return 256 if model.parameters < SMALL else 4096


def default_batch(model: ModelSpec, cluster: Cluster, sequence_length: int) -> int:
    """Sequences a step when nobody said: the demo's 32, or about four million tokens."""
    if model.parameters < SMALL:
        return max(32, cluster.count)
    wanted = max(4_194_304 // sequence_length, cluster.count // 8, 1)
    found = 1
    while found < wanted:
        found *= 2
    return found


def validate_rows(path: str, *, json_out: bool = False) -> dict[str, object]:
    """Score published runs; the table to stderr and, with `json_out`, the object to stdout."""
    found = validate(path)
    out = console()
    out.print(validation_table(found))
    skipped = found["skipped"]
    assert isinstance(skipped, list)
    for entry in skipped:
        out.print(f"skipped {entry['id']}: {entry['why']}")
    if json_out:
        print(json.dumps(found))
    return found
