"""How far a prediction may be off: an interval that says it holds four times in five.

The half widths come from the errors of sources that were left out of the fit (`validate`), because
the run that a user asks about was left out too. They are factors: as likely too slow as too fast.

| what is known | factor | measured on |
|---|---|---|
| dense model, generation with many published runs | 1.17 | 9 sources left out: 9 to 10 % off |
| experts, or a generation with few | 1.40 | 2 sources left out: 25 to 28 % |
| a generation of which no run was seen | 1.60 | nothing; a data sheet and a microbenchmark |
| a cluster file with measured curves | 1.12 | the machine itself, not the whole step |
"""

from __future__ import annotations

from reparto.planner.job import Job

MANY_RUNS = ("ampere", "hopper")
FEW_RUNS = ("blackwell",)


def factor(job: Job) -> float:
    """The interval's half width as a factor."""
    generation = job.cluster.accelerator.generation
    if job.cluster.measured is not None and job.cluster.measured.matmul:
        return 1.12
    if generation in MANY_RUNS and not job.model.experts:
        return 1.17
    return 1.40 if generation in MANY_RUNS + FEW_RUNS else 1.60


def interval(job: Job, seconds: float) -> tuple[float, float]:
    """(low, high) seconds of a step around a prediction."""
    wide = factor(job)
    return seconds / wide, seconds * wide
