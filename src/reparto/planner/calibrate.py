"""Fits the constants to published step times: `python -m reparto.planner.calibrate ROWS.csv`.

Maximum a posteriori in logarithms. For constants x with priors x0 and spreads u, and runs i of
sources s,

    minimise  sum_s (weight / n_s) sum_i huber(log(predicted / measured) / sigma)
              + sum_x (log(x / x0) / u)^2

so a source counts the same whether it printed two rows or two hundred, an odd row pulls with a
bounded force, and a constant that no run speaks about stays at its prior. Solved by Gauss-Newton
with a numerical Jacobian. With one Jacobian at the shipped constants, leaving a source out needs
only re-weighting and chord steps, which is what makes `leave_one_out` cheap enough to be printed
every time.

Rejected: a free factor per source or per run (it fits anything and predicts nothing), and boosted
trees on the residuals (better here, worse on the source left out).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reparto.planner.constants import Constant, Constants, read_constants
from reparto.planner.published import Run, Unusable, read_rows, run_of
from reparto.planner.step import Predictor

#: relative error that one run is expected to have; scales data against priors
SIGMA = 0.08
#: how many independent runs one source is worth at most
SOURCE_WEIGHT = 8.0
#: errors beyond this many sigma pull with constant force
HUBER = 1.0
_STEP = 0.02


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Log predictions of runs around a point, to first order."""

    names: tuple[str, ...]
    "constants that may move"
    point: tuple[float, ...]
    "their logarithms where the Jacobian was taken"
    jacobian: tuple[tuple[float, ...], ...]
    "d log(prediction) / d log(constant), a row a run"


def predict_s(run: Run, constants: Constants, cache: dict[object, Predictor]) -> float:
    """Seconds of a step; `cache` shares predictors between runs of one cluster."""
    key = run.job.cluster
    found = cache.get(key.name + str(key.tiers))
    if found is None:
        found = cache[key.name + str(key.tiers)] = Predictor(key, constants)
    return found.step(run.job).step_s


def logs(runs: Sequence[Run], constants: Constants) -> list[float]:
    """Logarithm of every predicted step time."""
    cache: dict[object, Predictor] = {}
    return [math.log(predict_s(run, constants, cache)) for run in runs]


def linearise(runs: Sequence[Run], table: Mapping[str, Constant], start: Constants) -> Linear:
    """The Jacobian at `start`, by forward differences."""
    names = tuple(name for name, row in table.items() if row.spread > 0)
    base = logs(runs, start)
    columns: list[list[float]] = []
    for name in names:
        moved = start.replaced({name: start[name] * math.exp(_STEP)})
        columns.append([(b - a) / _STEP for a, b in zip(base, logs(runs, moved), strict=True)])
    return Linear(
        names=names,
        point=tuple(math.log(start[name]) for name in names),
        jacobian=tuple(zip(*columns, strict=True)),
    )


def fit(
    runs: Sequence[Run],
    table: Mapping[str, Constant],
    start: Constants,
    *,
    linear: Linear | None = None,
    rounds: int = 6,
) -> Constants:
    """Fitted constants. With `linear` the Jacobian is kept (chord steps), else renewed."""
    measured = [math.log(run.step_s) for run in runs if run.step_s]
    assert len(measured) == len(runs), "only timed runs are fitted"
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.source] = counts.get(run.source, 0) + 1
    current = start
    for _ in range(rounds):
        here = linear or linearise(runs, table, current)
        errors = [p - m for p, m in zip(logs(runs, current), measured, strict=True)]
        weights = [
            min(SOURCE_WEIGHT, counts[run.source]) / counts[run.source] * _robust(error)
            for run, error in zip(runs, errors, strict=True)
        ]
        current, moved = _one_step(here, table, current, errors, weights)
        if moved < 2e-3:
            break
    return current


def _robust(error: float) -> float:
    """Weight that turns squares into Huber's loss, over sigma squared."""
    scaled = abs(error) / SIGMA
    return (1.0 if scaled <= HUBER else HUBER / scaled) / SIGMA**2


def _one_step(
    linear: Linear,
    table: Mapping[str, Constant],
    current: Constants,
    errors: Sequence[float],
    weights: Sequence[float],
) -> tuple[Constants, float]:
    names = linear.names
    size = len(names)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row, error, weight in zip(linear.jacobian, errors, weights, strict=True):
        for i in range(size):
            scaled = weight * row[i]
            if scaled:
                right[i] -= scaled * error
                line = matrix[i]
                for j in range(size):
                    line[j] += scaled * row[j]
    for i, name in enumerate(names):
        prior = table[name]
        precision = 1 / prior.spread**2
        matrix[i][i] += precision
        right[i] -= precision * math.log(current[name] / prior.prior)
    step = _solve(matrix, right)
    largest = max(abs(part) for part in step)
    scale = min(1.0, 0.4 / largest) if largest else 1.0
    changes = {
        name: min(current[name] * math.exp(scale * part), _ceiling(name))
        for name, part in zip(names, step, strict=True)
    }
    return current.replaced(changes), largest


def _ceiling(name: str) -> float:
    """Shares end at 1."""
    return 1.0 if name in ("tail", "overlap", "tensor_overlap", "memory") else math.inf


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss elimination with row pivots; the prior's diagonal keeps it regular."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            if factor:
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    found = [0.0] * size
    for i in range(size - 1, -1, -1):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found


def timed_runs(path: Path) -> list[Run]:
    """The runs of a table that print a step time."""
    found: list[Run] = []
    for row in read_rows(path):
        try:
            run = run_of(row)
        except Unusable:
            continue
        if run.step_s and not run.out_of_memory:
            found.append(run)
    return found


def write_constants(path: Path, table: Mapping[str, Constant], fitted: Constants) -> None:
    """The table with new values, in its own order."""
    lines = [
        "# One table a constant; refit `value` with",
        "# `python -m reparto.planner.calibrate ROWS.csv --write FILE`.",
    ]
    for name, row in table.items():
        lines += [
            "",
            f'["{name}"]',
            f"value = {fitted[name]:.5g}",
            f"prior = {row.prior:.5g}",
            f"spread = {row.spread:.5g}",
            f'about = "{row.about}"',
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of this module; prints prior, old and new value of every constant."""
    parser = argparse.ArgumentParser(prog="python -m reparto.planner.calibrate")
    parser.add_argument("rows", type=Path, help="table with the columns of published_runs.csv")
    parser.add_argument("--write", type=Path, help="write the fitted constants to this file")
    options = parser.parse_args(arguments)
    table = read_constants()
    old = Constants(values={name: row.value for name, row in table.items()})
    new = fit(timed_runs(options.rows), table, old, rounds=12)
    for name, row in table.items():
        print(f"{name:20s} prior {row.prior:10.4g}  was {row.value:10.4g}  fitted {new[name]:.4g}")
    if options.write:
        write_constants(options.write, table, new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
