"""The only way a tensor crosses ranks: every collective has a tag and leaves a record.

A `Communicator` is one group as one rank sees it. Its methods issue work and return a `Handle`;
`handle.wait()` ends it. Between the two the host computes, and the ring knows which part of the
time was hidden and which exposed. A group of one rank does nothing and records nothing, so
strategies need no special case for degree 1.

    handle = mesh.group("reduce").all_reduce(bucket, tag="gradient 3")
    ...                      # backward goes on
    handle.wait()

A tag says *what* is carried and *why*, and it is part of the digest by which ranks that do
different things are found out: two all_reduces of the same shape swapped on one rank give wrong
sums without any error in torch, DETAIL level included.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from reparto.comm.backend import Done, Transport, Work
from reparto.errors import PeerLost
from reparto.trace import Collective, Kind, Ring


class Check(Protocol):
    """Called before a collective is issued; raises `Fault` if the ranks do not agree on it."""

    def __call__(self, group: str, ranks: tuple[int, ...], index: int, signature: str) -> None: ...


class Handle:
    """A collective under way."""

    __slots__ = ("_communicator", "_sequence", "_tag", "_work")

    def __init__(
        self, communicator: Communicator | None, work: Work, sequence: int, tag: str
    ) -> None:
        self._communicator = communicator
        self._work = work
        self._sequence = sequence
        self._tag = tag

    def wait(self) -> None:
        """Return when the data is there. Idempotent. Raises `Fault` if a peer is gone or late."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        ring = communicator.ring
        since = ring.clock.now_ns()
        try:
            self._work.wait()
        except RuntimeError as error:
            raise communicator.fault(self._tag, error) from error
        communicator.exposed_ns += ring.end(self._sequence, waited_since_ns=since)


_DONE = Handle(None, Done(), 0, "")


