"""Which experts every token chose, compared between two plans before any number is.

A router turns scores into a choice, so a rounding in the last bit can send a token elsewhere where
two scores tie, and then everything after it differs for a reason that is no fault. Choices are
therefore compared first: a *flip* is a token and layer with other experts than the reference. It
counts as a departure unless the reference's scores tied to rounding at the place of the cut.

    T tokens that count   K experts a token
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reparto.comm.mesh import Mesh
from reparto.parallel.expert import Balance

#: distance of two scores, each between 0 and 1, that counts as a tie
TIES: Mapping[str, float] = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The choices of one layer, ordered by token number."""

    numbers_T: Tensor
    "number of each token in the data set"
    experts_TK: Tensor
    "its experts, ascending"
    margins_T: Tensor
    "how far the last chosen score lies above the first that was not"


def gather_routes(balance: Balance, mesh: Mesh) -> dict[int, Routes]:
    """Layer -> the choices of the whole batch. Every rank calls it; every rank gets all."""
    arrays: dict[str, np.ndarray] = {}
    for layer, noted in balance.routes().items():
        for index, (numbers, experts, margins) in enumerate(noted):
            arrays[f"{layer}/{index}/numbers"] = numbers.numpy()
            arrays[f"{layer}/{index}/experts"] = experts.numpy()
            arrays[f"{layer}/{index}/margins"] = margins.double().numpy()
    written = io.BytesIO()
    np.savez(written, **arrays)  # type: ignore[arg-type]  # its stubs want the flag beside names
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for text in mesh.world.exchange(written.getvalue(), tag="inspect routes"):
        with np.load(io.BytesIO(text), allow_pickle=False) as read:
            for key in (name for name in read.files if name.endswith("/numbers")):
                stem = key.removesuffix("numbers")
                parts = (torch.from_numpy(read[stem + what])
                         for what in ("numbers", "experts", "margins"))  # fmt: skip
                numbers, experts, margins = parts
                layer = int(stem.split("/")[0])
                found.setdefault(layer, []).append((numbers, experts, margins))
    return {layer: _ordered(parts) for layer, parts in sorted(found.items())}


def _ordered(parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Routes:
    numbers, experts, margins = (torch.cat(one) for one in zip(*parts, strict=True))
    order = numbers.argsort()
    return Routes(
        numbers_T=numbers[order],
        experts_TK=experts[order].sort(dim=-1).values,
        margins_T=margins[order],
    )


@dataclass(frozen=True, kw_only=True)
class Flips:
    """How the choices of one step differ from the reference's."""

    total: int
    "tokens and layers with other experts"
    untied: int
    "of those, where the scores did not tie"
    first_layer: int | None
    "the first layer, among those with experts, with an untied flip"


def compare_routes(
    found: Mapping[int, Routes], expected: Mapping[int, Routes], *, precision: str
) -> Flips:
    """`precision` is float64 or float32. Raises `ValueError` if the tokens are not the same."""
    total = untied = 0
    first: int | None = None
    for layer, theirs in expected.items():
        ours = found[layer]
        if not torch.equal(ours.numbers_T, theirs.numbers_T):
            raise ValueError(f"layer {layer}: the plans routed different tokens")
        other_T = (ours.experts_TK != theirs.experts_TK).any(-1)
        bad_T = other_T & (theirs.margins_T > TIES[precision])
        total += int(other_T.sum())
        untied += int(bad_T.sum())
        if first is None and bool(bad_T.any()):
            first = layer
    return Flips(total=total, untied=untied, first_layer=first)
