"""What carries bytes: torch process groups (gloo on CPU, NCCL on GPU) behind a small protocol.

`Transport` is the seam. `TorchTransport` below crosses hosts; `comm/shared.py` has the one between
processes of one host, `comm/fake.py` one that runs N ranks as threads. Nothing above this room
imports torch.distributed.

Two operations of gloo are lowered by us, because its own are slow (64 MB, one host, ms):

| | gloo's own, n=2 / n=4 | ours, n=2 / n=4 |
|---|---|---|
| reduce_scatter | 157 / 629 | 69 / 180: one all_to_all, then each rank adds in rank order |
| all_gather | 152 / 464 | 53 / 150: every rank sends its piece to every other |

Both move what the ideal algorithm moves, (n-1)/n S, and the sum is the same bits whatever order
messages arrive in. An all_reduce made of these two was slower than gloo's own (121 against 72 ms
at n=2), so that one stays. Records say `lowered_as`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from reparto.trace import Collective


class Work(Protocol):
    """Something issued that will be finished by `wait`."""

    def wait(self) -> None: ...


class Store(Protocol):
    """A small blocking key-value store that all ranks of a generation share."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def set_timeout(self, timeout: timedelta) -> None: ...


class Transport(Protocol):
    """The operations of one group. Ranks are positions within the group."""

    size: int
    index: int
    link: str
    "what carries the bytes: `memory` of one host, or `network` (a process group of torch)"

    def lowered(self, op: Collective) -> Collective:
        """What really runs when `op` is asked for."""
        ...

    def all_reduce(self, tensor: Tensor, *, op: str) -> Work: ...

    def all_gather(self, out: Tensor, piece: Tensor) -> Work: ...

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work: ...

    def all_to_all(
        self, out: Tensor, source: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Work: ...

    def broadcast(self, tensor: Tensor, *, source: int) -> Work: ...

    def send(self, tensor: Tensor, *, to: int) -> Work: ...

    def recv(self, tensor: Tensor, *, source: int) -> Work: ...

    def barrier(self) -> Work: ...

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in which sums are cheapest; see `Communicator.buffer`."""
        ...


class Done:
    """Work that is finished when it is issued."""

    def wait(self) -> None:
        return None


class Broken:
    """Work that failed when it was issued: gloo tells of a dead peer then, for single messages.

    The error is kept for `wait`, which is where whoever uses the work hears of lost peers.
    """

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


class _Then:
    """Work with something left to do on the host when it has arrived."""

    __slots__ = ("_after", "_work")

    def __init__(self, work: dist.Work, after: Callable[[], None]) -> None:
        self._work, self._after = work, after

    def wait(self) -> None:
        self._work.wait()
        self._after()


class _Plain:
    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class _All:
    """Several messages that end together."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


_LOWERED_ON_GLOO = {
    Collective.REDUCE_SCATTER: Collective.ALL_TO_ALL,
    Collective.ALL_GATHER: Collective.SEND,
}
# torch 2.13 renames these two; the old names still stand in 2.10
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchTransport:
    """One torch process group."""

    link = "network"

    def __init__(self, group: dist.ProcessGroup, *, ranks: Sequence[int], index: int) -> None:
        """`ranks` are global ranks in group order, `index` is this rank's place among them."""
        self._group = group
        self._ranks = tuple(ranks)
        self.size = len(ranks)
        self.index = index
        self._gloo = dist.get_backend(group) == "gloo"

    def lowered(self, op: Collective) -> Collective:
        return _LOWERED_ON_GLOO.get(op, op) if self._gloo else op

    def all_reduce(self, tensor: Tensor, *, op: str) -> Work:
        return _Plain(_issued(dist.all_reduce(tensor, _REDUCE[op], self._group, async_op=True)))

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        if not self._gloo:
            return _Plain(_issued(_ALL_GATHER(out, piece, group=self._group, async_op=True)))
        places = out.view(self.size, -1)
        source = piece.reshape(-1)
        works: list[Work] = []
        for distance in range(1, self.size):  # a different partner for every rank at each distance
            to, origin = (self.index + distance) % self.size, (self.index - distance) % self.size
            works.append(self.send(source, to=to))
            works.append(self.recv(places[origin], source=origin))
        mine = places[self.index]
        if mine.data_ptr() != source.data_ptr():
            mine.copy_(source)
        return _All(works)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        if not self._gloo:
            return _Plain(_issued(_REDUCE_SCATTER(out, whole, group=self._group, async_op=True)))
        arrived = torch.empty_like(whole)
        work = _issued(dist.all_to_all_single(arrived, whole, group=self._group, async_op=True))

        def add_in_rank_order() -> None:
            pieces = arrived.view(self.size, -1)
            flat = out.view(-1)
            torch.add(pieces[0], pieces[1], out=flat)
            for piece in pieces[2:]:
                flat.add_(piece)

        return _Then(work, add_in_rank_order)

    def all_to_all(
        self, out: Tensor, source: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Work:
        return _Plain(
            _issued(
                dist.all_to_all_single(
                    out, source, list(out_sizes), list(in_sizes), group=self._group, async_op=True
                )
            )
        )

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        return _Plain(
            _issued(dist.broadcast(tensor, self._ranks[source], self._group, async_op=True))
        )

    def send(self, tensor: Tensor, *, to: int) -> Work:
        try:
            return _Plain(_issued(dist.isend(tensor, self._ranks[to], self._group)))
        except RuntimeError as error:
            return Broken(error)

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        try:
            return _Plain(_issued(dist.irecv(tensor, self._ranks[source], self._group)))
        except RuntimeError as error:
            return Broken(error)

    def barrier(self) -> Work:
        # a one-element sum: gloo's own barrier has no asynchronous form with a usable time-out
        return self.all_reduce(torch.zeros(1), op="sum")

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)


def _issued(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the group"
    return work


def start_process_group(
    *, backend: str, rank: int, world_size: int, store: Store, timeout_s: float
) -> None:
    """Join the job's process group over a store that already exists."""
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)  # its own is five minutes, also for members that never come
    dist.init_process_group(
        backend,
        store=store,  # type: ignore[arg-type]
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def finish_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def file_store(path: str, world_size: int) -> Store:
    """The store of one generation on one host: a file in the run folder, no listener."""
    return dist.FileStore(path, world_size)  # type: ignore[attr-defined, return-value]


def client_store(host: str, port: int, *, prefix: str, timeout_s: float) -> Store:
    """A store that somebody else listens with, such as torchrun; keys get `prefix`, if any."""
    timeout = timedelta(seconds=timeout_s)
    raw = dist.TCPStore(host, port, None, False, timeout=timeout)  # type: ignore[attr-defined]
    if not prefix:
        return raw  # type: ignore[return-value]
    return dist.PrefixStore(prefix, raw)  # type: ignore[attr-defined, return-value]


def server_store(listener: socket.socket, host: str, *, timeout_s: float) -> Store:
    """A store on a socket that is bound already: it listens there and nowhere else."""
    timeout = timedelta(seconds=timeout_s)
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined, return-value]
        host, port, None, True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
