"""Equal copies write each tensor once, in turn, and about evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reparto.checkpoint.share import share_out, writes
from reparto.checkpoint.tiling import tiles
from reparto.config.model import decays, parameter_shapes, preset
from reparto.config.plan import Plan
from reparto.partition.grid import AXES, Grid
from reparto.partition.tensors import Placement, initial_table, shard_rows


@given(st.dictionaries(st.text("abc.", min_size=1), st.integers(0, 1000)), st.integers(1, 9))
def test_each_name_goes_to_one_copy_and_no_copy_is_laden_by_more_than_one_tensor_too_much(
    sizes: dict[str, int], copies: int
) -> None:
    chosen = share_out(sizes, copies)
    assert chosen.keys() == sizes.keys()
    load = [sum(size for name, size in sizes.items() if chosen[name] == i) for i in range(copies)]
    assert max(load) - min(load) <= max(sizes.values(), default=0)


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_a_decoder_is_shared_out_within_five_percent(copies: int) -> None:
    shapes = parameter_shapes(preset("50m"))
    sizes = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in shapes.items()}
    chosen = share_out(sizes, copies)
    load = [sum(sizes[n] for n in sizes if chosen[n] == i) for i in range(copies)]
    assert max(load) <= 1.05 * sum(load) / copies


def tables(
    plan: Plan, shapes: dict[str, tuple[int, ...]]
) -> tuple[Grid, list[dict[str, Placement]]]:
    """What each rank holds when rows are cut over `data` and `context` inside a replica."""
    grid = Grid.of(plan)
    base = initial_table(shapes, decays={name: decays(name) for name in shapes}, axes=AXES)
    found = []
    for rank in range(grid.world_size):
        here = grid.coordinates(rank)
        index = here["data"] * grid.context + here["context"]
        table = {}
        for name, one in base.items():
            held = shard_rows(one.held[0], plan.num_shards, index)
            axes = tuple(axis for axis in one.replicated_over if axis not in ("data", "context"))
            table[name] = one.with_(held=held, replicated_over=axes)
        table["alias"] = table["a"].with_(name="alias", tied_to="a")
        found.append(table)
    return grid, found


@pytest.mark.parametrize(
    "text", ["data=4,shard=parameters", "data=4,replicas=2,shard=parameters",
             "data=2,context=2,replicas=2,shard=optimizer", "data=6,replicas=3,shard=gradients"],
)  # fmt: skip
def test_all_ranks_together_write_every_element_once(text: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (7, 3), "b": (2,), "c": (1,), "d": (), "e": (9, 9)}
    grid, held = tables(Plan.parse(text), shapes)
    boxes: dict[str, list[object]] = {name: [] for name in shapes}
    written = [writes(table, grid, rank) for rank, table in enumerate(held)]
    for table, names in zip(held, written, strict=True):
        assert "alias" not in names
        for name in names:
            boxes[name] += table[name].held
    for name, shape in shapes.items():
        assert tiles(shape, boxes[name]), name  # type: ignore[arg-type]


def test_without_sharding_the_ranks_write_in_turn() -> None:
    shapes = parameter_shapes(preset("1m"))
    base = initial_table(shapes, decays={name: decays(name) for name in shapes}, axes=AXES)
    grid = Grid(data=4)
    written = [writes(base, grid, rank) for rank in range(4)]
    assert sum(map(len, written)) == len(shapes) and set().union(*written) == set(shapes)
    assert all(written)
