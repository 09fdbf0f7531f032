"""Looks: the table of plans, a memory bar for each pipeline stage, the timeline as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from rich.table import Table
from rich.text import Text

from reparto.planner.answer import PlanSearch, Ranked, describe
from reparto.planner.job import Job
from reparto.planner.memory import Memory, reserved_bytes, usable_bytes
from reparto.planner.simulate import simulate_step
from reparto.planner.step import Predictor
from reparto.schedule.svg import Language, draw_svg
from reparto.units import human_bytes, human_count, human_seconds

#: one colour for each kind of bytes, the same in every bar
COLOURS = {
    "weights": "blue",
    "gathered weights": "cyan",
    "gradients": "green",
    "optimizer": "yellow",
    "activations": "magenta",
    "logits": "red",
    "layer made again": "bright_black",
}
#: plans that the table shows
SHOWN = 8


def plan_table(search: PlanSearch) -> Table:
    """The best plans, the naive one, and how they compare."""
    best = search.best
    table = Table(
        title=f"{best.job.model.name} on {best.job.cluster.name}, by {search.objective}",
        caption=f"{search.searched} plans decided, {search.evaluated} timed, "
        f"{search.seconds:.1f} s; the interval holds four times in five",
    )
    table.add_column("plan", overflow="fold", ratio=1)
    for name in ("step", "interval", "tokens/s", "MFU", "memory", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in search.ranked[:SHOWN]:
        table.add_row(*_cells(entry))
    table.add_section()
    naive = search.naive
    words = f"{naive.step_s / best.step_s:.2f} x the best" if naive.fits else "does not fit"
    table.add_row(*_cells(naive, f"naive, {words}: "), style="" if naive.fits else "dim")
    return table


def _cells(entry: Ranked, before: str = "") -> list[str]:
    values = describe(entry)
    interval = values["step_s_interval"]
    exposed = values["exposed_share"]
    assert isinstance(interval, list) and isinstance(exposed, Mapping)
    idle = _number(values["bubble_share"]) + sum(exposed.values())
    return [
        before + entry.job.plan.text.replace(",", ", "),
        human_seconds(entry.step_s),
        f"{human_seconds(interval[0])} - {human_seconds(interval[1])}",
        human_count(_number(values["tokens_per_s"])),
        f"{100 * _number(values['mfu']):.0f} %",
        human_bytes(entry.memory.peak_bytes),
        f"{100 * idle:.1f} %",
    ]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def rejected_table(search: PlanSearch, rows: int = 12) -> Table:
    """Why the others fell."""
    table = Table(title="why the others fell")
    table.add_column("plans", justify="right")
    table.add_column("for instance")
    table.add_column("reason")
    for entry in search.rejected[:rows]:
        table.add_row(str(entry.plans or ""), entry.plan, entry.reason)
    return table


def memory_bars(job: Job, memory: Memory, width: int = 56) -> list[Text]:
    """One bar for each pipeline position; the mark is what the device can give."""
    usable = usable_bytes(job)
    whole = max(usable, reserved_bytes(memory.peak_bytes))
    lines: list[Text] = []
    for rank in memory.ranks:
        line = Text(f"stage {rank.pipeline_stage:>3} ")
        drawn = 0
        total = 0.0
        for name, size in rank.items:
            total += size
            until = round(width * total / whole)
            line.append("█" * (until - drawn), style=COLOURS.get(name, "white"))
            drawn = until
        mark = round(width * usable / whole)
        line.append("·" * max(0, mark - drawn), style="bright_black")
        line.append("▏" if drawn <= mark else "")
        needs = human_bytes(rank.total_bytes)
        line.append(f" {needs} of {human_bytes(usable)}; most: {rank.items[0][0]}")
        lines.append(line)
    return _folded(lines)


def _folded(lines: list[Text], most: int = 18) -> list[Text]:
    """Long pipelines: the first, the last, and those whose bar differs from their neighbour's."""
    if len(lines) <= most:
        return lines
    kept = [0, *(i for i, (a, b) in enumerate(pairwise(lines), 1) if a.plain[10:] != b.plain[10:])]
    chosen = sorted({*kept[:most], len(lines) - 1})
    return [lines[index] for index in chosen]


def legend() -> Text:
    """The colours of the bars."""
    line = Text()
    for name, colour in COLOURS.items():
        line.append("█ ", style=colour)
        line.append(f"{name}  ")
    return line


def timeline_svg(entry: Ranked, predictor: Predictor, *, language: Language = "en") -> str:
    """The plan's simulated step as an SVG document; few microbatches, or it cannot be read."""
    job = entry.job
    few = min(job.plan.num_microbatches, 3 * job.plan.pipeline)
    short = replace(
        job,
        plan=job.plan.model_copy(update={"num_microbatches": few}),
        batch_size=job.microbatch_size * job.plan.data * few,
    )
    return draw_svg(simulate_step(short, predictor).timeline, language=language)


def validation_table(found: Mapping[str, object]) -> Table:
    """The errors of a validation, by source, beside the constant-efficiency baseline."""
    table = Table(title="mean of |predicted / measured - 1| on published runs")
    for name in ("source", "rows", "time", "baseline", "left out", "its baseline", "memory"):
        table.add_column(name, justify="left" if name == "source" else "right")
    by_source = found["by_source"]
    assert isinstance(by_source, Mapping)
    kinds = ("time", "baseline", "leave_one_out", "leave_one_out_baseline", "memory")
    for source, views in by_source.items():
        rows = max(int(view["n"]) for view in views.values())
        table.add_row(source, str(rows), *(_pct(views.get(kind)) for kind in kinds))
    table.add_section()
    left = found.get("leave_one_out")
    base = left.get("baseline") if isinstance(left, Mapping) else None
    whole = (found["time"], found["baseline"], left, base, found["memory"])
    table.add_row("all, sources equal", str(found["taken"]), *map(_pct, whole))
    return table


def _pct(view: object) -> str:
    if not isinstance(view, Mapping) or view.get("mean_abs_pct") is None:
        return "-"
    return f"{view['mean_abs_pct']:.1f} %"
