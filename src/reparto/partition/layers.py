"""Which layers stand on which pipeline stage: cut by cost, not by count.

The embedding costs bytes but no arithmetic and the head costs as much as many layers, so equal
counts make unequal stages, and the slowest stage sets the pace of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from reparto.config.model import ModelConfig
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


def decoder_costs(config: ModelConfig, *, sequence_length: int) -> tuple[float, ...]:
    """FLOPs a token in forward of every block: embedding, layers, final norm, head.

    2 a weight of every matmul, and 2 S H C for causal attention (half of each of two S x C
    products a head). Backward costs twice that in every block, so the proportions are the same.
    Norm and embedding are given the few operations an element that they need, so that they are
    cheap but not free.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    matmuls = 2 * (hidden * (heads + 2 * keys) + heads * hidden + 3 * hidden * inner)
    layer = matmuls + 2 * sequence_length * heads + 8 * hidden
    ends = float(4 * hidden)
    return (ends, *[float(layer)] * config.num_hidden_layers, ends,
            float(2 * hidden * config.vocab_size))  # fmt: skip
