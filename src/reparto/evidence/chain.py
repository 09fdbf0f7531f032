"""The chain of a ledger: what a line is, and how to see that one was touched.

    {"body", "digest", "hmac", "kind", "prev", "seq", "time_s"}     one JSON object a line

`seq` counts from 1 and is the line number. `digest` is SHA-256 over the canonical text of `seq`,
`time_s`, `kind`, `body` and `prev`; `prev` is the previous line's digest, 64 zeros for the first;
`hmac` is HMAC-SHA-256 of the digest under the run's key. So no line can be changed, removed or
moved without breaking the chain, and nobody without the key can write a chain anew.

What a chain cannot show by itself is that its end was cut off; therefore count and head go into
every checkpoint manifest and `verify_ledger` takes them back. Rejected: a signature with a public
key, because its private half would lie in the same run directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reparto.errors import UserError
from reparto.evidence.canonical import canonical, digest_of, parse

MAX_LINE_BYTES = 1 << 20
GENESIS = "0" * 64
_FIELDS = frozenset({"seq", "time_s", "kind", "body", "prev", "digest", "hmac"})
_PURPOSE = b"reparto ledger line\n"


# --- lines ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Line:
    """One verified line."""

    seq: int
    """Line number, from 1."""

    time_s: float
    """Seconds since 1970 by the writer's clock; for people, never for order."""

    kind: str
    """What the body is: `stage`, `config`, `fault`, ..."""

    body: Mapping[str, object]
    """The content, JSON values only."""

    digest: str
    """SHA-256 in hex over the four above and the digest of the line before."""


def line_text(
    *, seq: int, time_s: float, kind: str, body: Mapping[str, object], prev: str, key: bytes
) -> tuple[bytes, str]:
    """The bytes of one line with its newline, and its digest."""
    content = {"seq": seq, "time_s": time_s, "kind": kind, "body": body, "prev": prev}
    digest = digest_of(content)
    sealed = {**content, "digest": digest, "hmac": _seal(key, digest)}
    return canonical(sealed) + b"\n", digest


def _seal(key: bytes, digest: str) -> str:
    return hmac.new(key, _PURPOSE + digest.encode("ascii"), hashlib.sha256).hexdigest()


# --- verifying -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LedgerReport:
    """What `verify_ledger` found."""

    passed: bool
    """Whether every line holds, and the ledger reaches as far as was known."""

    count: int
    """Good lines from the start, up to the first bad one."""

    head: str
    """Digest of the last good line; 64 zeros if there is none."""

    bad_line: int | None = None
    """Number of the first bad line, from 1; for a cut-off end, of the first line missing."""

    reason: str = ""
    """Why it is bad: one sentence."""

    torn_bytes: int = 0
    """Bytes after the last newline: a line that a crash cut off. `Ledger.open` moves it aside."""


class _Bad(Exception):
    """A line that does not hold, with the reason; never leaves this file."""


def verify_ledger(
    path: Path, key: bytes, *, known_count: int = 0, known_head: str = GENESIS
) -> LedgerReport:
    """Check every line of the ledger at `path`; the report names the first bad line and why.

    known_count, known_head   as a checkpoint manifest stores them: how many lines there were, and
                              the digest of the last of them. Without them a cut-off end that falls
                              on a line break cannot be seen.
    """
    lines, rest = split_lines(path)
    report = verify_lines(lines, key, known_count=known_count, known_head=known_head)
    if rest and report.passed:
        return LedgerReport(
            passed=False,
            count=report.count,
            head=report.head,
            bad_line=report.count + 1,
            reason=f"torn: {len(rest)} bytes without a line end, as a crash in the middle of a "
            "write leaves them",
            torn_bytes=len(rest),
        )
    return report


def read_ledger(path: Path, key: bytes) -> list[Line]:
    """All lines of a ledger that holds; `UserError` with line and reason if it does not."""
    lines, rest = split_lines(path)
    report = verify_lines(lines, key, known_count=0, known_head=GENESIS)
    if not report.passed:
        raise refusal(path, report)
    if rest:
        raise UserError(f"line {len(lines) + 1} is torn", where=str(path))
    return list(_walk(lines, key))


