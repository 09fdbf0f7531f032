"""The same question with one thing changed: `remove=node`, `link.network=0.5`, `sequence=x2`.

Parts are joined by commas. Each is checked when it is read, so a wrong one is refused with the
words that would have been right.

| part | meaning |
|---|---|
| `remove=node`, `remove=8` | a node, or so many devices, are gone |
| `devices=256` | the cluster has so many devices |
| `link.NAME=0.5` | the tier NAME (node, rack, network) runs at so many times its rate |
| `sequence=x2`, `sequence=16384` | sequence length, by a factor or in tokens |
| `batch=x2`, `batch=512` | batch, by a factor or in sequences |
| `forbid=tensor` | the axis stays at 1; several joined by + |
| `objective=cost` | time, cost, energy or memory |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from reparto.config.cluster import Cluster
from reparto.errors import UserError, nearest_word

NEAREST = {
    "remove": "remove=node",
    "devices": "devices=8",
    "link": "link.network=0.5",
    "sequence": "sequence=x2",
    "batch": "batch=x2",
    "forbid": "forbid=pipeline",
    "objective": "objective=cost",
}
KEYS = tuple(NEAREST)
_WHERE = "--what-if"


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A change of the question; the default changes nothing."""

    remove: str = ""
    "`node`, or a number of devices"
    devices: int = 0
    "number of devices of the changed cluster; 0: unchanged"
    links: tuple[tuple[str, float], ...] = ()
    "(tier, factor on its rate)"
    sequence: str = ""
    "`x2` or a number of tokens"
    batch: str = ""
    "`x2` or a number of sequences"
    forbid: frozenset[str] = field(default_factory=frozenset)
    "axes that must not be used"
    objective: str = ""
    "another objective; empty: unchanged"

    def cluster(self, cluster: Cluster) -> Cluster:
        """The changed cluster. Raises `UserError` if nothing is left or a tier is unknown."""
        count = self.devices or cluster.count
        if self.remove:
            count -= cluster.tiers[0].size if self.remove == "node" else int(self.remove)
        if count < 1:
            raise UserError(
                f"no device is left of {cluster.count}", where=_WHERE, legal="remove fewer"
            )
        changed = cluster if count == cluster.count else cluster.resized(count)
        tiers = list(changed.tiers)
        for name, factor in self.links:
            names = [tier.name for tier in tiers]
            if name not in names:
                raise UserError(
                    f"no tier is called {name!r}",
                    where=_WHERE,
                    legal=", ".join(names),
                    nearest=f"link.{nearest_word(name, names) or names[-1]}={factor:g}",
                )
            at = names.index(name)
            tiers[at] = tiers[at].model_copy(update={"gb_s": tiers[at].gb_s * factor})
        return changed.model_copy(update={"tiers": tuple(tiers)})

    def sequence_length(self, tokens: int) -> int:
        """The changed sequence length."""
        return _scaled(self.sequence, tokens)

    def batch_size(self, sequences: int) -> int:
        """The changed batch."""
        return _scaled(self.batch, sequences)


def _scaled(text: str, value: int) -> int:
    if not text:
        return value
    if text.startswith("x"):
        return max(1, round(value * float(text[1:])))
    return int(text)


def parse_what_if(text: str) -> WhatIf:
    """A change from its text form. Raises `UserError` with what would be right."""
    found = WhatIf()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        name, _, tier = key.partition(".")
        if not equals or not value or name not in KEYS:
            near = nearest_word(name, KEYS) or "remove"
            raise UserError(
                f"`{part}` is no change",
                where=_WHERE,
                legal="remove=node, devices=N, link.NAME=F, sequence=x2, batch=x2, forbid=AXIS, "
                "objective=cost",
                nearest=NEAREST[near],
            )
        found = _with(found, part, name, tier, value)
    if found == WhatIf():
        raise UserError("is empty", where=_WHERE, legal="remove=node, sequence=x2, ...")
    return found


def _with(found: WhatIf, part: str, name: str, tier: str, value: str) -> WhatIf:
    if name == "link":
        if not tier or not re.fullmatch(r"\d+(\.\d+)?", value) or not 0 < float(value) <= 100:
            raise UserError(
                f"`{part}`", where=_WHERE, legal="link.NAME=FACTOR, 0 < FACTOR <= 100",
                nearest="link.network=0.5",
            )  # fmt: skip
        return replace(found, links=(*found.links, (tier, float(value))))
    if name == "forbid":
        return replace(found, forbid=found.forbid | frozenset(value.split("+")))
    if name == "objective":
        return replace(found, objective=value)
    if name == "remove":
        if value != "node" and not re.fullmatch(r"[1-9]\d*", value):
            raise UserError(f"`{part}`", where=_WHERE, legal="remove=node or a number of devices",
                            nearest="remove=node")  # fmt: skip
        return replace(found, remove=value)
    if name == "devices":
        if not re.fullmatch(r"[1-9]\d*", value):
            raise UserError(f"`{part}`", where=_WHERE, legal="a number of devices",
                            nearest="devices=8")  # fmt: skip
        return replace(found, devices=int(value))
    factor = re.fullmatch(r"x\d+(\.\d+)?|[1-9]\d*", value)
    if factor is None or (value.startswith("x") and float(value[1:]) <= 0):
        raise UserError(f"`{part}`", where=_WHERE, legal=f"{name}=x2 or a whole number",
                        nearest=f"{name}=x2")  # fmt: skip
    return replace(found, sequence=value) if name == "sequence" else replace(found, batch=value)
