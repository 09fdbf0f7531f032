"""The one record of what a rank did: a mapped ring of fixed records, and what is read out of it.

Every collective, every action of a schedule, every unshard, reduce, data wait, optimizer update and
save writes one record of 128 bytes into a memory-mapped file, one file a rank. Because the file is
mapped and each record has a fixed place, a supervisor reads the last records of a rank that is
stuck or dead without that rank's help. Metrics, the Chrome trace, the hang report, the check that
ranks agree and the test of bytes all come from here; there is no second bookkeeping.

Cost: one `struct.pack_into` when work starts and one when it ends, about 3.5 µs together
(`reparto bench overhead` measures it). The alternative, a list of Python objects flushed at step
end, costs the same and is lost with the process.

Three times stand in a record, all of one `Clock`:

    start_ns   the work was issued
    wait_ns    the host began to wait for it (equals start_ns for work that is not asynchronous)
    end_ns     the host went on

`end - wait` is the *exposed* part: the host stood still. `wait - start` is hidden behind compute.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

RECORD_BYTES = 128
#: records a ring keeps: 65,536 x 128 bytes = 8 MiB a rank, hundreds of steps of a small model
DEFAULT_CAPACITY = 65_536

_MAGIC = b"reparto1"
_HEADER = struct.Struct("<8sIIqQQ")  # magic, rank, capacity, step, next sequence, host pid
_HEADER_BYTES = 128
# sequence, step, microbatch, kind, state, op, lowered_as, group, payload, start, wait, end, digest
_TAG_BYTES = 68
_RECORD = struct.Struct(f"<QqhBBBBHQQQQI{_TAG_BYTES}s")
_STATE_AT, _WAIT_AT, _END_AT = 19, 40, 48  # where `end` writes
_SEQUENCE = struct.Struct("<Q")
_TIMES = struct.Struct("<QQ")


class Kind(IntEnum):
    """What a record is about; decides its row in the trace and its share in the metrics."""

    COLLECTIVE = 1
    ACTION = 2
    UNSHARD = 3
    RESHARD = 4
    REDUCE = 5
    DATA_WAIT = 6
    OPTIMIZER = 7
    SAVE = 8
    EVALUATE = 9
    STEP = 10


#: the stage of the five that a kind belongs to (DESIGN: the same five words everywhere)
STAGE_OF_KIND = {
    Kind.COLLECTIVE: "communicate",
    Kind.ACTION: "compute",
    Kind.UNSHARD: "communicate",
    Kind.RESHARD: "communicate",
    Kind.REDUCE: "synchronize",
    Kind.DATA_WAIT: "partition",
    Kind.OPTIMIZER: "synchronize",
    Kind.SAVE: "recover",
    Kind.EVALUATE: "compute",
    Kind.STEP: "synchronize",
}


class State(IntEnum):
    """A record is written twice: when its work starts and when it ends."""

    EMPTY = 0
    STARTED = 1
    DONE = 2


class Collective(IntEnum):
    """The operations of `comm/collectives.py`; `lowered_as` uses the same names."""

    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    SEND = 6
    RECV = 7
    BARRIER = 8


class Clock(Protocol):
    """Where times come from. Tests pass a clock of their own; CUDA runs pass one on events."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin that all processes of one host share."""
        ...


class HostClock:
    """CLOCK_MONOTONIC: never steps back, and the same for all processes of a host."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One line of the ring, read back."""

    sequence: int
    "running number on this rank, from 0"
    step: int
    "optimizer step it belongs to; 0 before the first"
    microbatch: int
    "-1 where none applies"
    kind: Kind
    state: State
    op: Collective
    lowered_as: Collective
    "what the backend really ran; equals op unless it was lowered"
    group: int
    "id of the communicator on this rank, 0 = none"
    payload_bytes: int
    "the larger of input and output on this rank; 0 where nothing is sent"
    start_ns: int
    wait_ns: int
    end_ns: int
    digest: int
    "crc32 of operation, group, shape, dtype and tag: equal on ranks that do the same"
    tag: str
    "what and why, such as `reduce layers.3`"

    @property
    def exposed_s(self) -> float:
        """Seconds the host stood still for this; 0 while it is not finished."""
        return max(0, self.end_ns - self.wait_ns) / 1e9 if self.state == State.DONE else 0.0

    @property
    def span_s(self) -> float:
        """Seconds from issue to end."""
        return max(0, self.end_ns - self.start_ns) / 1e9 if self.state == State.DONE else 0.0


