"""Load: find the newest whole checkpoint, all ranks the same one, or stop.

Nothing points to "the latest": the folder is scanned, every candidate is proven, and what does not
hold is named and passed over for the one before. (A pointer file can be lost, torn or stale, and a
run that trusts it starts from random weights or from half a checkpoint.) Over several ranks each
proves its share of the files, and all go on with the same checkpoint or none.

Reading: `stored.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from reparto.checkpoint.exchange import Exchange, NotAgreed, Row, alone, meet
from reparto.checkpoint.files import StepFolder, refuse_missing_root, step_folders
from reparto.checkpoint.layout import Damaged
from reparto.checkpoint.stored import Checkpoint, open_checkpoint
from reparto.errors import UserError

__all__ = ["Checkpoint", "Found", "candidates", "find_latest", "open_checkpoint", "torn_text"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The checkpoint to go on from, proven, and what was passed over to get to it."""

    checkpoint: Checkpoint
    skipped: tuple[str, ...]
    "one line for each newer folder that does not hold: step, file, what"


def find_latest(
    root: Path,
    *,
    key: bytes,
    run: str | None = None,
    before: int | None = None,
    rank: int = 0,
    exchange: Exchange = alone,
) -> Found:
    """The newest whole checkpoint in `root`; every digest of it has been checked.

    run       only those of this run; without it, of any run that signs with `key`
    before    only steps below this one, to fall back further
    exchange  see `exchange.py`; all ranks look at rank 0's list and take the same one

    Raises `UserError` if there is none, saying what was passed over and why: a run that was asked
    to go on never starts from fresh weights by itself.
    """

    def listed() -> Row:
        if rank:
            return {}
        refuse_missing_root(root)
        folders = [one for one in step_folders(root) if before is None or one.step < before]
        return {
            "candidates": [one.path.name for one in candidates(folders)],
            "torn": [torn_text(one) for one in reversed(folders) if one.kind == "tmp"],
        }

    try:
        first = meet(exchange, listed)[0]
    except NotAgreed as error:
        raise _nothing_found(root, [error.text]) from error
    names, skipped = _texts(first["candidates"]), _texts(first["torn"])
    for name in names:
        try:
            checkpoint = _proven(root / name, key=key, run=run, rank=rank, exchange=exchange)
        except NotAgreed as error:
            if error.refused:  # whole, but not ours to read: falling back would lose its steps
                raise UserError(f"{name}: {error.text}", where=str(root)) from error
            skipped.append(f"{name}: {error.text}")
            continue
        if checkpoint is not None:
            return Found(checkpoint=checkpoint, skipped=tuple(skipped))
    raise _nothing_found(root, skipped)


def candidates(folders: Iterable[StepFolder]) -> list[StepFolder]:
    """Newest first. Those that another one replaced come last: they are the way back of a run
    that has gone on from an older step."""
    whole = [one for one in folders if one.kind in ("published", "replaced")]
    return sorted(whole, key=lambda one: (one.kind == "replaced", -one.step, one.path.name))


def torn_text(folder: StepFolder) -> str:
    """What is left of a save that did not end."""
    try:
        files = len(os.listdir(folder.path))
    except OSError:
        files = 0
    return f"{folder.path.name}: step {folder.step} is incomplete ({files} files, not published)"


def _proven(
    path: Path, *, key: bytes, run: str | None, rank: int, exchange: Exchange
) -> Checkpoint | None:
    """The checkpoint at `path`, each rank having digested its share; None if of another run."""
    opened: list[Checkpoint] = []

    def look() -> Row:
        opened.append(open_checkpoint(path, key))
        return {"manifest": opened[0].parent.manifest}

    rows = meet(exchange, look)
    checkpoint = opened[0]

    def prove() -> Row:
        if rows[rank] != rows[0]:
            raise Damaged(path, "this rank sees another manifest than rank 0")
        checkpoint.verify(share=rank, shares=len(rows))
        return {}

    if run is not None and checkpoint.manifest.run != run:
        return None
    meet(exchange, prove)
    checkpoint.trust_other_ranks()
    return checkpoint


def _nothing_found(root: Path, skipped: Sequence[str]) -> UserError:
    seen = "".join(f"\n  passed over: {one}" for one in skipped)
    return UserError(
        f"no whole checkpoint to go on from{seen}",
        where=str(root),
        legal="a folder that holds a whole step-N of this run",
        nearest="start a new run without --resume",
    )


def _texts(value: JsonValue) -> list[str]:
    assert isinstance(value, list)
    return [str(one) for one in value]
