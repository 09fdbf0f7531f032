"""Collectives between the processes of one host, through shared memory: processors only.

Who issues an operation copies what it gives into a block and leaves a note for every reader
(`comm/mailbox.py`); who waits reads the others' blocks and computes its own result. So a wait
depends on what the peers have *issued*, never on what they wait for, as with a thread of its own
behind every group, but without one: on one host such a thread takes its time from the same cores
(an asynchronous gloo all-reduce on two busy cores hides 28 % of itself).

| operation | copied in | read at the wait |
|---|---|---|
| all_reduce | S | n S |
| all_reduce in registered memory | nothing | S / n from each, result written to each |
| reduce_scatter | (n-1)/n S | S |
| all_gather, broadcast, all_to_all, send | what it gives | what it gets |

Registered memory (`buffer`) is where gradients are made: each rank adds up its n-th part of all and
writes the sum to all. This one does need the peers' waits. 64 MB between two busy processes took
gloo 49 ms and takes 9 that way. Every sum is made in rank order and by one rank, or by each in the
same order, so all ranks hold the same bits and two runs do.

With n ranks a plain all_reduce reads n S where a ring reads 2 S: right up to about eight ranks, and
large sums are in registered memory. Rejected: a ring of chunks, whose every step wakes a process.

Every note says the operation and its size, so ranks that do different things are named at once,
where gloo would hang or mix them up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from reparto.comm.backend import Done, Store, Work
from reparto.comm.mailbox import (
    Block,
    Blocks,
    Inbox,
    Note,
    Outbox,
    Peer,
    Segment,
    box_offset,
    control_bytes,
    supported,
)
from reparto.trace import Collective

_COLLECTIVES, _MESSAGES, _SECOND = range(3)
_CHANNELS = 3
#: elements added up at a time, so that a partial sum stays in the cache
_CHUNK = 1 << 16
_REGISTER = 100
"number of an operation that is no collective: announcing memory"
_ADD: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Host:
    """This process among those of its job: which of them share this host's memory."""

    def __init__(
        self, store: Store, *, rank: int, world_size: int, timeout_s: float, meeting: str = ""
    ) -> None:
        """Tell everyone who we are, and learn who they are. Every rank must call it.

        meeting  a word the ranks share and never used before on this store

        A job whose ranks cannot open each other's memory has hosts of one rank each, that is, no
        group of it is shared.
        """
        self.rank, self.timeout_s = rank, timeout_s
        self._store, self._keys = store, f"shared/{meeting}"
        trial = _trial()
        store.set(f"{self._keys}/{rank}", f"{_identity()} {os.getpid()} {trial}".encode())
        told = [store.get(f"{self._keys}/{other}").decode().split() for other in range(world_size)]
        hosts = [one[0] for one in told]
        self._peers: dict[int, Peer] = {}
        opened = trial >= 0
        for other, (host, process, descriptor) in enumerate(told):
            if other == rank or host != hosts[rank] or not opened:
                continue
            try:
                Segment.of(int(process), int(descriptor), Segment.PAGE)
                self._peers[other] = Peer(other, int(process))
            except OSError:  # another user's, a container's: then nobody of this job shares
                opened = False
        store.set(f"{self._keys}/{rank}/opened", b"1" if opened else b"0")
        said = [store.get(f"{self._keys}/{one}/opened") for one in range(world_size)]
        everyone = all(one == b"1" for one in said)
        self._hosts = hosts if everyone else [str(other) for other in range(world_size)]

    def shares(self, ranks: Sequence[int]) -> bool:
        """Whether all of them are on one host. The same answer on every rank."""
        return len({self._hosts[rank] for rank in ranks}) == 1

    def transport(self, ranks: Sequence[int], lane: str) -> SharedTransport:
        """For a group that shares this host and has this rank in it; all its members must call."""
        name = f"{self._keys}/{lane}/{'-'.join(map(str, ranks))}"
        control = Segment.create(control_bytes(len(ranks), _CHANNELS))
        index = list(ranks).index(self.rank)
        blocks = Blocks()
        places = [place for place, rank in enumerate(ranks) if rank != self.rank]
        outboxes = {
            (channel, place): Outbox(
                control, box_offset(channel, place, len(ranks)), self._peers[ranks[place]], blocks
            )
            for channel in range(_CHANNELS)
            for place in places
        }
        # semaphores stand before anyone can see them
        self._store.set(f"{name}/{self.rank}", f"{control.descriptor} {control.nbytes}".encode())
        inboxes: dict[tuple[int, int], Inbox] = {}
        for place in places:
            peer = self._peers[ranks[place]]
            told = self._store.get(f"{name}/{peer.rank}").decode().split()
            theirs = Segment.of(peer.process, int(told[0]), int(told[1]))
            for channel in range(_CHANNELS):
                offset = box_offset(channel, index, len(ranks))
                inboxes[channel, place] = Inbox(theirs, offset, peer)
        return SharedTransport(
            ranks, index, control=control, blocks=blocks, outboxes=outboxes, inboxes=inboxes,
            timeout_s=self.timeout_s,
        )  # fmt: skip


