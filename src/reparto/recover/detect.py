"""From exit codes, last words and rings of all ranks to one cause. Pure.

When one rank dies, the others fail too, with texts that name an address at best. The cause is the
rank that was killed, or else the earliest error that is not the loss of a peer; everything else is
folded under it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reparto.trace import Kind, Record, State, last_unfinished

Rings = Mapping[int, tuple[int, int, Sequence[Record]]]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What one rank died of."""

    rank: int
    step: int
    "optimizer step it was in, 0 before the first"
    doing: str
    "what it was doing last, from its ring"
    message: str
    "for people"
    exit_code: int
    "status reparto should end with: 2 for a user's error, 4 for a fault"
    secondary: bool
    "whether it only lost a peer"
    where: Mapping[str, str]
    "fields of a user's error, empty otherwise"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How all workers ended."""

    failures: tuple[Failure, ...]
    "the cause first; empty when all ended well"

    @property
    def ok(self) -> bool:
        return not self.failures


def describe(
    exits: Mapping[int, int], errors: Mapping[int, Mapping[str, object]], rings: Rings
) -> tuple[Failure, ...]:
    """Failures of all ranks that failed, the cause first.

    exits   rank -> exit code; negative is a signal
    errors  rank -> last words: kind, message, exit_code, secondary, time_s, where
    rings   rank -> what `trace.read_ring` returns
    """
    found: list[tuple[tuple[int, float], Failure]] = []
    for rank in sorted(exits.keys() | errors.keys()):
        step, doing = _last(rings.get(rank))
        code = exits.get(rank, 0)
        words = errors.get(rank)
        if words is None:
            if code >= 0 or code == -signal.SIGTERM:
                # ended by us after another failed, or without a word
                order = (2, float("inf"))
            else:
                order = (0, 0.0)
            failure = Failure(
                rank=rank, step=step, doing=doing, message=_exit_words(code), exit_code=4,
                secondary=code == -signal.SIGTERM, where={},
            )  # fmt: skip
        else:
            secondary = bool(words.get("secondary"))
            order = (1 + secondary, float(str(words.get("time_s", 0.0))))
            where = words.get("where")
            failure = Failure(
                rank=rank, step=step, doing=doing, message=str(words["message"]),
                exit_code=int(str(words.get("exit_code", 4))), secondary=secondary,
                where={str(k): str(v) for k, v in where.items()} if isinstance(where, dict) else {},
            )  # fmt: skip
        found.append((order, failure))
    found.sort(key=lambda pair: pair[0])
    return tuple(failure for _, failure in found)


def _exit_words(code: int) -> str:
    if code >= 0:
        return f"ended with status {code} and left no message; see its log"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else "unknown"
    hint = "; probably out of memory, or killed by hand" if -code == signal.SIGKILL else ""
    return f"was killed (signal {-code}, {name}){hint}"


def _last(ring: tuple[int, int, Sequence[Record]] | None) -> tuple[int, str]:
    if ring is None:
        return 0, "starting"
    _, step, records = ring
    open_record = last_unfinished(records)
    if open_record is not None:
        return step, _words(open_record)
    if records:
        return step, f"after {_words(records[-1])}"
    return step, "starting"


def _words(record: Record) -> str:
    if record.kind is Kind.COLLECTIVE:
        return f"{record.op.name.lower()} `{record.tag}` (collective {record.sequence})"
    names = {
        Kind.ACTION: "action", Kind.UNSHARD: "unshard", Kind.REDUCE: "reduce",
        Kind.DATA_WAIT: "waiting for data", Kind.OPTIMIZER: "update", Kind.SAVE: "save",
        Kind.EVALUATE: "evaluation", Kind.STEP: "step", Kind.RESHARD: "reshard",
    }  # fmt: skip
    state = "" if record.state is State.DONE else "in "
    return f"{state}{names.get(record.kind, 'work')} `{record.tag}`"


def first_difference(rings: Rings, step: int) -> str:
    """Where the collectives of two ranks in one step first depart; empty if they do not.

    Compares digests of operation, group, shape, dtype and tag in order of issue.
    """
    rows = {
        rank: [r for r in records if r.step == step and r.kind is Kind.COLLECTIVE and r.digest]
        for rank, (_, _, records) in rings.items()
    }
    ranks = sorted(rows)
    for rank in ranks[1:]:
        for index in range(max(len(rows[ranks[0]]), len(rows[rank]))):
            pair = [rows[one][index] if index < len(rows[one]) else None
                    for one in (ranks[0], rank)]  # fmt: skip
            first, second = pair
            if first is not None and second is not None and first.digest == second.digest:
                continue
            told = [f"rank {one}: {_words(r) if r else 'nothing'}"
                    for one, r in zip((ranks[0], rank), pair, strict=True)]  # fmt: skip
            return f"step {step}, collective {index} of the step: {'; '.join(told)}"
    return ""