def verify_lines(
    lines: list[bytes], key: bytes, *, known_count: int, known_head: str
) -> LedgerReport:
    """`verify_ledger` on lines already read."""
    count, head = 0, GENESIS
    try:
        for line in _walk(lines, key):
            if line.seq == known_count and line.digest != known_head:
                raise _Bad("replaced: a checkpoint remembers another line at this place")
            count, head = line.seq, line.digest
        if count < known_count:
            raise _Bad(f"truncated: a checkpoint remembers {known_count} lines, here are {count}")
    except _Bad as bad:
        return LedgerReport(
            passed=False, count=count, head=head, bad_line=count + 1, reason=str(bad)
        )
    return LedgerReport(passed=True, count=count, head=head)


def _walk(lines: list[bytes], key: bytes) -> Iterator[Line]:
    """Each line that continues the chain; raises `_Bad` at the first that does not."""
    prev = GENESIS
    for number, text in enumerate(lines, start=1):
        line, line_prev, seal = _decode(text)
        if line.seq != number:
            if line.seq < number:
                fault = f"repeated: it says it is line {line.seq}, which stands further up"
            elif any(_has_seq(other, number) for other in lines[number:]):
                fault = f"reordered: it says it is line {line.seq}; line {number} is further down"
            else:
                fault = f"removed: line {number} is gone; this one says it is line {line.seq}"
            raise _Bad(fault)
        if not hmac.compare_digest(seal, _seal(key, line.digest)):
            raise _Bad("not sealed with this key: another run's line, a forged one, or a wrong key")
        if line_prev != prev:
            raise _Bad("replaced: the line before it is not the one it was written after")
        prev = line.digest
        yield line


def _decode(text: bytes) -> tuple[Line, str, str]:
    """One line as (content, prev, seal), after checking its form and its own digest."""
    if len(text) > MAX_LINE_BYTES:
        raise _Bad(f"not a ledger line: longer than {MAX_LINE_BYTES} bytes")
    try:
        raw = parse(text)
    except ValueError as error:
        raise _Bad(f"changed: not JSON ({error})") from error
    if not isinstance(raw, dict) or set(raw) != _FIELDS:
        raise _Bad("changed: its fields are not those of a ledger line")
    seq, time_s, kind, body = raw["seq"], raw["time_s"], raw["kind"], raw["body"]
    prev, digest, seal = raw["prev"], raw["digest"], raw["hmac"]
    if not (
        type(seq) is int
        and isinstance(time_s, int | float)
        and isinstance(kind, str)
        and isinstance(body, dict)
        and isinstance(prev, str)
        and isinstance(digest, str)
        and isinstance(seal, str)
        and seal.isascii()
    ):
        raise _Bad("changed: a field has another type than a ledger writes")
    content = {"seq": seq, "time_s": time_s, "kind": kind, "body": body, "prev": prev}
    try:
        matches, spelled = digest == digest_of(content), canonical(raw)
    except ValueError as error:
        raise _Bad(f"changed: {error}") from error
    if not matches:
        raise _Bad("changed: its content does not match its digest")
    if spelled != text:
        raise _Bad("changed: the same content, spelled in another way")
    return (
        Line(seq=seq, time_s=float(time_s), kind=kind, body=body, digest=digest),
        prev,
        seal,
    )


def _has_seq(text: bytes, seq: int) -> bool:
    with contextlib.suppress(_Bad):
        return _decode(text)[0].seq == seq
    return False


def split_lines(path: Path) -> tuple[list[bytes], bytes]:
    """Complete lines without their newlines, and the bytes after the last newline."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"ledger cannot be read: {error.strerror}", where=str(path)) from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError("ledger is not a plain file", where=str(path))
        *lines, rest = file.read().split(b"\n")
    return lines, rest


def refusal(path: Path, report: LedgerReport) -> UserError:
    """The report of a ledger that does not hold, as the error that stops a run."""
    return UserError(
        f"the ledger does not hold: line {report.bad_line}: {report.reason}",
        where=str(path),
        nearest="keep the file as evidence and start a new run directory",
    )