def _identity() -> str:
    """The same for processes that see each other: one kernel, one name space of processes.

    One of the network too: who gives processes networks of their own wants hosts, emulated or real,
    and what crosses between them is to cross the network.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}:{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"alone:{os.getpid()}"


def _trial() -> int:
    """The file of a block for others to try to open, or -1 where there is no such memory."""
    if not supported():
        return -1
    try:
        return Segment.create(Segment.PAGE).descriptor
    except OSError:
        return -1


class _Pending:
    """An operation whose result is computed by the first `wait`."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()


class _Registered:
    """Memory of one size on every rank of a group, in which sums are made in place."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts
        "the memory of each member, in group order, as bytes"


class SharedTransport:
    """One group of processes on one host. Made by `Host.transport`."""

    link = "memory"

    def __init__(
        self,
        ranks: Sequence[int],
        index: int,
        *,
        control: Segment,
        blocks: Blocks,
        outboxes: dict[tuple[int, int], Outbox],
        inboxes: dict[tuple[int, int], Inbox],
        timeout_s: float,
    ) -> None:
        """`outboxes` and `inboxes` by (channel, place in the group)."""
        self.size, self.index = len(ranks), index
        self._ranks = tuple(ranks)
        self._control = control
        self._blocks = blocks
        self._outboxes, self._inboxes = outboxes, inboxes
        self._others = [place for place in range(self.size) if place != index]
        self._timeout_s = timeout_s
        self._registered: dict[int, _Registered] = {}
        self._in_place = 0
        self._early: dict[tuple[int, int], Note] = {}

    def lowered(self, op: Collective) -> Collective:
        return op

    # -- mail ----------------------------------------------------------------------------------

    def _give(self, data: Tensor, readers: int) -> Block:
        """Copy contiguous `data` into a block."""
        block = self._blocks.take(data.numel() * data.element_size(), readers)
        if data.numel():
            nbytes = data.numel() * data.element_size()
            block.segment.tensor(data.dtype, nbytes).copy_(data.view(-1))
        return block

    def _post(
        self, op: int, block: Block | None, place: int, *, channel: int = _COLLECTIVES,
        nbytes: int = 0, offset: int = 0, extra: int = 0,
    ) -> None:  # fmt: skip
        self._outboxes[channel, place].post(
            op, block, nbytes=nbytes, offset=offset, extra=extra, timeout_s=self._timeout_s
        )

    def _expect(
        self, places: Sequence[int], channel: int = _COLLECTIVES
    ) -> list[tuple[Inbox, int]]:
        return [
            (inbox, inbox.expect()) for inbox in (self._inboxes[channel, place] for place in places)
        ]

    def _take(self, inbox: Inbox, number: int, op: int, nbytes: int | None) -> Note:
        note = inbox.take(number, self._timeout_s)
        if note.kind != op or (nbytes is not None and note.nbytes != nbytes):
            mine = f"{_name(op)} of {nbytes} bytes" if nbytes is not None else _name(op)
            raise RuntimeError(
                f"rank {inbox.peer.rank} is in {_name(note.kind)} of {note.nbytes} bytes, "
                f"this rank in {mine}"
            )
        return note

    def _each(
        self,
        expected: Sequence[tuple[Inbox, int]],
        places: Sequence[int],
        op: int,
        dtype: torch.dtype,
        nbytes: Callable[[int], int],
        use: Callable[[int, Tensor], None],
    ) -> None:
        """Read one message from each of `places`."""
        for place, (inbox, number) in zip(places, expected, strict=True):
            note = self._take(inbox, number, op, nbytes(place))
            use(place, inbox.tensor(note, dtype))
            inbox.done(note)

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: str) -> Work:
        flat = tensor.detach().view(-1)
        registered = self._registered.get(tensor.untyped_storage().data_ptr())
        if registered is not None:
            return self._all_reduce_in_place(flat, registered, op)
        kind, nbytes = Collective.ALL_REDUCE.value, flat.numel() * flat.element_size()
        block = self._give(flat, readers=self.size)  # this rank reads it too
        for place in self._others:
            self._post(kind, block, place, nbytes=nbytes)
        expected = self._expect(self._others)

        def finish() -> None:
            notes = [self._take(inbox, number, kind, nbytes) for inbox, number in expected]
            theirs = [
                inbox.tensor(note, flat.dtype)
                for (inbox, _), note in zip(expected, notes, strict=True)
            ]
            mine = block.segment.tensor(flat.dtype, nbytes)
            _combine([*theirs[: self.index], mine, *theirs[self.index :]], flat, op)
            for (inbox, _), note in zip(expected, notes, strict=True):
                inbox.done(note)
            self._blocks.read(block)

        return _Pending(finish)

    def _all_reduce_in_place(self, flat: Tensor, memory: _Registered, op: str) -> Work:
        """Each rank sums up its part of everyone's memory and writes it back to all."""
        kind, nbytes = Collective.ALL_REDUCE.value, flat.numel() * flat.element_size()
        start = int(flat.storage_offset()) * flat.element_size()
        self._in_place += 1
        number = self._in_place
        for place in self._others:
            self._post(kind, None, place, nbytes=nbytes, extra=start)
        expected = self._expect(self._others)

        def finish() -> None:
            for inbox, ticket in expected:
                note = self._take(inbox, ticket, kind, nbytes)
                if note.extra != start:
                    raise RuntimeError(f"rank {inbox.peer.rank} reduces another part of a buffer")
                inbox.done(note)
            views = [part[start : start + nbytes].view(flat.dtype) for part in memory.parts]
            first = flat.numel() * self.index // self.size
            last = flat.numel() * (self.index + 1) // self.size
            for at in range(first, last, _CHUNK):
                slices = [view[at : min(at + _CHUNK, last)] for view in views]
                total = _ADD[op](slices[0], slices[1])
                for one in slices[2:]:
                    _ADD[op](total, one, out=total)
                for one in slices:
                    one.copy_(total)
            for place in self._others:
                self._post(kind, None, place, channel=_SECOND, extra=number)
            for place in self._others:
                self._second(place, number)

        return _Pending(finish)

    def _second(self, place: int, number: int) -> None:
        """Wait until a peer has finished its part of in-place sum `number`."""
        inbox = self._inboxes[_SECOND, place]
        while (place, number) not in self._early:
            note = inbox.take(inbox.expect(), self._timeout_s)
            inbox.done(note)
            self._early[place, note.extra] = note
        del self._early[place, number]

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in which `all_reduce` copies nothing in. Every member must ask, in one order."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(numel, dtype=dtype)
        block = Block(Segment.create(nbytes), readers=self.size)  # never given back
        for place in self._others:
            self._post(_REGISTER, block, place, nbytes=nbytes)
        parts: list[Tensor] = []
        expected = dict(zip(self._others, self._expect(self._others), strict=True))
        for place in range(self.size):
            if place == self.index:
                parts.append(block.segment.tensor(torch.uint8, nbytes))
                continue
            inbox, number = expected[place]
            note = self._take(inbox, number, _REGISTER, nbytes)
            parts.append(inbox.tensor(note, torch.uint8))
            inbox.done(note)
        mine = block.segment.tensor(dtype, nbytes)
        self._registered[mine.untyped_storage().data_ptr()] = _Registered(parts)
        return mine

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        kind = Collective.ALL_GATHER.value
        source = piece.detach().reshape(-1)
        places = out.detach().view(self.size, -1)
        nbytes = source.numel() * source.element_size()
        block = self._give(source, readers=len(self._others))
        for place in self._others:
            self._post(kind, block, place, nbytes=nbytes)
        expected = self._expect(self._others)
        mine = places[self.index]
        if mine.data_ptr() != source.data_ptr():
            mine.copy_(source)
        return _Pending(
            lambda: self._each(
                expected, self._others, kind, source.dtype, lambda place: nbytes,
                lambda place, data: _copy(places[place], data),
            )
        )  # fmt: skip

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        kind = Collective.REDUCE_SCATTER.value
        pieces = whole.detach().view(self.size, -1)
        flat = out.detach().view(-1)
        nbytes = flat.numel() * flat.element_size()
        for place in self._others:
            block = self._give(pieces[place], readers=1)
            self._post(kind, block, place, nbytes=nbytes)
        expected = self._expect(self._others)

        def finish() -> None:
            notes = [self._take(inbox, number, kind, nbytes) for inbox, number in expected]
            theirs = [
                inbox.tensor(note, flat.dtype)
                for (inbox, _), note in zip(expected, notes, strict=True)
            ]
            parts = [*theirs[: self.index], pieces[self.index], *theirs[self.index :]]
            _combine(parts, flat, "sum")
            for (inbox, _), note in zip(expected, notes, strict=True):
                inbox.done(note)

        return _Pending(finish)

    def all_to_all(
        self, out: Tensor, source: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Work:
        kind = Collective.ALL_TO_ALL.value
        given = list(torch.split(source.detach(), list(in_sizes)))
        wanted = list(torch.split(out.detach(), list(out_sizes)))
        for place in self._others:
            data = given[place].contiguous()
            nbytes = data.numel() * data.element_size()
            block = self._give(data, readers=1) if nbytes else None
            self._post(kind, block, place, nbytes=nbytes)
        expected = self._expect(self._others)
        wanted[self.index].copy_(given[self.index])

        def size(place: int) -> int:
            return wanted[place].numel() * wanted[place].element_size()

        return _Pending(
            lambda: self._each(
                expected, self._others, kind, out.dtype, size,
                lambda place, data: _copy(wanted[place], data),
            )
        )  # fmt: skip

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        kind = Collective.BROADCAST.value
        flat = tensor.detach().view(-1)
        nbytes = flat.numel() * flat.element_size()
        if source == self.index:
            block = self._give(flat, readers=len(self._others))
            for place in self._others:
                self._post(kind, block, place, nbytes=nbytes)
            return Done()
        expected = self._expect([source])
        return _Pending(
            lambda: self._each(
                expected, [source], kind, flat.dtype, lambda place: nbytes,
                lambda place, data: _copy(flat, data),
            )
        )  # fmt: skip

    def send(self, tensor: Tensor, *, to: int) -> Work:
        data = tensor.detach().contiguous()
        nbytes = data.numel() * data.element_size()
        block = self._give(data, readers=1)
        self._post(Collective.SEND.value, block, to, channel=_MESSAGES, nbytes=nbytes)
        return Done()

    def recv(self, tensor: Tensor, *, source: int) -> Work:
        flat = tensor.detach().view(-1)
        nbytes = flat.numel() * flat.element_size()
        expected = self._expect([source], _MESSAGES)
        return _Pending(
            lambda: self._each(
                expected, [source], Collective.SEND.value, flat.dtype, lambda place: nbytes,
                lambda place, data: _copy(flat, data),
            )
        )  # fmt: skip

    def barrier(self) -> Work:
        kind = Collective.BARRIER.value
        for place in self._others:
            self._post(kind, None, place)
        expected = self._expect(self._others)

        def finish() -> None:
            for inbox, number in expected:
                inbox.done(self._take(inbox, number, kind, 0))

        return _Pending(finish)


def _copy(into: Tensor, data: Tensor) -> None:
    into.view(-1).copy_(data)


def _combine(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    """`out` becomes the sum (max, min) in group order; it may be one of `parts`."""
    add = _ADD[op]
    if len(parts) == 2:
        add(parts[0], parts[1], out=out)
        return
    for at in range(0, out.numel(), _CHUNK):
        total = add(parts[0][at : at + _CHUNK], parts[1][at : at + _CHUNK])
        for part in parts[2:]:
            add(total, part[at : at + _CHUNK], out=total)
        out[at : at + _CHUNK].copy_(total)


def _name(op: int) -> str:
    if op == _REGISTER:
        return "registering memory"
    return Collective(op).name.lower()
