"""`plan --show` of 16,384 ranks: the bytes of any of them, without a process."""

from __future__ import annotations

from math import prod

import pytest

from reparto.config.model import parameter_shapes, preset
from reparto.config.plan import Plan
from reparto.partition.grid import Grid
from reparto.partition.show import decoder_map, view_rank

CONFIG = preset("1b")
SHAPES = parameter_shapes(CONFIG)
PLAN = Plan.parse("data=128,tensor=8,pipeline=16")


def own_bytes(name: str) -> int:
    """Float32 bytes of one tensor on a tensor rank, from the model's shapes alone."""
    whole = prod(SHAPES[name])
    return 4 * (whole if name.endswith("norm.weight") else whole // PLAN.tensor)


def test_every_stage_and_some_ranks_of_each() -> None:
    model, grid = decoder_map(CONFIG), Grid.of(PLAN)
    assert grid.world_size == 16_384
    seen: list[str] = []
    copies = 0
    for stage in range(PLAN.pipeline):
        ranks = [stage * 1024 + offset for offset in (0, 1, 8 * 71 + 5, 1023)]
        views = [view_rank(model, PLAN, rank) for rank in ranks]
        assert all(dict(view.coordinates)["pipeline"] == stage for view in views)
        held = [name for name, one in views[0].table.items()
                if one.tied_to is None and one.held]  # fmt: skip
        seen += held
        # the head's copy of the tied table is held by the last stage, and owned by the first
        more = views[0].state.parameters - sum(map(own_bytes, held))
        assert more in (0, own_bytes("model.embed_tokens.weight"))
        copies += more > 0
        assert {view.state.parameters for view in views} == {views[0].state.parameters}
    assert sorted(seen) == sorted(SHAPES)
    assert copies == CONFIG.tie_word_embeddings


@pytest.mark.parametrize("rank", [0, 4_097, 16_383])
def test_sharded_ranks_hold_a_part_of_every_row(rank: int) -> None:
    plan = Plan.parse("data=128,shard=parameters,tensor=8,pipeline=16")
    model = decoder_map(CONFIG)
    whole, part = view_rank(model, PLAN, rank), view_rank(model, plan, rank)
    held = sum(
               sum(prod(box.size) for box in one.held)
               for one in part.table.values() if one.tied_to is None)  # fmt: skip
    assert 4 * held <= part.state.parameters < whole.state.parameters
