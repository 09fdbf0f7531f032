"""What lies in a checkpoint folder: a list with lineage, and a check that names every fault.

`list` reads manifests only, milliseconds each, and says of each folder what its manifest says.
`check` proves every byte as a load would, and looks for what does not belong there. Neither stops
at the first fault.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from reparto.checkpoint.files import (
    StepFolder,
    refuse_missing_root,
    step_folders,
)
from reparto.checkpoint.layout import MANIFEST, Damaged, Parent
from reparto.checkpoint.load import Checkpoint, open_checkpoint, torn_text
from reparto.errors import RepartoError, UserError


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One folder, as far as its manifest tells."""

    path: Path
    status: Literal["readable", "replaced", "incomplete", "damaged"]
    """readable: the manifest holds; only `check` reads the tensors. replaced: the same, but the run
    has gone on from an older step. incomplete: a save that did not end. damaged: see `fault`."""
    step: int
    "of the manifest; of the folder's name where there is none"
    run: str = ""
    plan: str = ""
    "text of the plan that wrote it"
    num_bytes: int = 0
    "of its tensor files"
    num_tensors: int = 0
    "weights and moments, aliases not counted"
    num_files: int = 0
    parent: Parent | None = None
    "what its run went on from"
    parent_here: bool = False
    "whether that one is in the same folder, unchanged"
    state: dict[str, JsonValue] | None = None
    "values of the whole run, provenance among them"
    fault: str = ""


def list_checkpoints(root: Path, key: bytes | None) -> list[Listed]:
    """All of a folder, oldest step first. Raises `UserError` only if there is no such folder.

    key  the run's secret; None reads manifests unsigned
    """
    refuse_missing_root(root)
    opened: dict[Path, Checkpoint | str] = {}
    folders = step_folders(root)
    for folder in folders:
        if folder.kind in ("published", "replaced"):
            try:
                opened[folder.path] = open_checkpoint(folder.path, key)
            except RepartoError as error:
                opened[folder.path] = str(error)
    here = {one.parent.manifest for one in opened.values() if isinstance(one, Checkpoint)}
    return [_listed(folder, opened.get(folder.path, ""), here) for folder in folders]


def _listed(folder: StepFolder, found: Checkpoint | str, here: set[str]) -> Listed:
    if folder.kind in ("tmp", "removed"):
        return Listed(
            path=folder.path, status="incomplete", step=folder.step, fault=torn_text(folder)
        )
    if isinstance(found, str):
        return Listed(path=folder.path, status="damaged", step=folder.step, fault=found)
    manifest = found.manifest
    return Listed(
        path=folder.path,
        status="replaced" if folder.kind == "replaced" else "readable",
        step=manifest.step,
        run=manifest.run,
        plan=manifest.plan,
        num_bytes=sum(file.bytes for file in manifest.files.values()),
        num_tensors=sum(entry.alias_of is None for entry in manifest.tensors.values()),
        num_files=len(manifest.files),
        parent=manifest.parent,
        parent_here=manifest.parent is not None and manifest.parent.manifest in here,
        state=manifest.state,
    )


# --- check ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A checkpoint of which every byte is as it was written."""

    path: Path
    run: str
    step: int
    signed: bool
    "whether the manifest's signature was checked too"
    num_files: int
    num_tensors: int
    num_bytes: int
    "bytes that were digested"


def check(path: Path, key: bytes | None) -> list[Checked]:
    """Check one checkpoint, or all that a folder holds, oldest first.

    Raises `Damaged` (exit status 3) naming every fault of all of them: unfinished, damaged, foreign
    or missing files, files that nobody listed, tensors whose header does not fit the manifest.
    Raises `UserError` if there is nothing to check.
    """
    if os.path.lexists(path / MANIFEST):
        return [check_one(path, key)]
    refuse_missing_root(path)
    folders = [one for one in step_folders(path) if one.kind != "removed"]
    if not folders:
        raise UserError(
            "holds no checkpoint",
            where=str(path),
            legal="a step-N folder, or a folder of such folders",
        )
    faults, passed = [], []
    for folder in folders:
        if folder.kind == "tmp":
            faults.append(torn_text(folder))
            continue
        try:
            passed.append(check_one(folder.path, key))
        except Damaged as error:
            faults += [f"{folder.path.name}: {fault}" for fault in error.faults]
        except UserError as error:
            faults.append(f"{folder.path.name}: {error.what}")
    if faults:
        raise Damaged(path, *faults)
    return passed


def check_one(path: Path, key: bytes | None) -> Checked:
    """Check one folder; `Damaged` with every fault."""
    checkpoint = open_checkpoint(path, key)
    manifest = checkpoint.manifest
    faults: list[str] = []
    try:
        checkpoint.verify()
    except Damaged as error:
        faults += error.faults
    extra = sorted(set(os.listdir(path)) - set(manifest.files) - {MANIFEST})
    faults += [f"{name[:80]!r} is in the folder, but not in the manifest" for name in extra]
    if faults:
        raise Damaged(path, *faults)
    return Checked(
        path=path,
        run=manifest.run,
        step=manifest.step,
        signed=checkpoint.signed,
        num_files=len(manifest.files),
        num_tensors=sum(entry.alias_of is None for entry in manifest.tensors.values()),
        num_bytes=sum(file.bytes for file in manifest.files.values()),
    )
