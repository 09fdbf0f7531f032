"""Save: every rank writes what it owns, rank 0 signs it, one rename publishes it.

    1 begin     rank 0 makes `step-N.tmp-NONCE`; sizes and free space are laid before all ranks
    2 write     each rank one file, hashed while written, fsynced
    3 seal      rank 0 checks that the pieces tile every tensor, writes the manifest last, renames
    4 retain    rank 0 deletes what is older than the last N valid ones

1, 2 and 3 end in a meeting (`exchange.py`), so no rank ends a save that another goes on with. A
failure anywhere raises one and the same `SaveFailed` on all ranks and deletes nothing but the
unfinished folder. The cost is three all-gathers of a few KB a save. Rejected: every rank making the
folder (a race on shared file systems), and a marker file for "done" beside the manifest (two
truths).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from reparto.checkpoint import layout
from reparto.checkpoint.exchange import SPACE_ADVICE, Exchange, NotAgreed, Row, alone, meet
from reparto.checkpoint.files import (
    folder_bytes,
    folder_name,
    free_bytes,
    make_private_folder,
    remove_folder,
    step_folders,
    sync_folder,
    write_file,
)
from reparto.checkpoint.layout import file_of_rank
from reparto.checkpoint.retain import Retention
from reparto.checkpoint.snapshot import Contribution, Snapshot
from reparto.errors import Fault, UserError
from reparto.units import human_bytes

#: manifest, folder entries and what the file system itself needs
_MARGIN_BYTES = 1 << 20


class SaveFailed(Fault):
    """A save did not come to an end; the checkpoints before it are as they were. Exit status 4."""


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did."""

    path: Path
    "the published folder"
    step: int
    num_bytes: int
    "bytes of tensor files, over all ranks"
    seconds: float
    "from the call to the publication, on this rank"
    manifest: str
    "SHA-256 of `manifest.json`"
    deleted: tuple[str, ...] = ()
    "names of older folders that were deleted; on rank 0 only"
    notes: tuple[str, ...] = ()
    "what retention left alone, and why; on rank 0 only"


