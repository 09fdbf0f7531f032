"""`reparto plan`: what one plan puts where, or which plan is best, by arithmetic alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from reparto.cli.console import console
from reparto.config.model import ModelConfig, num_parameters, preset
from reparto.config.plan import Plan
from reparto.config.run import read_run
from reparto.errors import UserError
from reparto.partition.activations import decoder_flow
from reparto.partition.grid import Grid
from reparto.partition.legal import check_plan
from reparto.partition.show import RankView, decoder_map, view_rank
from reparto.partition.tokens import batch_slices
from reparto.units import human_bytes, human_count


def plan(
    *,
    show: str | None,
    model: str | None,
    cluster: str | None,
    validate: str | None,
    what_if: Sequence[str],
    rank: int | None,
    batch_size: int | None,
    sequence_length: int | None,
    objective: str,
    forbid: Sequence[str],
    precision: str,
    tokens: float | None,
    svg: str | None,
    settings: Sequence[str],
    json_out: bool,
) -> None:
    """The verb: one of --show, --validate, or a search with --model and --cluster."""
    asked = [name for name, given in (("--show", show), ("--validate", validate),
                                      ("--cluster", cluster)) if given]  # fmt: skip
    if len(asked) != 1:
        raise UserError(
            f"{' and '.join(asked)} do not go together" if asked else "nothing was asked",
            where="reparto plan",
            legal="--show PLAN, or --validate ROWS.csv, or --model M --cluster C",
            nearest="plan --model 10m --cluster h100x8",
        )
    if show is not None:
        _show(Plan.parse(show, where="--show"), model, rank, settings, json_out)
        return
    from reparto.cli.plan_search import search_plans, validate_rows

    if validate is not None:
        validate_rows(validate, json_out=json_out)
        return
    if model is None or cluster is None:
        raise UserError("is missing", where="--model", legal="a preset, a model name, config.json")
    search_plans(
        model=model,
        cluster=cluster,
        batch_size=batch_size,
        sequence_length=sequence_length,
        objective=objective,
        forbid=forbid,
        precision=precision,
        what_if=what_if,
        total_tokens=tokens,
        svg=Path(svg) if svg else None,
        json_out=json_out,
    )


def _show(
    plan: Plan, model_name: str | None, rank: int | None, settings: Sequence[str], json_out: bool
) -> None:
    run = read_run(None, settings=settings)
    model = _model(model_name) if model_name else run.model.resolved(run.data.vocab_size)
    batch_size = run.data.batch_size
    if not settings:  # nobody named a batch, so one that the plan can have
        batch_size = max(batch_size, plan.data * plan.num_microbatches)
    warnings = check_plan(
        plan, model=model, batch_size=batch_size, sequence_length=run.data.sequence_length
    )
    if rank is not None and not 0 <= rank < plan.world_size:
        raise UserError(
            f"rank {rank} of {plan.world_size}",
            where="--rank",
            legal=f"0 to {plan.world_size - 1}",
        )
    out = console()
    for warning in warnings:
        out.print(f"warning: {warning}", style="yellow")
    grid = Grid.of(plan)
    shown = [rank] if rank is not None else list(range(min(plan.world_size, 16)))
    sequences = batch_slices(batch_size, plan.data, plan.num_microbatches).sequences
    views = [
        decoder_view(
            plan,
            model,
            one,
            tokens=sequences * run.data.sequence_length,
            compute=run.compute.precision,
            master=run.compute.master,
        )
        for one in shown
    ]
    out.print(
        f"plan `{plan.text}` for {human_count(num_parameters(model))} parameters: "
        f"{plan.world_size} ranks = pipeline {plan.pipeline} x data {plan.data} x context "
        f"{plan.context} x tensor {plan.tensor}; {batch_size} sequences of "
        f"{run.data.sequence_length} tokens a step"
    )
    out.print(_ranks_table(views))
    out.print(_messages_table(views[0]))
    if rank is not None:
        out.print(_slices_table(views[0]))
    if len(shown) < plan.world_size and rank is None:
        out.print(f"{plan.world_size - len(shown)} more ranks; --rank R shows any one whole")
    if json_out:
        body = {
            "plan": plan.text,
            "world_size": plan.world_size,
            "grid": dict(zip(("pipeline", "replicas", "data", "context", "tensor"),
                             grid.shape, strict=True)),
            "parameters": num_parameters(model),
            "ranks": [view.as_dict() for view in views],
        }  # fmt: skip
        print(json.dumps(body))


def decoder_view(
    plan: Plan,
    model: ModelConfig,
    rank: int,
    *,
    tokens: int = 0,
    compute: str = "float32",
    master: str = "float32",
) -> RankView:
    """What one rank of a plan holds and sends of our decoder.

    `tokens` are those of one microbatch; 0 leaves activations out.
    """
    return view_rank(
        decoder_map(model),
        plan,
        rank,
        flow=decoder_flow(model, tokens=tokens) if tokens else None,
        compute_dtype=compute,
        master_dtype=master,
    )


def _model(name: str) -> ModelConfig:
    if not name.endswith(".json"):
        return preset(name)
    run = read_run(None, settings=[f'model.config="{Path(name)}"'])
    return run.model.resolved(1)


def _ranks_table(views: Sequence[RankView]) -> Table:
    table = Table(title="state a rank keeps", title_justify="left")
    for heading in ("rank", "place", "parameters", "gradients (peak)", "optimizer", "sum"):
        table.add_column(heading, justify="right" if heading != "place" else "left")
    for view in views:
        place = ", ".join(f"{axis} {at}" for axis, at in view.coordinates.items() if at) or "first"
        state = view.state
        table.add_row(
            str(view.rank), place, human_bytes(state.parameters), human_bytes(state.gradients),
            human_bytes(state.optimizer), human_bytes(state.total),
        )  # fmt: skip
    return table


def _messages_table(view: RankView) -> Table:
    table = Table(title=f"messages of rank {view.rank} in a step", title_justify="left")
    for heading in ("what", "operation", "group", "ranks", "times", "payload", "ideal wire"):
        left = heading in ("what", "operation", "group")
        table.add_column(heading, justify="left" if left else "right")
    for what, operation, group, size, count, payload, wire in view.message_sums():
        table.add_row(
            what, operation, group, str(size), str(count), human_bytes(payload), human_bytes(wire)
        )
    return table


def _slices_table(view: RankView) -> Table:
    table = Table(title=f"what rank {view.rank} owns", title_justify="left")
    for heading in ("parameter", "global shape", "rows owned", "elements"):
        table.add_column(heading, justify="right" if heading == "elements" else "left")
    for name, one in view.table.items():
        rows = "; ".join(
            "x".join(f"{a}..{b - 1}" for a, b in zip(box.start, box.stop, strict=True))
            for box in one.held
        )
        table.add_row(name, "x".join(map(str, one.shape)), rows or "none", str(one.held_numel))
    return table
