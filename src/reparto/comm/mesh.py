"""The grid of ranks with a communicator for every group that a plan uses.

`Mesh` is what strategies are given: `mesh.group("shard")` is the communicator of the named group
this rank is in (`partition/grid.py` says who that is). Groups are passed, never global, and they
are made at one place in one order, because making a group is itself a collective.

Groups with the same members share one transport but keep their own names in the records. Two
purposes that may be under way at once in an order that differs between ranks (gathering weights,
reducing gradients) get two transports, so that each keeps a fixed order.

Groups whose members share a host's memory do not go through torch at all (`comm/shared.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from reparto.comm.backend import Store, TorchTransport, Transport, start_process_group
from reparto.comm.collectives import Check, Communicator
from reparto.comm.fake import FakeWorld
from reparto.comm.shared import Host
from reparto.comm.traffic import Traffic, traffic
from reparto.errors import Fault, PeerLost
from reparto.partition.grid import Grid
from reparto.trace import Ring

#: name of a communicator -> (group, lane); lanes of one group have transports of their own
PURPOSES: dict[str, tuple[str, str]] = {
    "world": ("world", ""),
    "reduce": ("reduce", ""),
    "shard": ("shard", ""),
    "unshard": ("shard", "unshard"),
    "replicas": ("replicas", ""),
    "batch": ("batch", ""),
    "context": ("context", ""),
    "tensor": ("tensor", ""),
    "pipeline": ("pipeline", ""),
    "expert": ("expert", ""),
    "expert_shard": ("expert_shard", ""),
    "expert_unshard": ("expert_shard", "unshard"),
    "expert_reduce": ("expert_reduce", ""),
    "weights": ("weights", ""),
    "save": ("world", "save"),  # used by the thread that saves in the background
}


class Mesh:
    """One rank's view of the grid."""

    def __init__(
        self, grid: Grid, rank: int, *, ring: Ring, communicators: dict[str, Communicator]
    ) -> None:
        self.grid = grid
        self.rank = rank
        self.ring = ring
        self.coordinates = grid.coordinates(rank)
        self._communicators = communicators

    def group(self, name: str) -> Communicator:
        """The communicator for a purpose of `PURPOSES`."""
        return self._communicators[name]

    @property
    def world(self) -> Communicator:
        return self._communicators["world"]

    def traffic(self) -> list[Traffic]:
        """What this rank's groups sent in a step, from its record."""
        groups = {one.ident: (one.name, one.link) for one in self._communicators.values()}
        return traffic(self.ring.records(), groups)

    @property
    def exposed_s(self) -> float:
        """Seconds this rank has waited for communication since the start."""
        return sum(one.exposed_ns for one in self._communicators.values()) / 1e9


def torch_mesh(
    grid: Grid,
    rank: int,
    *,
    ring: Ring,
    timeout_s: float,
    check: Check | None = None,
    purposes: Iterable[str] = PURPOSES,
    host: Host | None = None,
) -> Mesh:
    """A mesh over torch process groups; the job's process group must have been joined.

    With `host`, groups within one host go through its memory; tensors must be on processors.
    """
    made: set[tuple[tuple[int, ...], str]] = set()
    mine: dict[tuple[tuple[int, ...], str], Transport] = {}

    def transport(purpose: str, ranks: tuple[int, ...]) -> Transport | None:
        group_name, lane = PURPOSES[purpose]
        for members in grid.all_groups(group_name):  # every rank makes every group, in one order
            key = (members, lane)
            if len(members) == 1 or key in made:
                continue
            made.add(key)
            if host is not None and host.shares(members):
                if rank in members:
                    mine[key] = host.transport(members, lane)
                continue
            if len(members) == grid.world_size and not lane:
                group = _world()
            else:
                group = dist.new_group(list(members), timeout=timedelta(seconds=timeout_s))
            if rank in members:
                mine[key] = TorchTransport(group, ranks=members, index=members.index(rank))
        return mine.get((ranks, lane))

    return _mesh(grid, rank, ring=ring, transport=transport, check=check, purposes=purposes)