class Communicator:
    """One named group, as one of its members sees it."""

    def __init__(
        self,
        name: str,
        transport: Transport | None,
        *,
        ring: Ring,
        ident: int,
        ranks: Sequence[int],
        check: Check | None = None,
    ) -> None:
        """`transport=None` is a group of one: all operations are copies at most.

        ident   number of the group on this rank, written in records
        ranks   global ranks, in group order
        check   in checked mode, compares signatures before data is used
        """
        self.name = name
        self.ring = ring
        self.ident = ident
        self.ranks = tuple(ranks)
        self.size = transport.size if transport else 1
        self.index = transport.index if transport else 0
        self.link = transport.link if transport else "none"
        "what carries this group's bytes: memory, network; none for a group of one"
        self.exposed_ns = 0
        "nanoseconds the host has waited for this group, since the start"
        self._transport = transport
        self._check = check
        self._digests: dict[tuple[int, str, tuple[int | str, ...], torch.dtype], int] = {}

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, tag: str, op: str = "sum") -> Handle:
        """In place: `tensor` becomes the sum (max, min) over the group."""
        if self._transport is None:
            return _DONE
        sequence = self._start(Collective.ALL_REDUCE, tensor, tag)
        return Handle(self, self._transport.all_reduce(tensor, op=op), sequence, tag)

    def all_gather(self, out: Tensor, piece: Tensor, *, tag: str) -> Handle:
        """`out` (size x piece) becomes everyone's `piece`, in group order."""
        if self._transport is None:
            out.view(-1).copy_(piece.reshape(-1))
            return _DONE
        assert out.numel() == self.size * piece.numel(), "out must hold one piece a rank"
        sequence = self._start(Collective.ALL_GATHER, out, tag)
        return Handle(self, self._transport.all_gather(out, piece), sequence, tag)

    def reduce_scatter(self, out: Tensor, whole: Tensor, *, tag: str) -> Handle:
        """`out` becomes this rank's piece of the sum of everyone's `whole`."""
        if self._transport is None:
            out.view(-1).copy_(whole.reshape(-1))
            return _DONE
        assert whole.numel() == self.size * out.numel(), "whole must hold one piece a rank"
        sequence = self._start(Collective.REDUCE_SCATTER, whole, tag)
        return Handle(self, self._transport.reduce_scatter(out, whole), sequence, tag)

    def all_to_all(
        self,
        out: Tensor,
        source: Tensor,
        *,
        tag: str,
        out_sizes: Sequence[int] | None = None,
        in_sizes: Sequence[int] | None = None,
    ) -> Handle:
        """Piece i of `source` goes to rank i. Sizes are rows (dim 0); even pieces without them."""
        if self._transport is None:
            out.copy_(source)
            return _DONE
        larger = out if out.numel() >= source.numel() else source
        even = out_sizes is None and in_sizes is None
        sequence = self._start(Collective.ALL_TO_ALL, larger, tag, even=even)
        even_out = out_sizes or [out.shape[0] // self.size] * self.size
        even_in = in_sizes or [source.shape[0] // self.size] * self.size
        work = self._transport.all_to_all(out, source, even_out, even_in)
        return Handle(self, work, sequence, tag)

    def broadcast(self, tensor: Tensor, *, source: int, tag: str) -> Handle:
        """`tensor` becomes that of the group's member `source`."""
        if self._transport is None:
            return _DONE
        sequence = self._start(Collective.BROADCAST, tensor, tag)
        return Handle(self, self._transport.broadcast(tensor, source=source), sequence, tag)

    def send(self, tensor: Tensor, *, to: int, tag: str) -> Handle:
        """To the group's member `to`; `tensor` must stay as it is until the handle has waited."""
        assert self._transport is not None, "a group of one has nobody to send to"
        sequence = self._start(Collective.SEND, tensor, tag)
        return Handle(self, self._transport.send(tensor, to=to), sequence, tag)

    def recv(self, tensor: Tensor, *, source: int, tag: str) -> Handle:
        """Into `tensor`, from the group's member `source`; messages of a pair arrive in order."""
        assert self._transport is not None, "a group of one has nobody to receive from"
        sequence = self._start(Collective.RECV, tensor, tag)
        return Handle(self, self._transport.recv(tensor, source=source), sequence, tag)

    def barrier(self, *, tag: str) -> Handle:
        """Returns from `wait` when every member has come."""
        if self._transport is None:
            return _DONE
        sequence = self._start(Collective.BARRIER, None, tag)
        return Handle(self, self._transport.barrier(), sequence, tag)

    def exchange(self, data: bytes, *, tag: str) -> list[bytes]:
        """Everyone's bytes, in group order. For small, rare things: digests, errors, lists.

        Two collectives, sizes first; the content is never interpreted here.
        """
        if self._transport is None:
            return [data]
        sizes = torch.empty(self.size, dtype=torch.int64)
        self.all_gather(sizes, torch.tensor([len(data)]), tag=f"{tag} sizes").wait()
        longest = max(1, int(sizes.max()))
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = torch.empty(self.size, longest, dtype=torch.uint8)
        self.all_gather(rows, mine, tag=tag).wait()
        return [
            bytes(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)
        ]

    def buffer(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros for sums: where ranks share memory, `all_reduce` of it, whole or in part, copies
        nothing. Every member must ask for the same buffers in the same order.
        """
        if self._transport is None or device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._transport.buffer(numel, dtype)

    # -- records -------------------------------------------------------------------------------

    def _start(self, op: Collective, tensor: Tensor | None, tag: str, *, even: bool = True) -> int:
        """Write the record. Members of an uneven exchange differ in their rows, and only there."""
        assert self._transport is not None
        numel = tensor.numel() if tensor is not None else 0
        dtype = tensor.dtype if tensor is not None else torch.float32
        shape: tuple[int | str, ...] = tuple(tensor.shape) if tensor is not None else ()
        if not even:
            shape = ("uneven", *shape[1:])
        key = (op, tag, shape, dtype)
        digest = self._digests.get(key)
        point_to_point = op in (Collective.SEND, Collective.RECV)
        if digest is None:
            text = f"{op.name} {self.name} {shape} {dtype} {tag}"
            digest = 0 if point_to_point else zlib.crc32(text.encode()) or 1
            self._digests[key] = digest
        if self._check is not None and not point_to_point:
            signature = f"{op.name.lower()} `{tag}` {shape} {str(dtype).removeprefix('torch.')}"
            self._check(self.name, self.ranks, self.index, signature)
        return self.ring.start(
            Kind.COLLECTIVE,
            tag,
            op=op,
            lowered_as=self._transport.lowered(op),
            group=self.ident,
            payload_bytes=numel * dtype.itemsize,
            digest=digest,
        )

    def fault(self, tag: str, error: Exception) -> PeerLost:
        """The error of a broken collective, naming what torch does not: rank, step, tag, peers."""
        ring = self.ring
        peers = ", ".join(str(rank) for rank in self.ranks if rank != ring.rank)
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerLost(
            f"rank {ring.rank}, step {ring.step}: collective `{tag}` in group `{self.name}` "
            f"with rank {peers} failed: {cause}"
        )
