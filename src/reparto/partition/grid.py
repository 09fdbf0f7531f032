"""Ranks on a grid: which coordinates a rank has, and which ranks stand on one line with it.

The order of axes, slowest to fastest, is

    pipeline, replicas, data (within a replica), context, tensor

so tensor-parallel neighbours, which talk most, have neighbouring ranks (the same host), and
pipeline stages, which talk least, are furthest apart. `expert` adds no axis: it takes the fastest
part of data x context.

A *group* is the set of ranks that differ only along some axes. Groups have names, because a
strategy asks for what it needs ("shard", "reduce"), not for a list of axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reparto.config.plan import Plan
from reparto.partition.experts import EXPERT_COPIES

AXES = ("pipeline", "replicas", "data", "context", "tensor")

GroupName = Literal[
    "world", "pipeline", "replicas", "batch", "shard", "reduce", "context", "tensor", "expert",
    "expert_shard", "expert_reduce", "model", "weights",
]  # fmt: skip

#: the axes along which the members of a group differ
AXES_OF_GROUP: dict[str, tuple[str, ...]] = {
    "world": AXES,
    "pipeline": ("pipeline",),
    "replicas": ("replicas",),  # holders of the same shard
    "batch": ("replicas", "data"),  # ranks with different sequences
    "shard": ("data", "context"),  # ranks that cut one copy of the state
    "reduce": ("replicas", "data", "context"),  # ranks whose gradients are summed
    "context": ("context",),
    "tensor": ("tensor",),
    "model": ("pipeline", "tensor"),  # ranks that work on the same sequences
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The sizes of all axes. `data` here is the degree *within* one replica."""

    pipeline: int = 1
    replicas: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Grid:
        """The grid of a legal plan."""
        return cls(
            pipeline=plan.pipeline,
            replicas=plan.replicas,
            data=plan.data // plan.replicas,
            context=plan.context,
            tensor=plan.tensor,
            expert=plan.expert,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return (self.pipeline, self.replicas, self.data, self.context, self.tensor)

    @property
    def world_size(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product

    def size(self, axis: str) -> int:
        """The degree of one axis; of `expert_shard`, how many ranks hold the same experts."""
        if axis == EXPERT_COPIES:
            return self.data * self.context // self.expert
        return self.shape[AXES.index(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on every axis. Raises `IndexError` outside the grid.

        Where experts are shared out, `expert` (which experts) and `expert_shard` (which of the
        ranks that hold them) say the same as `data` and `context` in another way.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        found: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, found[axis] = divmod(rank, size)
        if self.expert > 1:
            at = found["data"] * self.context + found["context"]
            found[EXPERT_COPIES], found["expert"] = divmod(at, self.expert)
        return found

    def rank(self, coordinates: dict[str, int]) -> int:
        """The inverse of `coordinates`; axes left out are 0."""
        rank = 0
        for axis, size in zip(AXES, self.shape, strict=True):
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the named group that `rank` is in, ascending.

        `weights`: those that together hold one copy of all weights: `model` and `expert`.
        """
        if name.startswith("expert"):
            return self._expert_group(name, rank)
        if name == "weights":
            axes = AXES_OF_GROUP["model"]
            lines = (self._line(axes, one) for one in self._expert_group("expert", rank))
            return tuple(sorted(member for line in lines for member in line))
        return self._line(AXES_OF_GROUP[name], rank)

    def _line(self, along: tuple[str, ...], rank: int) -> tuple[int, ...]:
        here = self.coordinates(rank)
        ranks = [0]
        for axis, size in zip(AXES, self.shape, strict=True):
            values = range(size) if axis in along else (here[axis],)
            ranks = [base * size + value for base in ranks for value in values]
        return tuple(ranks)

    def _expert_group(self, name: str, rank: int) -> tuple[int, ...]:
        """`expert`: neighbours in data x context that hold different experts.

        `expert_shard`: those of the shard group that hold the same experts.
        `expert_reduce`: those of all replicas that do, whose gradients of experts are summed.
        """
        if name == "expert_reduce":
            copies = self.group("replicas", rank)
            return tuple(r for copy in copies for r in self._expert_group("expert_shard", copy))
        line = self.group("shard", rank)
        at = line.index(rank)
        if name == "expert":
            first = at - at % self.expert
            return line[first : first + self.expert]
        return line[at % self.expert :: self.expert]

    def all_groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Every group of that name, each once, ordered by its smallest rank."""
        seen: dict[tuple[int, ...], None] = {}
        for rank in range(self.world_size):
            seen.setdefault(self.group(name, rank), None)
        return tuple(seen)

    def batch_index(self, rank: int) -> int:
        """Which data-parallel part of the batch a rank computes, 0 .. replicas x data - 1."""
        here = self.coordinates(rank)
        return here["replicas"] * self.data + here["data"]
