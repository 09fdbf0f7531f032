"""How many activations a rank holds, which decides whether a schedule fits in memory.

An activation of a stage and microbatch is *live* from its F until its W ends: B needs what F saved,
and W needs the inputs of the matmuls, which are most of it. Two narrower counts stand beside it:
*until B* (what would be held if W needed nothing, the count of papers that never split the
backward), and *deferred*: weight gradients whose B is done and whose W is not, each holding one
(input, output gradient) pair for every linear layer. Under recomputation that pair is all that is
held, and the input in it is the recomputed one, so there `deferred` counts tensors that `live`
hides.

All three follow from the order of a rank's own list. Times do not matter, so the counts are exact
for any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reparto.schedule.actions import Action, Op, Schedule


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak counts of one rank in one step, or peak sums where sizes were given."""

    live: float
    """From F until W; chunks, or the unit of `sizes`."""
    until_backward: float
    """From F until B."""
    deferred: float
    """From B until W. The peaks need not fall on the same moment."""


def peaks(row: Iterable[Action], sizes: Sequence[float] | None = None) -> Peaks:
    """The peaks of one rank's list.

    `sizes[stage]`: what one live activation of each virtual stage weighs, for instance bytes;
    without it each counts 1.
    """
    live: float = 0
    deferred: float = 0
    most_live: float = 0
    most_until_backward: float = 0
    most_deferred: float = 0
    for action in row:
        size: float = 1 if sizes is None else sizes[action.pipeline_stage]
        if action.op is Op.F:
            live += size
            most_live = max(most_live, live)
            most_until_backward = max(most_until_backward, live - deferred)
        elif action.op is Op.B:
            deferred += size
            most_deferred = max(most_deferred, deferred)
        elif action.op is Op.W:
            live -= size
            deferred -= size
    return Peaks(live=most_live, until_backward=most_until_backward, deferred=most_deferred)


def peaks_by_rank(schedule: Schedule, sizes: Sequence[float] | None = None) -> tuple[Peaks, ...]:
    """`peaks` of every rank."""
    return tuple(peaks(row, sizes) for row in schedule.ranks)
