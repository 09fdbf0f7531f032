"""Whether a run that failed is started again, and from where. Pure.

Bounded by progress, not only by count: a run that gets further each time may fail often; one that
dies three times at the same step is not helped by a fourth try from the same checkpoint. Then it
goes back to an older one, once, and if that does not get it past the step either, it stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: tries that may end at the same step before something else is done
TRIES_WITHOUT_PROGRESS = 3


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One life of the workers that ended in a fault."""

    step: int
    "step in which it failed"
    saved: int
    "step of the newest checkpoint then; 0 if there is none"
    exit_code: int
    "2: a user's error, which no restart mends"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do next."""

    restart: bool
    before: int | None
    "take a checkpoint older than this step; None: the newest whole one"
    reason: str
    "for people"


def decide(attempts: Sequence[Attempt], *, max_restarts: int) -> Decision:
    """What to do after the last of `attempts`."""
    last = attempts[-1]
    if last.exit_code == 2:
        return Decision(restart=False, before=None, reason="the input is wrong")
    if len(attempts) > max_restarts:
        return Decision(
            restart=False,
            before=None,
            reason=f"{max_restarts} restart{'s' if max_restarts != 1 else ''} are used up"
            if max_restarts
            else "restarts are off (recover.max_restarts = 0)",
        )
    furthest = max(one.step for one in attempts)
    first_there = next(i for i, one in enumerate(attempts) if one.step == furthest)
    stuck = len(attempts) - first_there  # tries since the last one that got further
    if stuck >= 2 * TRIES_WITHOUT_PROGRESS:
        return Decision(
            restart=False,
            before=None,
            reason=f"no progress past step {furthest} in {stuck} tries, an older start included",
        )
    if stuck >= TRIES_WITHOUT_PROGRESS and last.saved:
        return Decision(
            restart=True,
            before=last.saved,
            reason=f"no progress past step {furthest} in {stuck} tries: an older checkpoint",
        )
    if stuck >= TRIES_WITHOUT_PROGRESS:
        return Decision(
            restart=False, before=None, reason=f"no progress past step {furthest} in {stuck} tries"
        )
    return Decision(restart=True, before=None, reason="from the newest whole checkpoint")
