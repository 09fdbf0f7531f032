"""The figures of a schedule as one JSON-able value, for `--json` and for reports."""

from __future__ import annotations

from reparto.schedule.actions import Schedule
from reparto.schedule.check import check
from reparto.schedule.timing import simulate

Json = str | int | float | bool | list[int] | list[float]


def describe(schedule: Schedule) -> dict[str, Json]:
    """Checks the schedule, plays it with F = B = W = 1 and free messages, and returns the figures.

    Raises `CheckFailed` for a schedule that does not hold. Lists have one number for each rank.
    Activations are counted in chunks; `full_activations` is the worst rank's peak as a number of
    microbatches of everything the rank owns, which can be compared between schedules.
    """
    report = check(schedule)
    timeline = simulate(report.schedule)
    live = [peaks.live for peaks in report.peaks]
    return {
        "name": schedule.name,
        "pipeline": schedule.num_ranks,
        "chunks": schedule.num_chunks,
        "num_microbatches": schedule.num_microbatches,
        "placement": schedule.placement.value,
        "num_actions": report.num_actions,
        "num_messages": report.num_messages,
        "step_slots": timeline.step_s,
        "bubble_share": timeline.bubble_share,
        "bubble_share_by_rank": list(timeline.bubble_share_by_rank),
        "inner_idle_slots": list(timeline.inner_idle_s),
        "peak_live_activations": live,
        "peak_live_until_backward": [peaks.until_backward for peaks in report.peaks],
        "peak_deferred_weights": [peaks.deferred for peaks in report.peaks],
        "full_activations": max(live) / schedule.num_chunks,
    }
