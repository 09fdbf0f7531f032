"""What one rank of a plan holds and sends, by arithmetic: the same functions that the strategies
and the tests use, so what is shown is what will be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reparto.config.model import (
    ModelConfig,
    decays,
    parameter_shapes,
    rules,
    tied_parameters,
)
from reparto.config.plan import Plan
from reparto.partition.activations import Flow, activation_messages
from reparto.partition.layers import decoder_costs
from reparto.partition.place import ModelMap, held_messages, held_state, holding, names_by_block
from reparto.partition.tensors import Placement
from reparto.partition.volume import (
    Message,
    StateBytes,
    word_messages,
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


def decoder_map(config: ModelConfig, *, sequence_length: int = 0) -> ModelMap:
    """Our decoder as blocks of names: embedding, layers, final norm, head."""
    shapes, tied = parameter_shapes(config), tied_parameters(config)
    prefixes = [
        "model.embed_tokens",
        *(f"model.layers.{index}" for index in range(config.num_hidden_layers)),
        "model.norm",
        "lm_head",
    ]
    return ModelMap(
        shapes=shapes,
        aliases=tied,
        blocks=names_by_block([*shapes, *tied], prefixes),
        decays={name: decays(name) for name in shapes},
        rules=rules(config),
        costs=decoder_costs(config, sequence_length=sequence_length),
    )


def view_rank(
    model: ModelMap,
    plan: Plan,
    rank: int,
    *,
    flow: Flow | None = None,
    compute_dtype: str = "float32",
    master_dtype: str = "float32",
) -> RankView:
    """The view of `rank`. `flow` says what activations cross; without it only state is counted."""
    held = holding(model, plan, rank, gradient_bytes=DTYPE_BYTES[master_dtype])
    types = {"compute_dtype": compute_dtype, "master_dtype": master_dtype}
    return RankView(
        rank=rank,
        coordinates=held.coordinates,
        table=held.table,
        state=held_state(held, plan, **types),
        messages=(
            *held_messages(held, plan, **types),
            *(activation_messages(flow, plan, held, **types) if flow else ()),
            *word_messages(plan.world_size),
        ),
    )
