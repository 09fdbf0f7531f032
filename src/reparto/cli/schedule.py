"""`reparto schedule draw`: a schedule generated, lowered, proved and drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from reparto.cli.console import console
from reparto.errors import UserError
from reparto.schedule.check import check
from reparto.schedule.describe import describe
from reparto.schedule.draw import draw_text
from reparto.schedule.generate import generate
from reparto.schedule.lower import lower
from reparto.schedule.rules import check_request, default_chunks
from reparto.schedule.svg import draw_svg


def draw(
    *, name: str, stages: int, microbatches: int, chunks: int, svg: str | None, json_out: bool
) -> None:
    """The verb. `chunks=0` takes the schedule's own number."""
    chunks = chunks or (default_chunks(name) if stages > 1 else 1)
    check_request(name, pipeline=stages, chunks=chunks, num_microbatches=microbatches)
    schedule = generate(name, pipeline=stages, chunks=chunks, num_microbatches=microbatches)
    lowered = lower(schedule)
    report = check(lowered)
    out = console()
    print(draw_text(schedule, color=sys.stdout.isatty()))
    path = Path(svg or f"{name}.svg")
    try:
        path.write_text(draw_svg(schedule), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", where="--svg") from error
    out.print(
        f"checked: {report.num_actions} actions, {report.num_messages} messages, complete, in "
        f"order, no deadlock\npicture: {path}"
    )
    if json_out:
        print(json.dumps({**describe(schedule), "svg": str(path)}))
