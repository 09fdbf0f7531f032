"""The few fitted numbers, and what each was fitted on (`data/constants.toml`).

Every constant is a share, a factor or a time of a *kind* of device or software, never of a run.
`prior` is what is known without the published runs (a data sheet, a microbenchmark); fitting moves
`value` away from it only as far as the runs insist (`calibrate`). A constant whose `spread` is 0
is physics or convention and is not fitted at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from reparto.config.cluster import read_toml
from reparto.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One number with its history."""

    value: float
    "what predictions use"
    prior: float
    "what was known before fitting"
    spread: float
    "how far it may reasonably lie from the prior, as a relative standard deviation; 0: fixed"
    about: str
    "what it is, and what it was fitted on"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """All of them, by name."""

    values: Mapping[str, float]
    "name -> value"

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def of(self, name: str, generation: str) -> float:
        """`name.generation`, or `name.other` where no run of that generation was seen."""
        found = self.values.get(f"{name}.{generation}")
        return self.values[f"{name}.other"] if found is None else found

    def replaced(self, changes: Mapping[str, float]) -> Constants:
        """The same with some values changed."""
        return Constants(values={**self.values, **changes})


def read_constants(path: Path | None = None) -> dict[str, Constant]:
    """The table of constants, the package's unless a file is named."""
    if path is None:
        source = resources.files("reparto.planner") / "data" / "constants.toml"
        with resources.as_file(source) as file:
            return read_constants(file)
    found: dict[str, Constant] = {}
    for name, row in read_toml(path, where=str(path)).items():
        if not isinstance(row, dict):
            raise UserError("is no table", where=f"{path}.{name}", legal="value, prior, spread")
        try:
            found[name] = Constant(
                value=float(row["value"]),
                prior=float(row["prior"]),
                spread=float(row["spread"]),
                about=str(row["about"]),
            )
        except KeyError as error:
            raise UserError("is missing", where=f"{path}.{name}.{error.args[0]}") from error
    return found


def shipped() -> Constants:
    """The constants as shipped."""
    return Constants(values={name: row.value for name, row in read_constants().items()})
