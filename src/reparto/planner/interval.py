"""How far a prediction may be off: an interval that says it holds four times in five."""

from __future__ import annotations

from reparto.planner.job import Job


def interval(job: Job, seconds: float) -> tuple[float, float]:
    """(low, high) seconds of a step around a prediction."""
    return seconds / 1.15, seconds * 1.15
