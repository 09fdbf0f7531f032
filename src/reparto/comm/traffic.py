"""Bytes by group and by what carried them, read from one rank's record.

`memory` is one host's memory, `network` is whatever torch's process groups use. A group counts as a
whole: one with members on two hosts is `network` for every message, also where two members share a
host. That is an upper bound of what crosses between hosts, and exact for groups of two.

Counting in every collective was rejected: the ring has it all already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reparto.trace import Kind, Record


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one group sent in a step, over all ranks that tell of it."""

    group: str
    "name of the communicator: tensor, pipeline, reduce, ..."
    link: str
    "memory or network"
    messages: float
    "collectives and messages a step"
    payload_bytes: float
    "the larger of input and output of each, summed, a step"

    def as_dict(self) -> dict[str, object]:
        """JSON values."""
        return dict(vars(self))


def traffic(records: Sequence[Record], groups: Mapping[int, tuple[str, str]]) -> list[Traffic]:
    """Means over the training steps that the record still holds whole.

    groups  number of a group in the record -> (name, link)

    Evaluation and checkpoints are left out: they are not part of a step. A step whose oldest
    records may have been overwritten is left out as well.
    """
    aside = [
        (one.start_ns, one.end_ns) for one in records if one.kind in (Kind.EVALUATE, Kind.SAVE)
    ]
    first = 1 if not records or records[0].sequence == 0 else records[0].step + 1
    steps: set[int] = set()
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in records:
        if one.kind is not Kind.COLLECTIVE or one.step < first or one.tag in _OUTSIDE:
            continue
        if any(start <= one.start_ns <= end for start, end in aside):
            continue
        steps.add(one.step)
        key = groups[one.group]
        messages, payload = sums.get(key, (0, 0))
        sums[key] = (messages + 1, payload + one.payload_bytes)
    return [
        Traffic(
            group=name, link=link, messages=messages / len(steps), payload_bytes=size / len(steps)
        )
        for (name, link), (messages, size) in sums.items()
    ]


#: tags of what a worker does after its last step
_OUTSIDE = ("end",)


def over_ranks(told: Iterable[Iterable[Traffic]]) -> list[Traffic]:
    """Sums over ranks, largest first."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for rank in told:
        for one in rank:
            messages, payload = sums.get((one.group, one.link), (0.0, 0.0))
            sums[one.group, one.link] = (messages + one.messages, payload + one.payload_bytes)
    rows = [
        Traffic(group=group, link=link, messages=messages, payload_bytes=payload)
        for (group, link), (messages, payload) in sums.items()
    ]
    return sorted(rows, key=lambda one: -one.payload_bytes)
