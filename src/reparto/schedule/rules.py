"""Which requests for a schedule are legal, and the nearest legal one.

Any number of microbatches is legal for every schedule, also fewer than stages and numbers that the
pipeline does not divide: the generators handle them, at the price of a larger bubble. The only
arithmetic limit is the number of chunks, because a V needs exactly two passes over the ranks and
interleaving needs more than one. With `pipeline=1` every schedule is plain gradient accumulation,
and one chunk is legal for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from reparto.errors import UserError, nearest_word


@dataclass(frozen=True, kw_only=True)
class ChunkRule:
    """How many virtual stages a rank may own under a schedule."""

    least: int
    """Smallest legal number of chunks; also what a plan gets that names none."""
    most: int | None
    """Largest legal number, or None for no limit but the number of layers."""

    def __contains__(self, chunks: object) -> bool:
        return isinstance(chunks, int) and self.nearest(chunks) == chunks

    def nearest(self, chunks: int) -> int:
        """The legal number closest to `chunks`."""
        at_least = max(chunks, self.least)
        return at_least if self.most is None else min(at_least, self.most)

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} or more"
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


_ONE = ChunkRule(least=1, most=1)
_TWO = ChunkRule(least=2, most=2)
_RULES = MappingProxyType(
    {
        "gpipe": _ONE,
        "1f1b": _ONE,
        "interleaved": ChunkRule(least=2, most=None),
        "zb-h1": _ONE,
        "zb-v": _TWO,
        "dualpipe-v": _TWO,
    }
)

#: the schedules that `generate` knows, in the order in which people meet them
NAMES = tuple(_RULES)


def legal_chunks(name: str) -> ChunkRule:
    """The rule for one schedule; `4 in legal_chunks("zb-v")` is False. Raises `UserError`."""
    if name not in _RULES:
        likely = nearest_word(name, NAMES)
        raise UserError(
            f"no schedule is named {name!r}",
            where="schedule",
            legal=", ".join(NAMES),
            nearest=f"schedule={likely}" if likely else "",
        )
    return _RULES[name]


def default_chunks(name: str) -> int:
    """Chunks of a plan that names a schedule and no number of chunks."""
    return legal_chunks(name).least


def check_request(name: str, *, pipeline: int, chunks: int, num_microbatches: int) -> None:
    """Raises `UserError` with field, legal values and nearest legal value, or returns."""
    rule = legal_chunks(name)
    for field, value in (("pipeline", pipeline), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise UserError(
                f"{field}={value}", where=field, legal="1 or more", nearest=f"{field}=1"
            )
    if chunks in rule or (pipeline == 1 and chunks == 1):
        return
    nearest = f"chunks={rule.nearest(chunks)}"
    if chunks > 1 and rule is _ONE:
        nearest += f", or schedule=interleaved with chunks={chunks}"
    raise UserError(
        f"schedule={name} cannot have chunks={chunks}",
        where="chunks",
        legal=f"{rule} for {name}" + (", or 1 with pipeline=1" if pipeline == 1 else ""),
        nearest=nearest,
    )
