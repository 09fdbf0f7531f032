"""The grid as text: ranks are rows; time slots, or positions in the lists, are columns.

`draw_text` shows *when* things happen and needs a schedule that can run; `draw_lists` shows *what
stands where* and works for a broken one, with the wrong row marked. Pictures: `svg`.
"""

from __future__ import annotations

from collections.abc import Sequence

from reparto.schedule.actions import Action, Op, Schedule
from reparto.schedule.timing import Timeline, simulate

_IDLE = "·"
_ANSI = {Op.F: "\x1b[44;97m", Op.B: "\x1b[43;30m", Op.W: "\x1b[42;30m"}
_ANSI_OFF = "\x1b[0m"
_BESIDE = 6  # ranks shown above and below the wrong row
_AROUND = 5  # positions shown before and after the wrong one


def draw_text(what: Schedule | Timeline, *, width: int = 120, color: bool = False) -> str:
    """The grid of a schedule with F = B = W = 1 and free messages, or of a timeline.

    A column is one slot: 1 for a schedule, the shortest action for a timeline, whose longer actions
    then cover several columns. Long steps continue in bands of `width` characters. `color` adds
    terminal colours, which do not count as width.
    """
    timeline = simulate(what) if isinstance(what, Schedule) else what
    schedule = timeline.schedule
    spans = [timeline.computing(rank) for rank in range(schedule.num_ranks)]
    slot_s = min(
        (end - start for row in spans for _, start, end in row if end > start), default=1.0
    )
    num_slots = round(timeline.step_s / slot_s)
    grid: list[list[Action | None]] = [[None] * num_slots for _ in spans]
    first: list[set[int]] = [set() for _ in spans]
    for rank, row in enumerate(spans):
        for action, start, end in row:
            begin = min(round(start / slot_s), num_slots - 1)
            first[rank].add(begin)
            for slot in range(begin, max(begin + 1, round(end / slot_s))):
                grid[rank][min(slot, num_slots - 1)] = action

    cell = 1 + max((len(_label(schedule, a)) for row in grid for a in row if a), default=1)
    margin = len(f"rank {schedule.num_ranks - 1} ")
    band = max(1, (width - margin) // cell)
    lines = [caption(timeline), _legend(schedule)]
    for begin in range(0, num_slots, band):
        end = min(begin + band, num_slots)
        lines += ["", " " * margin + _ruler(begin, end, cell)]
        for rank, cells in enumerate(grid):
            texts = []
            for slot in range(begin, end):
                here = cells[slot]
                label = _IDLE
                if here is not None:
                    label = _label(schedule, here) if slot in first[rank] else "-" * (cell - 1)
                padded = label.ljust(cell)
                if color and here is not None:
                    padded = f"{_ANSI[here.op]}{padded[:-1]}{_ANSI_OFF} "
                texts.append(padded)
            lines.append(f"rank {rank}".ljust(margin) + "".join(texts).rstrip())
    return "\n".join(lines) + "\n"


def caption(timeline: Timeline) -> str:
    """One line of figures: shape, length, bubble, peak live activations."""
    schedule = timeline.schedule
    live = max(peaks.live for peaks in timeline.peaks)
    return (
        f"{schedule.name}: {schedule.num_ranks} x {schedule.num_chunks} stages, "
        f"{schedule.num_microbatches} microbatches; step {timeline.step_s:g}, "
        f"bubble {100 * timeline.bubble_share:.1f} %, "
        f"live activations at most {live:g} of {schedule.num_chunks * schedule.num_microbatches}"
    )


def _legend(schedule: Schedule) -> str:
    example = "F0 is microbatch 0"
    if schedule.num_chunks > 1:
        example = f"{schedule.num_ranks}F0 is stage {schedule.num_ranks}, microbatch 0"
    return f"F forward, B input gradient, W weight gradient, {_IDLE} idle; {example}"


def _label(schedule: Schedule, action: Action) -> str:
    """Without the stage where it is the row's number anyway."""
    return str(action) if schedule.num_chunks > 1 else f"{action.op.value}{action.microbatch}"


def _ruler(begin: int, end: int, cell: int) -> str:
    every = 5 if cell * 5 > len(str(end)) else 10
    marks = (str(slot) if slot % every == 0 else "" for slot in range(begin, end))
    return "".join(mark.ljust(cell) for mark in marks).rstrip()


def draw_lists(schedule: Schedule, *, rank: int, position: int | None) -> str:
    """The lists around one position, the row of `rank` marked `>` and the position bracketed.

    Columns are positions in the lists, not times. `position=None` marks the row only.
    """
    centre = position or 0
    rows = range(max(0, rank - _BESIDE), min(len(schedule.ranks), rank + _BESIDE + 1))
    columns = range(max(0, centre - _AROUND), centre + _AROUND + 1)
    cell = 3 + max(len(_at(schedule.ranks[row], column)) for row in rows for column in columns)
    margin = len(f"> rank {len(schedule.ranks) - 1} ")
    lines = [" " * (margin + 1) + "".join(str(column).ljust(cell) for column in columns).rstrip()]
    for row in rows:
        texts = []
        for column in columns:
            text = _at(schedule.ranks[row], column)
            here = row == rank and column == position
            texts.append((f"[{text}]" if here else f" {text} ").ljust(cell))
        mark = ">" if row == rank else " "
        lines.append(f"{mark} rank {row}".ljust(margin) + "".join(texts).rstrip())
    hidden = len(schedule.ranks) - len(rows)
    if hidden:
        lines.append(f"  ({hidden} more ranks)")
    return "\n".join(lines)


def _at(row: Sequence[Action], column: int) -> str:
    return str(row[column]) if column < len(row) else ""
