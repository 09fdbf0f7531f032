"""The writer of a ledger: the append-only list of what a run decided and did.

A line is on the disk before `append` returns: 0.6 ms measured, for a handful of lines a run.
Opening verifies the whole chain, 0.1 ms a line. One process writes; a lock on the file keeps
any other out. Rejected: a ledger per rank, merged later, because then no order between ranks is
provable; the ranks report to the one writer.

What a line holds, and how a reader sees that one was touched: `chain.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from reparto.errors import Fault, UserError
from reparto.evidence.chain import (
    GENESIS,
    MAX_LINE_BYTES,
    LedgerReport,
    Line,
    line_text,
    read_ledger,
    refusal,
    split_lines,
    verify_ledger,
    verify_lines,
)

__all__ = [
    "GENESIS",
    "Ledger",
    "LedgerReport",
    "Line",
    "create_key",
    "load_key",
    "read_ledger",
    "verify_ledger",
]

KEY_BYTES = 32


# --- the key -------------------------------------------------------------------------------------


def create_key(path: Path) -> bytes:
    """Make the run's key: 32 random bytes in a new file that only its owner can read.

    Raises `UserError` if something is already there. The mode is 0600 under any umask.
    """
    key = os.urandom(KEY_BYTES)
    descriptor = _create(path)
    try:
        _write_all(descriptor, key)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)
    return key


def load_key(path: Path) -> bytes:
    """Read a key; `UserError` if it is missing, not 32 bytes, or open to others than its owner."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"key cannot be read: {error.strerror}", where=str(path)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise UserError("key is not a plain file of this user", where=str(path))
        if status.st_mode & 0o077:
            raise UserError(
                f"key is open to others (mode {stat.S_IMODE(status.st_mode):04o}), so it proves "
                "nothing",
                where=str(path),
                legal="mode 0600",
                nearest=f"chmod 600 {path}, if nobody else can have read it",
            )
        key = os.read(descriptor, KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(key) != KEY_BYTES:
        raise UserError(f"key has not {KEY_BYTES} bytes", where=str(path))
    return key


# --- writing -------------------------------------------------------------------------------------


class Ledger:
    """The one writer of a ledger file; made by `create` or `open`, closed by `close` or `with`.

    A lock on the file keeps a second writer out for as long as this one lives.
    """

    def __init__(self, path: Path, descriptor: int, key: bytes, clock: Callable[[], float]) -> None:
        """Private: takes over an open, locked descriptor."""
        self.path = path
        self._descriptor: int | None = descriptor
        self._key = key
        self._clock = clock
        self._count = 0
        self._head = GENESIS

    @property
    def count(self) -> int:
        """Lines written so far, over all openings."""
        return self._count

    @property
    def head(self) -> str:
        """Digest of the last line; 64 zeros before the first."""
        return self._head

    @classmethod
    def create(cls, path: Path, key: bytes, *, clock: Callable[[], float] = time.time) -> Ledger:
        """Start an empty ledger; `UserError` if the file exists."""
        descriptor = _create(path, append=True)
        try:
            _lock(descriptor, path)
            _sync_folder(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, key, clock)

    @classmethod
    def open(
        cls,
        path: Path,
        key: bytes,
        *,
        clock: Callable[[], float] = time.time,
        known_count: int = 0,
        known_head: str = GENESIS,
    ) -> Ledger:
        """Verify an existing ledger as `verify_ledger` does, and go on after its last line.

        A torn last line, the trace of a crash, is moved to a file beside it, and the next line
        says so. Anything else that does not hold raises a `UserError` with line and reason, and
        the file stays as it is.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            raise UserError(
                f"ledger cannot be opened: {error.strerror}", where=str(path)
            ) from error
        ledger = cls(path, descriptor, key, clock)
        try:
            _lock(descriptor, path)
            lines, rest = split_lines(path)
            report = verify_lines(lines, key, known_count=known_count, known_head=known_head)
            if not report.passed:
                raise refusal(path, report)
            ledger._count, ledger._head = report.count, report.head
            if rest:
                ledger._move_aside(rest)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def append(self, kind: str, body: Mapping[str, object]) -> str:
        """Write one line; return its digest, the new head, once it is on the disk.

        body holds JSON values (see `canonical`). Raises `TypeError` or `ValueError` for a body that
        cannot be written, and `Fault` if the disk refuses; after a `Fault` the ledger is closed,
        with the file as it was before the call wherever that could still be done.
        """
        if self._descriptor is None:
            raise ValueError(f"ledger {self.path} is closed")
        seq, time_s = self._count + 1, self._clock()
        text, digest = line_text(
            seq=seq, time_s=time_s, kind=kind, body=body, prev=self._head, key=self._key
        )
        if len(text) > MAX_LINE_BYTES:
            raise ValueError(
                f"a ledger line has at most {MAX_LINE_BYTES} bytes, this one {len(text)}; "
                "write the large part to a file and its digest here"
            )
        size = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, text)
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next opening moves a torn line aside
                os.ftruncate(self._descriptor, size)
            self.close()
            raise Fault(
                f"ledger line {seq} ({kind}) could not be written to {self.path}: "
                f"{error.strerror}; without a ledger the run leaves no evidence, so it stops; "
                "free the disk and resume"
            ) from error
        self._count, self._head = seq, digest
        return digest

    def close(self) -> None:
        """Let the file and its lock go; closing twice is allowed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _move_aside(self, rest: bytes) -> None:
        """Keep a torn line in a file of its own, cut it off here, and say so in the ledger."""
        assert self._descriptor is not None
        name = f"{self.path.name}.torn-{self._count + 1}-{hashlib.sha256(rest).hexdigest()[:8]}"
        aside = self.path.with_name(name)
        # The name holds the content's digest: if a crash came between the copy and the cut, the
        # copy that is already there is this one, and is written again.
        descriptor = os.open(
            aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            os.fchmod(descriptor, 0o600)
            _write_all(descriptor, rest)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _sync_folder(self.path.parent)
        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(rest))
        os.fsync(self._descriptor)
        self.append("ledger.torn", {"bytes": len(rest), "moved_to": name})


# --- files ---------------------------------------------------------------------------------------


def _create(path: Path, *, append: bool = False) -> int:
    """A new file of mode 0600, open for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | (os.O_APPEND if append else 0), 0o600)
    except OSError as error:
        raise UserError(
            f"file cannot be made: {error.strerror}",
            where=str(path),
            nearest="choose a new run directory" if isinstance(error, FileExistsError) else "",
        ) from error
    os.fchmod(descriptor, 0o600)  # a umask can only have taken bits of it away
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(
            "another process is writing this ledger",
            where=str(path),
            nearest="wait for that run to end, or end it",
        ) from error


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    """Make a new name in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
