"""What carries bytes: torch process groups (gloo on CPU, NCCL on GPU) behind a small protocol.

`Transport` is the seam. The real one is `TorchTransport` below; `comm/fake.py` has one that runs N
ranks as threads. Nothing above this file imports torch.distributed.

gloo lowers reduce_scatter badly (2.4 x its own all_reduce on one host, and 2.1 to 2.3 x the
bandwidth bound over a link), and sums bf16 in bf16. So on gloo a reduce_scatter is sent as one
all_to_all, each rank then adding the pieces itself in rank order: it moves what the ideal algorithm
moves, (n-1)/n S, and the sum is the same bits whatever order messages arrive in.
"""

from __future__ import annotations

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


class Transport(Protocol):
    """The operations of one group. Ranks are positions within the group."""

    size: int
    index: int

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


class Done:
    """Work that is finished when it is issued."""

    def wait(self) -> None:
        return None


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


_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TorchTransport:
    """One torch process group."""

    def __init__(self, group: dist.ProcessGroup, *, ranks: Sequence[int], index: int) -> None:
        """`ranks` are global ranks in group order, `index` is this rank's place among them."""
        self._group = group
        self._ranks = tuple(ranks)
        self.size = len(ranks)
        self.index = index
        self._gloo = dist.get_backend(group) == "gloo"

    def lowered(self, op: Collective) -> Collective:
        if self._gloo and op == Collective.REDUCE_SCATTER:
            return Collective.ALL_TO_ALL
        return op

    def all_reduce(self, tensor: Tensor, *, op: str) -> Work:
        return _Plain(_issued(dist.all_reduce(tensor, _REDUCE[op], self._group, async_op=True)))

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return _Plain(_issued(dist.all_gather_into_tensor(out, piece, self._group, async_op=True)))

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        if not self._gloo:
            return _Plain(
                _issued(dist.reduce_scatter_tensor(out, whole, group=self._group, async_op=True))
            )
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
        return _Plain(_issued(dist.isend(tensor, self._ranks[to], self._group)))

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        return _Plain(_issued(dist.irecv(tensor, self._ranks[source], self._group)))

    def barrier(self) -> Work:
        # a one-element sum: gloo's own barrier has no asynchronous form with a usable time-out
        return self.all_reduce(torch.zeros(1), op="sum")


def _issued(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the group"
    return work


def start_process_group(
    *, backend: str, rank: int, world_size: int, store: Store, timeout_s: float
) -> None:
    """Join the job's process group over a store that already exists."""
    dist.init_process_group(
        backend,
        store=store,  # type: ignore[arg-type]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def finish_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def file_store(path: str, world_size: int) -> Store:
    """The store of one generation on one host: a file in the run folder, no listener."""
    return dist.FileStore(path, world_size)  # type: ignore[attr-defined, no-any-return]
