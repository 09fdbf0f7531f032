"""What stays and what goes: the last N valid checkpoints of this run, and nothing that is not ours.

Deleting is the one act of this room that cannot be taken back, so it comes last and trusts least:
it starts only when the new checkpoint has been read back from its published place, it counts only
checkpoints that have been proven by digest, and it deletes only folders whose signed manifest says
that they belong to this run. Those of other runs stay, and so do damaged ones until N valid ones
are newer (or for good, if their manifest is what is damaged); all are named. Order is by step as a
number, never by text or time.

Proof costs a reading of the whole checkpoint, so it is done once: a folder whose files all have the
identity (inode, size, times) that they had then is taken as proven. Bits that rot on a disk without
a write are what `checkpoint check` is for.
"""

from __future__ import annotations

import os
from pathlib import Path

from reparto.checkpoint.exchange import explain
from reparto.checkpoint.files import (
    Identity,
    StepFolder,
    folder_name,
    identities,
    remove_folder,
    run_tag,
    step_folders,
    sync_folder,
)
from reparto.checkpoint.layout import Damaged
from reparto.checkpoint.load import candidates, open_checkpoint
from reparto.errors import RepartoError


class Retention:
    """Rank 0's housekeeping of one `checkpoints` folder."""

    def __init__(self, root: Path, *, run: str, key: bytes, keep: int) -> None:
        self._root, self._run, self._key, self._keep = root, run, key, keep
        self._proven: dict[str, dict[str, Identity]] = {}
        self._damaged: dict[str, tuple[dict[str, Identity], Damaged]] = {}

    def make_way(self, step: int) -> None:
        """Before `step-N` is published: take the names that would contradict it.

        `step-N` itself may be there, damaged or from before a fall-back. Steps of this run above N
        belong to a course that the run has left; under their names they would be taken for newer.
        Both become `.replaced`: still whole, looked at last, deleted in their turn.
        """
        for folder in step_folders(self._root):
            if folder.kind != "published" or folder.step < step:
                continue
            if folder.step > step and not self._is_ours(folder):
                continue
            os.rename(folder.path, self._root / folder_name(folder.step, "replaced", run=self._run))

    def apply(self, step: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """After `step-N` was published: `(names deleted, notes on what was left alone)`.

        Raises nothing: a folder that cannot be deleted costs space, not the run.
        """
        deleted: list[str] = []
        notes: list[str] = []
        try:
            self._apply(step, deleted, notes)
        except (OSError, RepartoError) as error:
            notes.append(explain(error))
        return tuple(deleted), tuple(notes)

    def _apply(self, step: int, deleted: list[str], notes: list[str]) -> None:
        folders = step_folders(self._root)
        new = self._root / folder_name(step)
        self._read_back(new)
        kept = 1
        for folder in candidates(folders):
            if folder.path == new:
                continue
            try:
                other = self._prove(folder.path, deeply=kept < self._keep)
            except RepartoError as error:
                notes.append(f"{folder.path.name} does not hold, left alone: {error}")
                continue
            if other:
                notes.append(f"{folder.path.name} is of run {other}, left alone")
            elif kept < self._keep:
                kept += 1
            else:
                self._delete(folder, deleted, notes)
        for folder in folders:  # leftovers of saves and deletions that were cut off
            if folder.kind in ("tmp", "removed") and folder.maker == run_tag(self._run):
                self._delete(folder, deleted, notes)

    def _is_ours(self, folder: StepFolder) -> bool:
        try:
            return open_checkpoint(folder.path, self._key).manifest.run == self._run
        except RepartoError:
            return False  # whatever it is, it will not be loaded, and is not ours to move

    def _read_back(self, path: Path) -> None:
        """`Damaged` unless the new one can be opened where it is, its files all of their length.

        Its digests were made from the bytes while they were written; reading them back now would
        only read the same memory again.
        """
        new = open_checkpoint(path, self._key)
        now = identities(path)
        for name, entry in new.manifest.files.items():
            if name not in now or now[name].size != entry.bytes:
                raise Damaged(path, f"{name} has not the {entry.bytes} bytes that were written")
        self._proven[path.name] = now

    def _prove(self, path: Path, *, deeply: bool) -> str:
        """Empty for a checkpoint of this run, else the other run's name. `Damaged` if not whole.

        deeply   by the digest of every file; one that is to be deleted need only be ours
        """
        now = identities(path)
        if self._proven.get(path.name) == now:
            return ""
        old = open_checkpoint(path, self._key)
        if old.manifest.run != self._run:
            return old.manifest.run
        if deeply:
            try:
                if path.name in self._damaged and self._damaged[path.name][0] == now:
                    raise self._damaged[path.name][1]
                old.verify()
            except Damaged as error:
                self._damaged[path.name] = (now, error)
                raise
            self._proven[path.name] = now
        return ""

    def _delete(self, folder: StepFolder, deleted: list[str], notes: list[str]) -> None:
        """Rename first, so that a deletion that is cut off never looks like a damaged one."""
        path = folder.path
        try:
            if folder.kind in ("published", "replaced"):
                path = self._root / folder_name(folder.step, "removed", run=self._run)
                os.rename(folder.path, path)
                sync_folder(self._root)
            remove_folder(path)
        except OSError as error:
            notes.append(f"{path.name} cannot be deleted: {explain(error)}")
            return
        self._proven.pop(folder.path.name, None)
        deleted.append(folder.path.name)