def join_mesh(
    grid: Grid,
    rank: int,
    *,
    backend: str,
    store: Store,
    ring: Ring,
    timeout_s: float,
    check: Check | None = None,
) -> Mesh:
    """Join the job over `store` and return its mesh. `finish_process_group` leaves it.

    backend  auto: nccl if there is a GPU for every rank; else memory within a host, gloo between
             hosts. gloo: that alone. nccl: that alone.
    """
    if backend == "auto":
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= grid.world_size
        backend = "nccl" if enough else "auto"
    start_process_group(
        backend="gloo" if backend == "auto" else backend, rank=rank, world_size=grid.world_size,
        store=store, timeout_s=timeout_s,
    )  # fmt: skip
    host = None
    if backend == "auto" and grid.world_size > 1:
        # a store can outlive a failed start, and then holds what dead processes said
        word = torch.tensor([secrets.randbits(62)])
        everyone = TorchTransport(_world(), ranks=range(grid.world_size), index=rank)
        everyone.broadcast(word, source=0).wait()
        host = Host(
            store, rank=rank, world_size=grid.world_size, timeout_s=timeout_s,
            meeting=str(int(word)),
        )  # fmt: skip
    return torch_mesh(grid, rank, ring=ring, timeout_s=timeout_s, check=check, host=host)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the job's process group has not been joined"
    return group


def fake_mesh(grid: Grid, rank: int, *, world: FakeWorld, ring: Ring) -> Mesh:
    """A mesh over threads."""

    def transport(purpose: str, ranks: tuple[int, ...]) -> Transport | None:
        return world.transport(purpose, ranks, rank) if len(ranks) > 1 else None

    return _mesh(grid, rank, ring=ring, transport=transport, check=None, purposes=PURPOSES)


def single_mesh(*, ring: Ring | None = None) -> Mesh:
    """A mesh of one rank."""
    ring = ring or Ring(None, rank=0, capacity=4096)
    return _mesh(
        Grid(), 0, ring=ring, transport=lambda name, ranks: None, check=None, purposes=PURPOSES
    )


def _mesh(
    grid: Grid,
    rank: int,
    *,
    ring: Ring,
    transport: Callable[[str, tuple[int, ...]], Transport | None],
    check: Check | None,
    purposes: Iterable[str],
) -> Mesh:
    communicators: dict[str, Communicator] = {}
    for ident, purpose in enumerate(purposes, start=1):
        ranks = grid.group(PURPOSES[purpose][0], rank)
        # a ring has one writer: the thread that saves gets one of its own, and stays out of the
        # step's fingerprint, because it runs at another time on every rank
        own = Ring(None, rank=rank, capacity=1024) if purpose == "save" else ring
        communicators[purpose] = Communicator(
            purpose,
            transport(purpose, ranks),
            ring=own,
            ident=ident,
            ranks=ranks,
            check=check,
        )
    return Mesh(grid, rank, ring=ring, communicators=communicators)


class SignatureCheck:
    """Checked mode: ranks lay their signature in the store and compare before any data moves.

    One round trip to the store per member and collective, so it is for finding a fault, not for
    every run; the step's fingerprint in the agreement word is always on and costs nothing.
    """

    def __init__(self, store: Store, *, ring: Ring, generation: int) -> None:
        self._store = store
        self._ring = ring
        self._generation = generation
        self._counts: dict[str, int] = {}

    def __call__(self, group: str, ranks: tuple[int, ...], index: int, signature: str) -> None:
        name = f"{group}:{ranks[0]}"
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        prefix = f"check/{self._generation}/{name}/{number}/"
        self._store.set(f"{prefix}{index}", signature.encode())
        seen: list[str] = []
        for member in range(len(ranks)):
            try:
                seen.append(self._store.get(f"{prefix}{member}").decode())
            except RuntimeError as error:
                late = [rank for place, rank in enumerate(ranks)
                        if not self._store.check([f"{prefix}{place}"])]  # fmt: skip
                raise PeerLost(
                    f"rank {self._ring.rank}, step {self._ring.step}: {signature}, collective "
                    f"{number} of group `{group}`: rank {', '.join(map(str, late))} has not come"
                ) from error
        if len(set(seen)) > 1:
            lines = "\n".join(f"  rank {r}: {text}" for r, text in zip(ranks, seen, strict=True))
            raise Fault(
                f"rank {self._ring.rank}, step {self._ring.step}: the ranks of group `{group}` "
                f"disagree on its collective {number}, so nothing was sent:\n{lines}"
            )