class Saver:
    """Writes the checkpoints of one run. All ranks make one and call `save` alike."""

    def __init__(
        self,
        root: Path,
        *,
        run: str,
        key: bytes,
        rank: int = 0,
        exchange: Exchange = alone,
        keep: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """root      folder that gets the `step-N` folders; made if missing
        run       name of the run, the same over its resumes
        key       the run's secret, which signs manifests
        exchange  see `exchange.py`; called on the thread that calls `save`
        keep      valid checkpoints of this run that stay
        """
        if keep < 1:
            raise UserError(
                f"{keep} checkpoints would be kept", where="recover.keep", legal="1 or more"
            )
        self.root, self.run, self.rank = root, run, rank
        self.clock = clock
        self._key, self._exchange = key, exchange
        self._retention = Retention(root, run=run, key=key, keep=keep)

    def save(self, snapshot: Snapshot) -> SaveReport:
        """Write, publish, then delete what is too old. Raises `SaveFailed`, alike on all ranks."""
        return self.publish(Contribution.of(snapshot))

    def publish(self, part: Contribution) -> SaveReport:
        """`save` of something already prepared (a copy made for a save in the background)."""
        started = self.clock()
        try:
            folder = self._begin(part)
            try:
                total, digest = self._write_and_seal(folder, part)
            except BaseException:
                self._clear(folder)
                raise
        except NotAgreed as error:
            raise SaveFailed(
                f"step {part.step} was not saved: {error.text}\n"
                f"  the checkpoints before it in {self.root} are as they were\n"
                f"  next: {error.advice}"
            ) from error
        seconds = self.clock() - started
        deleted, notes = self._retention.apply(part.step) if self.rank == 0 else ((), ())
        return SaveReport(
            path=self.root / folder_name(part.step), step=part.step, num_bytes=total,
            seconds=seconds, manifest=digest, deleted=deleted, notes=notes,
        )  # fmt: skip

    # --- the three meetings ----------------------------------------------------------------------

    def _begin(self, part: Contribution) -> Path:
        """Agree that this save may start; the folder to write in."""
        folder = self.root / folder_name(part.step, "tmp", run=self.run)

        def prepare() -> Row:
            part.refuse_faults()
            row: Row = {"run": self.run, "step": part.step, "bytes": part.num_bytes}
            if self.rank == 0:
                make_private_folder(self.root, exist_ok=True)
                make_private_folder(folder)
                row |= {"folder": folder.name, "free": free_bytes(self.root)}
            return row

        try:
            rows = meet(self._exchange, prepare)
            self._refuse_start(rows)
        except BaseException:
            self._clear(folder)
            raise
        return self.root / str(rows[0]["folder"])

    def _refuse_start(self, rows: list[Row]) -> None:
        """Read the same verdict from the same rows: one step of one run, and room for it."""
        first = rows[0]
        for rank, row in enumerate(rows):
            if (row["run"], row["step"]) != (first["run"], first["step"]):
                raise NotAgreed(
                    f"rank {rank} saves step {row['step']} of run {row['run']}, rank 0 step "
                    f"{first['step']} of run {first['run']}",
                    "all ranks must save the same step of the same run",
                )
        needed = sum(_number(row, "bytes") for row in rows) + _MARGIN_BYTES
        free = _number(first, "free")
        if needed > free:
            raise NotAgreed(_space_text(self.root, needed=needed, free=free), SPACE_ADVICE)

    def _write_and_seal(self, folder: Path, part: Contribution) -> tuple[int, str]:
        """Phases 2 and 3; bytes over all ranks, and the digest of the manifest."""

        def write() -> Row:
            metadata = {"format": "pt", "run": self.run, "step": str(part.step)}
            entry = part.write(folder / file_of_rank(self.rank), metadata)
            return {
                "pieces": part.rows(),
                "per_rank": part.per_rank,
                "file": None if entry is None else entry.model_dump(),
            }

        rows = meet(self._exchange, write)

        def seal() -> Row:
            if self.rank:
                return {}
            raw = layout.encode(assemble(self.run, part, rows), self._key)
            if len(raw) > layout.MAX_MANIFEST_BYTES:
                raise UserError(f"the manifest would have {len(raw)} bytes")
            write_file(folder / layout.MANIFEST, [raw])
            sync_folder(folder)
            self._retention.make_way(part.step)
            os.rename(folder, self.root / folder_name(part.step))
            sync_folder(self.root)
            return {"manifest": layout.digest(raw)}

        verdict = meet(self._exchange, seal)[0]
        files = [row["file"] for row in rows]
        total = sum(_number(file, "bytes") for file in files if isinstance(file, dict))
        return total, str(verdict["manifest"])

    def _clear(self, folder: Path) -> None:
        """Rank 0 removes an unfinished folder; what cannot be removed goes after the next save."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                remove_folder(folder)


def assemble(run: str, part: Contribution, rows: list[Row]) -> layout.Manifest:
    """One manifest out of rank 0's values and all ranks' rows.

    Raises `UserError` if the pieces do not fit together: gaps, overlaps, two shapes of one name.
    """
    tensors: dict[str, Row] = {}
    files: Row = {}
    for rank, row in enumerate(rows):
        if row["file"] is not None:
            files[file_of_rank(rank)] = row["file"]
        pieces = row["pieces"]
        assert isinstance(pieces, list)
        for piece in pieces:
            assert isinstance(piece, list)
            _add_piece(tensors, rank, *piece)
    for alias, name in part.aliases.items():
        if name not in tensors or alias in tensors:
            raise UserError(f"{alias} is said to be {name}, which does not fit what is saved")
        tensors[alias] = {**tensors[name], "pieces": [], "alias_of": name}
    own = [row["per_rank"] for row in rows]
    if None in own and any(one is not None for one in own):
        raise UserError(f"rank {own.index(None)} gives no values of its own, others do")
    return layout.build(
        run=run,
        step=part.step,
        plan=part.plan,
        tensors=tensors,
        files=files,
        per_rank=None if None in own else {str(rank): one for rank, one in enumerate(own)},
        state=part.state,
        parent=None if part.parent is None else part.parent.model_dump(),
    )


def _add_piece(
    tensors: dict[str, Row],
    rank: int,
    name: JsonValue,
    shape: JsonValue,
    dtype: JsonValue,
    start: JsonValue,
    size: JsonValue,
) -> None:
    entry = tensors.setdefault(str(name), {"shape": shape, "dtype": dtype, "pieces": []})
    if (entry["shape"], entry["dtype"]) != (shape, dtype):
        raise UserError(
            f"rank {rank} has {name} as {dtype} {shape}, another rank as {entry['dtype']} "
            f"{entry['shape']}"
        )
    pieces = entry["pieces"]
    assert isinstance(pieces, list)
    pieces.append({"file": file_of_rank(rank), "start": start, "size": size})


# --- space ---------------------------------------------------------------------------------------


def refuse_small_disk(root: Path, *, checkpoint_bytes: int, keep: int) -> None:
    """Before a run starts: `UserError` unless `keep` checkpoints and the next one will fit.

    root              an existing folder on the file system in question
    checkpoint_bytes  weights and moments: three times the master weights
    """
    there = sum(folder_bytes(one.path) for one in step_folders(root))
    free = free_bytes(root)
    most = max(0, (free + there - _MARGIN_BYTES) // max(1, checkpoint_bytes) - 1)
    if keep > most:
        needed = checkpoint_bytes * (keep + 1) + _MARGIN_BYTES - there
        raise UserError(
            _space_text(root, needed=needed, free=free),
            where="recover.keep",
            legal=f"1 to {most}" if most else "no number: not even two checkpoints fit",
            nearest=f"recover.keep={most}" if most else "free the disk, or choose another folder",
        )


def _space_text(root: Path, *, needed: int, free: int) -> str:
    """Needed and free bytes, and what takes most of them."""
    sizes = sorted((folder_bytes(one.path), one.path.name) for one in step_folders(root))[::-1]
    largest = ", ".join(f"{name} {human_bytes(size)}" for size, name in sizes[:3] if size)
    text = f"needs {human_bytes(needed)} in {root}, free are {human_bytes(free)}"
    return f"{text}; largest there: {largest}" if largest else text


def _number(row: Row, name: str) -> int:
    value = row[name]
    assert isinstance(value, int)
    return value
