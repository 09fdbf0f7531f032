"""A folder that appears whole or not at all, readable by its owner only.

Several processes may prepare the same data at once: each writes a folder of its own beside the
final name and renames it; the first wins and the others throw theirs away. Rejected: a lock file,
which a killed process leaves behind for all later ones to wait on.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from reparto.errors import UserError

#: a folder that is still being built after this long was left by a process that was killed
_ABANDONED_S = 24 * 3600


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/reparto, or ~/.cache/reparto (XDG base directory specification)."""
    named = environment.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "reparto"


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, then make it `folder` in one rename.

    A folder of that name that appears meanwhile is kept. Nothing is left behind when `write` fails.
    Raises `UserError` when the place cannot be written to.
    """
    try:
        _make_private(folder.parent)
        _sweep(folder.parent)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            write(building)
            try:
                building.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write {folder.parent}: {error.strerror}",
            where="cache folder",
            nearest="set XDG_CACHE_HOME to a folder with room that you may write to",
        ) from error


def _make_private(folder: Path) -> None:
    """The folder and its missing parents, mode 0700 (`mkdir(parents=True)` does not pass it on)."""
    if not folder.parent.is_dir():
        _make_private(folder.parent)
        _sweep(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _sweep(folder: Path) -> None:
    for left in folder.glob(".building-*"):
        with suppress(FileNotFoundError):  # its owner has just finished it
            if left.stat().st_mtime < time.time() - _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)


def create(path: Path) -> BinaryIO:
    """A new file for writing, mode 0600 whatever the umask; it must not exist."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def create_text(path: Path, text: str) -> None:
    """A new small file, mode 0600."""
    with create(path) as file:
        file.write(text.encode())


def create_json(path: Path, value: object) -> None:
    """A new JSON file, keys sorted, mode 0600."""
    create_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")
