"""Which layers stand on which pipeline stage: cut by cost, not by count.

The embedding costs bytes but no arithmetic and the head costs as much as many layers, so equal
counts make unequal stages, and the slowest stage sets the pace of all. Where a rank owns several
stages the slowest *rank* does: a step lasts at least as long as it takes to do all its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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


def pipeline_cuts(
    costs: Sequence[float], owners: Sequence[int], num_microbatches: int
) -> tuple[tuple[int, int], ...]:
    """`(first layer, number of layers)` of every stage of a pipeline; `owners` are their ranks."""
    cuts = cut_by_cost(costs, len(owners))
    if len(set(owners)) == len(owners):
        return cuts
    return even_out_ranks(costs, cuts, owners, num_microbatches=num_microbatches)


def even_out_ranks(
    costs: Sequence[float],
    cuts: Sequence[tuple[int, int]],
    owners: Sequence[int],
    *,
    num_microbatches: int,
) -> tuple[tuple[int, int], ...]:
    """Move layers between stages while that makes the step shorter.

    `owners[s]` is the rank that owns stage s. The step is taken as num_microbatches times all that
    the busiest rank does for one, plus one passage through the dearest stage, in which others wait.
    A move takes one layer from a stage and hands it on, from stage to stage, to another. Over 600
    random models of 6 to 10 layers, loops and V's of 2 and 3 ranks, the result is 0.1 % above the
    best of all cuts (at worst 3 %); the cut by stages alone is 5 to 8 % above (at worst 42 %).

    Rejected: simulating every candidate, which is up to 5 % better and takes half a second for
    one with 64 stages and 512 microbatches.
    """
    layers, stages = len(costs), len(cuts)
    best = [first for first, _ in cuts] + [layers]

    def load(edges: Sequence[int]) -> tuple[list[float], list[float]]:
        of_stage = [sum(costs[a:b]) for a, b in pairwise(edges)]
        of_rank = [0.0] * (max(owners) + 1)
        for stage, cost in enumerate(of_stage):
            of_rank[owners[stage]] += cost
        return of_stage, of_rank

    def weight(edges: Sequence[int]) -> tuple[float, float]:
        of_stage, of_rank = load(edges)
        step = num_microbatches * max(of_rank) + max(of_stage)
        return round(step, 6), sum(one * one for one in of_stage)

    least = weight(best)
    while True:
        of_stage, of_rank = load(best)
        busiest = of_rank.index(max(of_rank))
        givers = [stage for stage in range(stages)
                  if owners[stage] == busiest or of_stage[stage] == max(of_stage)]  # fmt: skip
        moves = []
        for giver in givers:
            for taker in range(stages):
                if taker == giver or best[giver + 1] - best[giver] == 1:
                    continue
                moved = list(best)
                step = 1 if taker < giver else -1
                for edge in range(min(giver, taker) + 1, max(giver, taker) + 1):
                    moved[edge] += step
                moves.append((weight(moved), moved))
        if not moves or min(moves)[0] >= least:
            return tuple((a, b - a) for a, b in pairwise(best))
        least, best = min(moves)


def decoder_costs(config: ModelConfig, *, sequence_length: int) -> tuple[float, ...]:
    """FLOPs a token in forward of every block: embedding, layers, final norm, head.

    2 a weight of every matmul that a token meets (experts: those that it is sent to), and 2 S H C
    for causal attention (half of each of two S x C products a head). Backward costs twice that in
    every block, so the proportions are the same. Norm and embedding are given the few operations an
    element that they need, so that they are cheap but not free.
    """
    hidden = config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention = 2 * (hidden * (heads + 2 * keys) + heads * hidden)
    attention += 2 * sequence_length * heads + 8 * hidden
    dense = 6 * hidden * config.intermediate_size
    met = config.num_experts_per_tok + config.n_shared_experts
    routed = 6 * hidden * config.expert_size * met + 2 * hidden * config.num_experts
    layers = [
        float(attention + (routed if config.has_experts(index) else dense))
        for index in range(config.num_hidden_layers)
    ]
    ends = float(4 * hidden)
    return (ends, *layers, ends, float(2 * hidden * config.vocab_size))