class Ring:
    """The writer's side: one mapped file, one writer, the oldest records overwritten."""

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int,
        capacity: int = DEFAULT_CAPACITY,
        clock: Clock | None = None,
    ) -> None:
        """`path=None` keeps the ring in anonymous memory (tests, benchmarks)."""
        self.rank = rank
        self.capacity = capacity
        self.clock: Clock = clock or HostClock()
        self.step = 0
        self.microbatch = -1
        self.sequence = 0
        self.fingerprint = 0  # rolling crc32 of the digests of this step's collectives
        size = _HEADER_BYTES + capacity * RECORD_BYTES
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
            try:
                os.ftruncate(descriptor, size)
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        self._write_header()

    def _write_header(self) -> None:
        _HEADER.pack_into(
            self._map, 0, _MAGIC, self.rank, self.capacity, self.step, self.sequence, os.getpid()
        )

    def set_step(self, step: int) -> None:
        """Name the step that the next records belong to, and start its fingerprint anew."""
        self.step = step
        self.fingerprint = 0
        self._write_header()

    def start(
        self,
        kind: Kind,
        tag: str,
        *,
        op: Collective = Collective.NONE,
        lowered_as: Collective = Collective.NONE,
        group: int = 0,
        payload_bytes: int = 0,
        digest: int = 0,
    ) -> int:
        """Write the first half of a record; returns its sequence number for `end`."""
        sequence = self.sequence
        self.sequence = sequence + 1
        at = _HEADER_BYTES + (sequence % self.capacity) * RECORD_BYTES
        now = self.clock.now_ns()
        text = tag.encode("utf-8", "replace")[:_TAG_BYTES]
        _RECORD.pack_into(
            self._map,
            at,
            sequence,
            self.step,
            self.microbatch,
            kind,
            State.STARTED,
            op,
            lowered_as or op,
            group,
            payload_bytes,
            now,
            now,
            0,
            digest,
            text,
        )
        if digest:
            self.fingerprint = zlib.crc32(digest.to_bytes(4, "little"), self.fingerprint)
        return sequence

    def end(self, sequence: int, *, waited_since_ns: int = 0) -> int:
        """Write the second half; `waited_since_ns` is when the host began to wait.

        Returns the exposed nanoseconds. A record that was overwritten meanwhile is left alone.
        """
        at = _HEADER_BYTES + (sequence % self.capacity) * RECORD_BYTES
        now = self.clock.now_ns()
        if _SEQUENCE.unpack_from(self._map, at)[0] != sequence:
            return max(0, now - waited_since_ns) if waited_since_ns else 0
        self._map[at + _STATE_AT] = State.DONE
        if waited_since_ns:
            _TIMES.pack_into(self._map, at + _WAIT_AT, waited_since_ns, now)
        else:
            _SEQUENCE.pack_into(self._map, at + _END_AT, now)
            waited_since_ns = _SEQUENCE.unpack_from(self._map, at + _WAIT_AT)[0]
        return max(0, now - waited_since_ns)

    def span(self, kind: Kind, tag: str) -> Span:
        """`with ring.span(Kind.OPTIMIZER, "adamw"): ...` writes one record around the block."""
        return Span(self, kind, tag)

    def records(self, *, since: int = 0) -> list[Record]:
        """The records still in the ring, oldest first, from sequence number `since` on."""
        first = max(since, self.sequence - self.capacity)
        return [_read(self._map, s % self.capacity) for s in range(first, self.sequence)]

    def close(self) -> None:
        self._write_header()
        self._map.close()


class Span:
    """A record around a `with` block; `seconds` is known afterwards."""

    __slots__ = ("_kind", "_ring", "_sequence", "_tag", "seconds")

    def __init__(self, ring: Ring, kind: Kind, tag: str) -> None:
        self._ring, self._kind, self._tag = ring, kind, tag
        self._sequence = -1
        self.seconds = 0.0

    def __enter__(self) -> Span:
        self._sequence = self._ring.start(self._kind, self._tag)
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._ring.end(self._sequence) / 1e9


