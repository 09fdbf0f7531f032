"""How two things are compared on a noisy machine: interleaved, many rounds, only as ratios.

In every round each contestant makes the same steps on the same batches, one after another, in an
order that turns by one each round; a barrier stands before and after. The ratio of a round is taken
between neighbours in time, so slow minutes hit both. `aa` is ours against ours in the same run: the
width of what the machine alone does. A target holds when the median meets it and the lower quartile
is above aa's upper quartile less one percent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: the name of the second timing of ours in each round
AGAIN = "ours_again"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to do the work."""

    name: str
    step: Callable[[], None]
    "one optimizer step on the next batch"
    alone: bool = False
    "only rank 0 works, the others wait: a single process has the machine for itself"


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, as the JSON object has them."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def run_rounds(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    steps: int,
    barrier: Callable[[], None],
    rank: int,
    tell: Callable[[str], None],
) -> Mapping[str, list[float]]:
    """Seconds a step of every contestant in every round, measured between barriers.

    The first contestant is ours and is timed twice. One round beforehand warms up and is not kept.
    """
    ours = contestants[0]
    entries = [*contestants, Contestant(name=AGAIN, step=ours.step)]
    found: dict[str, list[float]] = {one.name: [] for one in entries}
    for number in range(rounds + 1):
        turn = number % len(entries)
        for one in [*entries[turn:], *entries[:turn]]:
            barrier()
            began = time.perf_counter()
            if not one.alone or rank == 0:
                for _ in range(steps):
                    one.step()
            barrier()
            if number:
                found[one.name].append((time.perf_counter() - began) / steps)
        tell(f"round {number} of {rounds}")
    return found


def ratios(
    seconds: Mapping[str, Sequence[float]], *, scale: Mapping[str, float]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """`(peer -> ratio of the peer's seconds to ours, aa)`; above 1 is better for us.

    scale  peer -> factor on its seconds, where it does another amount of work
    """
    ours = seconds["ours"]
    found = {
        name: quartiles([scale.get(name, 1.0) * b / a for a, b in zip(ours, values, strict=True)])
        for name, values in seconds.items()
        if name not in ("ours", AGAIN)
    }
    aa = quartiles([b / a for a, b in zip(ours, seconds[AGAIN], strict=True)])
    return found, aa
