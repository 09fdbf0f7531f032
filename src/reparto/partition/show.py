"""What one rank of a plan holds and sends, by arithmetic: the same functions that the strategies
and the tests use, so what is shown is what will be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reparto.config.plan import Plan
from reparto.partition.grid import AXES, Grid
from reparto.partition.tensors import Placement, initial_table, shard_rows
from reparto.partition.volume import (
    Message,
    Shapes,
    StateBytes,
    reduction_messages,
    state_bytes,
    unit_layouts,
)
from reparto.units import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class RankView:
    """One rank of a plan."""

    rank: int
    coordinates: Mapping[str, int]
    "place on every axis"
    table: Mapping[str, Placement]
    "what it owns of every parameter: updates and saves"
    state: StateBytes
    messages: tuple[Message, ...]
    "of one optimizer step"

    def message_sums(self) -> list[tuple[str, str, str, int, int, int, float]]:
        """(what, operation, group, ranks, times, payload bytes, ideal wire bytes) by kind."""
        sums: dict[tuple[str, str, str, int], tuple[int, int, float]] = {}
        for one in self.messages:
            key = (one.what, one.operation, one.group, one.group_size)
            count, payload, wire = sums.get(key, (0, 0, 0.0))
            sums[key] = (
                count + one.count,
                payload + one.total_payload_bytes,
                wire + one.total_wire_bytes,
            )
        return [(*key, *value) for key, value in sums.items()]

    def as_dict(self) -> dict[str, object]:
        """JSON values."""
        return {
            "rank": self.rank,
            "coordinates": dict(self.coordinates),
            "parameter_bytes": self.state.parameters,
            "gradient_bytes": self.state.gradients,
            "optimizer_bytes": self.state.optimizer,
            "slices": {
                name: [{"start": list(box.start), "size": list(box.size)} for box in one.held]
                for name, one in self.table.items()
                if one.tied_to is None
            },
            "messages": [
                {"what": what, "operation": operation, "group": group, "ranks": size,
                 "count": count, "payload_bytes": payload, "wire_bytes": wire}
                for what, operation, group, size, count, payload, wire in self.message_sums()
            ],
        }  # fmt: skip


def view_rank(
    plan: Plan,
    rank: int,
    *,
    shapes: Shapes,
    blocks: Sequence[Sequence[str]],
    decays: Mapping[str, bool],
    tied: Mapping[str, str],
    compute_dtype: str = "float32",
    master_dtype: str = "float32",
) -> RankView:
    """The view of `rank`. `blocks` are names by block in model order, `tied` alias -> name."""
    grid = Grid.of(plan)
    coordinates = grid.coordinates(rank)
    table = initial_table(shapes, decays=decays, axes=AXES)
    if plan.shard != "none":
        shard = grid.group("shard", rank).index(rank)
        table = {
            name: one.with_(
                held=tuple(
                    rows for box in one.held for rows in shard_rows(box, plan.num_shards, shard)
                )
            )
            for name, one in table.items()
        }
    layouts = unit_layouts(
        [{name: shapes[name] for name in block} for block in blocks],
        plan=plan,
        gradient_bytes=DTYPE_BYTES[master_dtype],
    )
    last = set(blocks[-1]) | {tied[alias] for alias in tied}
    kept = [any(slot.name in last for slot in layout.slots) for layout in layouts]
    types = {"compute_dtype": compute_dtype, "master_dtype": master_dtype}
    return RankView(
        rank=rank,
        coordinates=coordinates,
        table=table,
        state=state_bytes(layouts, plan=plan, **types),
        messages=tuple(reduction_messages(layouts, plan=plan, kept=kept, **types)),
    )
