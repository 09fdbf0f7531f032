"""N ranks as N threads of one process, with real values: the oracle for plans of many ranks.

A collective is a meeting: every member lays its tensor on the table, the last one to come opens the
door, and each computes its own result from what lies there, in rank order. Sums are therefore the
same bits on every rank. Point-to-point messages are queues. It is not meant to be fast.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from reparto.comm.backend import Broken, Done, Work
from reparto.trace import Collective


class Table:
    """What the threads of one group share."""

    def __init__(self, size: int, *, timeout_s: float) -> None:
        self.slots: list[list[Tensor]] = [[] for _ in range(size)]
        self.door = threading.Barrier(size, timeout=timeout_s)
        self.mail: dict[tuple[int, int], queue.Queue[Tensor]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }
        self.timeout_s = timeout_s


class FakeTransport:
    """One member of a `Table`."""

    link = "memory"

    def __init__(self, table: Table, index: int) -> None:
        self._table, self.index, self.size = table, index, len(table.slots)

    def lowered(self, op: Collective) -> Collective:
        return op

    def _meet(self, mine: list[Tensor], then: Callable[[list[list[Tensor]]], object]) -> Work:
        table = self._table
        table.slots[self.index] = [tensor.detach().clone() for tensor in mine]
        try:
            table.door.wait()
            seen = list(table.slots)
            table.door.wait()  # nobody lays down the next tensor before all have seen this one
        except threading.BrokenBarrierError:
            return Broken(RuntimeError("another rank has left"))
        with torch.no_grad():
            then(seen)
        return Done()

    def all_reduce(self, tensor: Tensor, *, op: str) -> Work:
        def result(seen: list[list[Tensor]]) -> None:
            stack = torch.stack([slot[0] for slot in seen])
            total = _sum(stack) if op == "sum" else getattr(stack, f"a{op}")(0)
            tensor.copy_(total)

        return self._meet([tensor], result)

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        return self._meet(
            [piece],
            lambda seen: out.view(-1).copy_(torch.cat([slot[0].reshape(-1) for slot in seen])),
        )

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        def result(seen: list[list[Tensor]]) -> None:
            pieces = [slot[0].reshape(self.size, -1)[self.index] for slot in seen]
            out.view(-1).copy_(_sum(torch.stack(pieces)))

        return self._meet([whole], result)

    def all_to_all(
        self, out: Tensor, source: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Work:
        def result(seen: list[list[Tensor]]) -> None:
            torch.cat([slot[self.index] for slot in seen], out=out.data)

        return self._meet(list(torch.split(source, list(in_sizes))), result)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        return self._meet([tensor], lambda seen: tensor.copy_(seen[source][0]))

    def send(self, tensor: Tensor, *, to: int) -> Work:
        self._table.mail[self.index, to].put(tensor.detach().clone())
        return Done()

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        return _Arrival(self._table, self._table.mail[source, self.index], tensor)

    def barrier(self) -> Work:
        return self._meet([], lambda seen: None)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)


class _Arrival:
    def __init__(self, table: Table, box: queue.Queue[Tensor], tensor: Tensor) -> None:
        self._table, self._box, self._tensor = table, box, tensor

    def wait(self) -> None:
        try:
            arrived = self._box.get(timeout=self._table.timeout_s)
        except queue.Empty as error:
            raise RuntimeError("nothing arrived in time") from error
        with torch.no_grad():
            self._tensor.copy_(arrived)


def _sum(stack: Tensor) -> Tensor:
    total = stack[0].clone()
    for part in stack[1:]:
        total += part
    return total


class FakeWorld:
    """The tables of all groups of a job, made on first use."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self._tables: dict[tuple[str, tuple[int, ...]], Table] = {}
        self._lock = threading.Lock()
        self._timeout_s = timeout_s

    def transport(self, name: str, ranks: tuple[int, ...], rank: int) -> FakeTransport:
        with self._lock:
            table = self._tables.setdefault(
                (name, ranks), Table(len(ranks), timeout_s=self._timeout_s)
            )
        return FakeTransport(table, ranks.index(rank))

    def abort(self) -> None:
        """Break every meeting, so that no thread waits for one that has failed."""
        with self._lock:
            for table in self._tables.values():
                table.door.abort()


def run_threads(world_size: int, work: Callable[[int, FakeWorld], None]) -> None:
    """Run `work(rank, world)` on `world_size` threads; the first rank's error is raised here."""
    world = FakeWorld()
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            work(rank, world)
        except BaseException as error:
            errors.append((rank, error))
            world.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