def _read(buffer: mmap.mmap | bytes, slot: int) -> Record:
    at = _HEADER_BYTES + slot * RECORD_BYTES
    fields = _RECORD.unpack_from(buffer, at)
    tag = bytes(fields[13]).rstrip(b"\0")
    return Record(
        sequence=fields[0],
        step=fields[1],
        microbatch=fields[2],
        kind=Kind(fields[3]),
        state=State(fields[4]),
        op=Collective(fields[5]),
        lowered_as=Collective(fields[6]),
        group=fields[7],
        payload_bytes=fields[8],
        start_ns=fields[9],
        wait_ns=fields[10],
        end_ns=fields[11],
        digest=fields[12],
        tag=tag.decode("utf-8", "replace"),
    )


def read_ring(path: Path) -> tuple[int, int, list[Record]]:
    """Read another process's ring: `(rank, step, records oldest first)`.

    Works on a live, stuck or dead rank. Raises `ValueError` if the file is not a ring.
    """
    data = path.read_bytes()
    if len(data) < _HEADER_BYTES or not data.startswith(_MAGIC):
        raise ValueError(f"{path} is not a record ring")
    _, rank, capacity, step, _, _ = _HEADER.unpack_from(data, 0)
    if len(data) != _HEADER_BYTES + capacity * RECORD_BYTES:
        raise ValueError(f"{path} has {len(data)} bytes, its header says {capacity} records")
    used = [
        slot
        for slot in range(capacity)
        if data[_HEADER_BYTES + slot * RECORD_BYTES + _STATE_AT] != State.EMPTY
    ]
    records = sorted((_read(data, slot) for slot in used), key=lambda record: record.sequence)
    return rank, step, records


def last_unfinished(records: Iterable[Record]) -> Record | None:
    """The oldest record whose work has begun and not ended: where a stuck rank stands."""
    return next((record for record in records if record.state == State.STARTED), None)


_ROW_OF_KIND = {
    Kind.STEP: 0,
    Kind.ACTION: 1,
    Kind.UNSHARD: 2,
    Kind.RESHARD: 2,
    Kind.REDUCE: 2,
    Kind.COLLECTIVE: 3,
    Kind.DATA_WAIT: 4,
    Kind.OPTIMIZER: 5,
    Kind.SAVE: 6,
    Kind.EVALUATE: 6,
}


def chrome_trace(records: Iterable[Record], *, rank: int) -> str:
    """The Chrome trace (JSON) of one rank, for chrome://tracing or Perfetto.

    A collective gets two spans: the whole of it, and inside it `exposed`, the part the host
    waited for. Times are microseconds of the host's monotonic clock, so that the files of all
    ranks of a host line up when loaded together.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    ]
    for kind, row in _ROW_OF_KIND.items():
        events.append(
            {
                "ph": "M",
                "pid": rank,
                "tid": row,
                "name": "thread_name",
                "args": {"name": kind.name.lower()},
            }
        )
    for record in records:
        if record.state != State.DONE:
            continue
        common: dict[str, object] = {
            "ph": "X",
            "pid": rank,
            "tid": _ROW_OF_KIND[record.kind],
            "cat": STAGE_OF_KIND[record.kind],
        }
        args: dict[str, object] = {"step": record.step, "sequence": record.sequence}
        if record.microbatch >= 0:
            args["microbatch"] = record.microbatch
        if record.kind == Kind.COLLECTIVE:
            args |= {
                "op": record.op.name.lower(),
                "lowered_as": record.lowered_as.name.lower(),
                "payload_bytes": record.payload_bytes,
                "exposed_us": (record.end_ns - record.wait_ns) / 1e3,
            }
        events.append(
            common
            | {
                "name": record.tag,
                "ts": record.start_ns / 1e3,
                "dur": max(0, record.end_ns - record.start_ns) / 1e3,
                "args": args,
            }
        )
        if record.kind == Kind.COLLECTIVE and record.wait_ns > record.start_ns:
            events.append(
                common
                | {
                    "name": "exposed",
                    "ts": record.wait_ns / 1e3,
                    "dur": max(0, record.end_ns - record.wait_ns) / 1e3,
                    "args": {"step": record.step},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
