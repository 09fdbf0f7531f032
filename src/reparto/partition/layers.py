"""Which layers stand on which pipeline stage: cut by cost, not by count.

The embedding costs bytes but no arithmetic and the head costs as much as many layers, so equal
counts make unequal stages, and the slowest stage sets the pace of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from reparto.errors import UserError


def cut_by_cost(costs: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Cut layers in `stages` consecutive non-empty runs so that the dearest run is cheapest.

    Returns `(first layer, number of layers)` per stage. Exact, by dynamic programming over
    (stage, layer): O(stages x layers^2) time. Among equal cuts the earliest stages take fewer
    layers, because they hold activations longest. Raises `UserError` with fewer layers than stages.
    """
    layers = len(costs)
    if stages < 1 or layers < stages:
        raise UserError(
            f"{layers} layers cannot be cut in {stages} pipeline stages",
            where="partition.pipeline",
            legal=f"1 to {layers} stages (pipeline x chunks)",
            nearest=f"pipeline={max(1, layers)}",
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    infinity = float("inf")
    # best[s][i]: the dearest run when layers i.. are cut in s runs
    best = [[infinity] * (layers + 1) for _ in range(stages + 1)]
    take = [[0] * (layers + 1) for _ in range(stages + 1)]
    best[0][layers] = 0.0
    for left in range(1, stages + 1):
        for first in range(layers - left, -1, -1):
            for stop in range(first + 1, layers - left + 2):
                run = prefix[stop] - prefix[first]
                worst = max(run, best[left - 1][stop])
                if worst < best[left][first]:
                    best[left][first] = worst
                    take[left][first] = stop
                if run > best[left][first]:
                    break
    cuts: list[tuple[int, int]] = []
    first = 0
    for left in range(stages, 0, -1):
        stop = take[left][first]
        cuts.append((first, stop - first))
        first = stop
    return tuple(cuts)
