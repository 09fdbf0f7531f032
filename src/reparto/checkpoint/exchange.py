"""How ranks agree about files: texts laid before all, errors raised alike.

A checkpoint is made and found by many ranks over one folder, and no rank may decide alone: one that
sees a full disk, a missing file or a damaged one would leave the others in a collective that never
ends. So each phase of work ends in a `meet`: every rank lays down a row, or the error that it had,
and all read the same rows.

The rows go through an `Exchange` that the caller supplies, so this room knows no process groups,
and a save in the background can have a group of its own. Rows are JSON, never pickled objects.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable

from pydantic import JsonValue

from reparto.errors import RepartoError, UserError

#: lays one text of every rank before all ranks, in rank order
Exchange = Callable[[bytes], list[bytes]]

Row = dict[str, JsonValue]

SPACE_ADVICE = "free the disk or lower recover.keep, then go on; nothing has to be repaired"
_OTHER_ADVICE = "repair the cause, then go on or resume; nothing else has to be repaired"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def alone(row: bytes) -> list[bytes]:
    """The exchange of a job of one rank."""
    return [row]


class NotAgreed(Exception):
    """At least one rank had an error; raised on all ranks with the same words.

    text     `rank 1: No space left on device (rank-00001.safetensors); rank 3: ...`
    advice   what to do next
    refused  a rank had a `UserError`: what was asked for cannot be, whatever is tried instead
    """

    def __init__(self, text: str, advice: str, *, refused: bool = False) -> None:
        self.text, self.advice, self.refused = text, advice, refused
        super().__init__(text)


def meet(exchange: Exchange, work: Callable[[], Row]) -> list[Row]:
    """Do `work`, lay its row before all ranks, and return all rows.

    Raises `NotAgreed` on every rank if `work` raised an error of files, values or memory on any;
    the rank that had it keeps it as the cause.
    """
    row: Row
    cause: Exception | None = None
    try:
        row = work()
    except (OSError, RepartoError, ValueError, RuntimeError, MemoryError) as error:
        cause = error
        no_space = isinstance(error, OSError) and error.errno in _NO_SPACE
        row = {
            "error": explain(error),
            "advice": SPACE_ADVICE if no_space else _OTHER_ADVICE,
            "refused": isinstance(error, UserError),
        }
    rows: list[Row] = [json.loads(text) for text in exchange(json.dumps(row).encode())]
    failed = [(rank, one) for rank, one in enumerate(rows) if "error" in one]
    if failed:
        text = "; ".join(f"rank {rank}: {one['error']}" for rank, one in failed)
        refused = any(one["refused"] is True for _, one in failed)
        raise NotAgreed(text, str(failed[0][1]["advice"]), refused=refused) from cause
    return rows


def explain(error: Exception) -> str:
    """An error in one line: `No space left on device (rank-00001.safetensors)`."""
    if isinstance(error, OSError):
        name = f" ({os.path.basename(str(error.filename))})" if error.filename else ""
        return f"{error.strerror or type(error).__name__}{name}"
    return str(error) or type(error).__name__
