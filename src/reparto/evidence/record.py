"""The record that a stage leaves at its boundary: what it got, gave, decided and is unsure of.

One for each of the five stages, written by every run. Read forward they explain how a result came
about; read backward they lead from a wrong, slow, costly or unsafe result to the first stage whose
assumption did not hold. That only works if the uncomfortable fields are filled, so none of them
may be blank. Rejected: free-form notes, which nobody can check for what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Stage = Literal["partition", "compute", "communicate", "synchronize", "recover"]
STAGES: tuple[Stage, ...] = get_args(Stage)

#: text with something in it
Words = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
#: a quantity; its key says of what and in which unit
Amount = Annotated[int | float, Field(ge=0, allow_inf_nan=False)]


class Discarded(BaseModel):
    """An alternative that was considered and not taken."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: Words
    """The alternative, in the words in which it could be asked for."""

    reason: Words
    """Why not: a measured or computed number where there is one."""


class StageRecord(BaseModel):
    """What one stage of one run did, for the ledger line of kind `stage`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: Stage
    """Which of the five."""

    owner: Words
    """The component that decided: a module path."""

    person: Words
    """Who answers for it: the run's `owner`, or the guard's."""

    input: Words
    """What the stage was given."""

    output: Words
    """What it handed on."""

    test: Words
    """How its output is checked, and by what bound."""

    uncertainty: Words
    """What is estimated or assumed, and how far it may be off."""

    discarded: tuple[Discarded, ...] = ()
    """Alternatives not taken; empty only where there was no choice."""

    resources: dict[str, Amount] = Field(default_factory=dict)
    """What it used over the run; keys end in their unit (`compute_s`, `sent_bytes`, `tokens`)."""

    controls: tuple[Words, ...] = ()
    """Limits that were in force: a clip norm, a timeout, a digest check, a guard."""

    def body(self) -> dict[str, object]:
        """The record as JSON values."""
        return self.model_dump(mode="json")


def in_stage_order(records: Iterable[StageRecord]) -> tuple[StageRecord, ...]:
    """The five records of a run in the order of the stages.

    Raises `ValueError` naming a stage that has none or more than one.
    """
    found: dict[str, StageRecord] = {}
    for record in records:
        if record.stage in found:
            raise ValueError(f"stage {record.stage} has two records; a run writes one for each")
        found[record.stage] = record
    missing = [stage for stage in STAGES if stage not in found]
    if missing:
        raise ValueError(f"no record of stage {', '.join(missing)}; a run writes all five")
    return tuple(found[stage] for stage in STAGES)
