"""Expert parallelism as index arithmetic: which experts a rank holds.

The expert axis adds no ranks. It takes the fastest part of data x context: `expert` neighbours of a
shard group hold different experts, and every rank that many places further on holds the same ones.
Experts are given out in equal runs, so that rows sorted by expert are sorted by rank as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from reparto.config.plan import Plan
from reparto.errors import UserError

#: beginning of the names of the groups in which experts are reduced and gathered
EXPERT_GROUPS = "expert_"

#: the axis along which ranks hold the same experts, where `data` and `context` do not say
EXPERT_COPIES = "expert_shard"


def expert_numbers(
    rules: Mapping[str, str] | None, names: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """Parameter name -> (number of its expert, experts of its layer), by rules of style `experts`.

    Empty for a model without experts.
    """
    patterns = [
        pattern.split(".") for pattern, style in (rules or {}).items() if style == "experts"
    ]
    if not patterns:
        return {}
    found: dict[str, tuple[str, int]] = {}
    sizes: dict[str, int] = {}
    for name in names:
        elements = name.split(".")
        for wanted in patterns:
            depth = len(wanted)
            if len(elements) <= depth or not elements[depth].isdecimal():
                continue
            if all(w in ("*", e) for w, e in zip(wanted, elements, strict=False)):
                path, number = ".".join(elements[:depth]), int(elements[depth])
                found[name] = (path, number)
                sizes[path] = max(sizes.get(path, 0), number + 1)
    return {name: (number, sizes[path]) for name, (path, number) in found.items()}


def elsewhere(numbers: Mapping[str, tuple[int, int]], plan: Plan, index: int) -> frozenset[str]:
    """Parameters of experts that place `index` of an expert group does not hold.

    Raises `UserError` for a model without experts, and for a number of them that does not divide.
    """
    if plan.expert == 1:
        return frozenset()
    if not numbers:
        raise UserError(
            f"expert={plan.expert} shares out experts, and this model has none",
            where="partition.expert",
            legal="1, or a model with experts",
            nearest=plan.model_copy(update={"expert": 1}).text,
        )
    for _, experts in numbers.values():
        if experts % plan.expert:
            legal = [n for n in range(1, experts + 1) if experts % n == 0]
            raise UserError(
                f"expert={plan.expert} does not divide {experts} experts",
                where="partition.expert",
                legal=", ".join(map(str, legal)),
                nearest=f"expert={min(legal, key=lambda n: abs(n - plan.expert))}",
            )
    return frozenset(
        name
        for name, (number, experts) in numbers.items()
        if number // (experts // plan.expert) != index
    )
