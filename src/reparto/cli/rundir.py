"""The run directory: made whole, or not at all; opened again for a resume.

    run.toml plan.toml      both resolved: nothing is left to a default that may change
    provenance.json         what went in
    metrics.jsonl           one row a step
    ledger.jsonl key        the chained evidence and the 0600 key that seals it
    trace/ checkpoints/     rank-N.json; step-N/
    control/ logs/          rings, last words, stores; what workers print

Mode 0700, files 0600, under any umask.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from reparto.config.run import Run, read_run, resume_changes
from reparto.errors import UserError
from reparto.evidence.ledger import Ledger, create_key

FOLDERS = ("trace", "checkpoints", "control", "logs")


def write_private(path: Path, text: str) -> None:
    """A file of mode 0600, replaced in one step."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def refuse_existing(path: Path) -> None:
    """A run never writes into a folder that is there already."""
    if path.exists() or path.is_symlink():
        resumable = (path / "run.toml").is_file()
        raise UserError(
            f"{path} exists already",
            where="--run-dir",
            legal="a folder that does not exist yet",
            nearest=f"--run-dir {path} --resume" if resumable else f"--run-dir {path}-2",
        )


def create(path: Path, run: Run) -> None:
    """Make the folder in one step: built beside its place, then renamed.

    Raises `UserError` if it exists or cannot be made.
    """
    refuse_existing(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror}", where="--run-dir") from error
    try:
        for name in FOLDERS:
            (building / name).mkdir(mode=0o700)
        write_private(building / "run.toml", run.to_toml())
        write_private(building / "plan.toml", tomli_w.dumps(run.partition.model_dump(mode="json")))
        write_private(building / "metrics.jsonl", "")
        key = create_key(building / "key")
        Ledger.create(building / "ledger.jsonl", key).close()
        os.rename(building, path)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise UserError(f"cannot make {path}: {error.strerror}", where="--run-dir") from error


def reopen(path: Path, wanted: Run | None, accepted: Sequence[str]) -> Run:
    """The run to go on with.

    wanted    what the command line and file say now; None takes the run as it was
    accepted  keys named by `--accept-change`

    Raises `UserError`: no such run, or a change that was not accepted, field by field.
    """
    if not (path / "run.toml").is_file():
        raise UserError(
            f"{path} holds no run to resume",
            where="--run-dir",
            legal="a folder made by `reparto train`",
        )
    old = read_run(path / "run.toml")
    if wanted is None:
        return old
    changes = resume_changes(old, wanted)
    refused = [one for one in changes if one[0] not in accepted]
    if refused:
        told = "\n".join(f"    {key}: {before} -> {after}" for key, before, after in refused)
        names = " ".join(f"--accept-change {key}" for key, _, _ in refused)
        raise UserError(
            f"the run in {path} was started with another config:\n{told}",
            where="--resume",
            legal="the same model, data, batch size, optimizer, seed and steps",
            nearest=f"start a new run, or add {names}",
        )
    known = {key for key, _, _ in changes}
    unused = [key for key in accepted if key not in known]
    if unused:
        raise UserError(
            f"`{unused[0]}` does not differ from the run in {path}",
            where="--accept-change",
            legal=", ".join(sorted(known)) or "nothing differs",
        )
    return wanted


def last_metrics_step(path: Path) -> int:
    """The step of the last whole row, 0 if there is none."""
    last = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            last = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            break
    return last


def cut_metrics(path: Path, step: int) -> int:
    """Drop rows after `step` (they will be made again); returns how many were dropped."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = []
    for line in lines:
        try:
            if int(json.loads(line)["step"]) > step:
                continue
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a crash
        kept.append(line)
    write_private(path, "".join(line + "\n" for line in kept))
    return len(lines) - len(kept)
