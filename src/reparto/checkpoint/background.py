"""Saving while training goes on: copy, return, write on a thread.

    save    waits for (or gives way to) a save that is still being written; copies what this rank
            owns into one buffer in host memory, kept from save to save; starts a thread; returns
    thread  `Saver.publish` of the copy: hash, write, fsync, agree, publish, retain

What training waits for is the copy alone: 300 MB at memory speed is 0.1 s, where writing them takes
seconds. The price is that buffer, once the bytes that the rank writes. One save at most is in
flight, so memory does not grow when the disk is slower than the interval, and that is said instead.

The thread agrees with the threads of other ranks through an `Exchange` of its own: on the group
that training uses, its messages would come between those of a step. It runs at a lower priority
than the step it shares a core with. A save that failed is raised by the next call, on all ranks.

Rejected: a process of its own, which needs the buffer in shared memory and a second address space
to supervise, and gains only the interpreter lock, which hashing and writing do not hold; two
buffers, which let a second save start early and then wait for the same disk.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from reparto.checkpoint.exchange import Exchange, Row, alone, meet
from reparto.checkpoint.save import Saver, SaveReport
from reparto.checkpoint.snapshot import Contribution, Snapshot

#: added to the thread's niceness: a tenth of a core's share where the step wants all of it
_NICENESS = 10


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a call of `save` did; equal on all ranks but the times."""

    step: int
    "step that it was asked to save"
    skipped_for: int | None
    "step that was still being written, for which this one was left out; None if it was started"
    waited_s: float
    "seconds that this rank waited for the save before"
    copied_s: float
    "seconds that the copy took: what training paid"


@dataclass(kw_only=True)
class _Flight:
    """One save on its way. Written by its thread, read after `done` is set."""

    thread: threading.Thread | None = None
    report: SaveReport | None = None
    error: BaseException | None = None


class BackgroundSaver:
    """A `Saver` whose `save` returns after a copy. All ranks call every method alike.

    Use as a context manager, or call `finish` at the end: a save still in flight when the process
    ends is lost, though never half published.
    """

    def __init__(
        self,
        saver: Saver,
        *,
        when_busy: Literal["wait", "skip"] = "wait",
        agree: Exchange = alone,
    ) -> None:
        """saver      its exchange is used on the thread, and must be on a group of its own
        when_busy  what `save` does while the last one is being written
        agree      for the calling thread; used by `skip` only, where ranks must skip alike
        """
        self._saver, self._when_busy, self._agree = saver, when_busy, agree
        self._clock = saver.clock
        self._buffer: Tensor | None = None
        self._flight: _Flight | None = None
        self._last_step: int | None = None
        self._reports: list[SaveReport] = []

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._flight is not None and _running(self._flight)

    def reserve(self, snapshot: Snapshot) -> None:
        """Take the buffer's memory before the first save, which otherwise pays for it."""
        self._memory(Contribution.of(snapshot)).zero_()

    def save(self, snapshot: Snapshot) -> Started:
        """Start a save of the values as they are now, or leave it out by the rule.

        Raises what the save before failed with (`SaveFailed`, alike on all ranks).
        """
        began = self._clock()
        if self._when_busy == "skip" and self._others_busy():
            waited = self._clock() - began
            return Started(
                step=snapshot.step, skipped_for=self._last_step, waited_s=waited, copied_s=0
            )
        self._land()
        waited = self._clock() - began
        part = Contribution.of(snapshot)
        part = part.copied_into(self._memory(part))
        copied = self._clock() - began - waited
        flight = self._flight = _Flight()
        self._last_step = snapshot.step
        flight.thread = threading.Thread(
            target=self._write, args=(flight, part), name=f"save-{snapshot.step}", daemon=True
        )
        flight.thread.start()
        return Started(step=snapshot.step, skipped_for=None, waited_s=waited, copied_s=copied)

    def reports(self) -> list[SaveReport]:
        """Of the saves that have ended since the last call. Raises nothing, waits for nothing."""
        if self._flight is not None and not _running(self._flight) and self._flight.report:
            self._reports.append(self._flight.report)
            self._flight = None
        found, self._reports = self._reports, []
        return found

    def finish(self) -> list[SaveReport]:
        """Wait for the save in flight; the reports not yet asked for. Raises what it failed with"""
        self._land()
        return self.reports()

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        # after an error the peers may be gone, and waiting for them would hide it

    def _others_busy(self) -> bool:
        """Whether any rank is still writing; all ranks get the same answer.

        A rank whose save has failed says so, and then all land: the failure is theirs too.
        """
        flight = self._flight

        def look() -> Row:
            running = flight is not None and _running(flight)
            return {"busy": running, "failed": bool(flight and not running and flight.error)}

        rows = meet(self._agree, look)
        return any(row["busy"] for row in rows) and not any(row["failed"] for row in rows)

    def _land(self) -> None:
        """Wait for the save in flight, and raise what it failed with."""
        flight = self._flight
        if flight is None or flight.thread is None:
            return
        flight.thread.join()
        self._flight = None
        if flight.error is not None:
            raise flight.error
        if flight.report is not None:
            self._reports.append(flight.report)

    def _memory(self, part: Contribution) -> Tensor:
        """The buffer, grown if need be; page-locked where it is filled from a GPU."""
        needed = part.num_bytes
        if self._buffer is None or self._buffer.numel() < needed:
            self._buffer = None  # let the old one go first: both at once may not fit
            from_gpu = any(piece.tensor.is_cuda for piece in part.pieces)
            self._buffer = torch.empty(needed, dtype=torch.uint8, pin_memory=from_gpu)
        return self._buffer

    def _write(self, flight: _Flight, part: Contribution) -> None:
        if sys.platform == "linux":  # there a priority belongs to a thread, not to its process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _niceness())
        try:
            flight.report = self._saver.publish(part)
        except BaseException as error:  # carried to the caller's thread by `_land`
            flight.error = error


def _niceness() -> int:
    return min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def _running(flight: _Flight) -> bool:
    return flight.thread is not None and flight.thread.is_alive()
