"""Files of the user: found by file, folder or glob, and read as UTF-8, or refused by name.

Nothing is skipped in silence: a dangling link, a pipe, a byte that is not UTF-8 are errors that
name the file, because a corpus that is quietly smaller than the user thinks is a wrong result.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reparto.errors import UserError, nearest_word


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file that was found: where it is and what it is called."""

    path: Path
    "where it is read from"
    name: str
    "its path below the folder that was named"
    group: str
    "top-level folder below the folder that was named"


def find_files(paths: Sequence[str], suffixes: tuple[str, ...] = ()) -> tuple[TextFile, ...]:
    """The files that files, folders and globs name, each once.

    Of a folder, hidden files are left out, links to folders (they may loop) are not followed, and
    only names that end in one of `suffixes` are taken, if any are given.
    """
    found: dict[Path, TextFile] = {}
    for given in paths:
        matches = [given] if os.path.lexists(given) else sorted(glob.glob(given, recursive=True))
        if not matches:
            raise _nothing_matches(given)
        for match in matches:
            for file in _files_below(Path(match), suffixes):
                found.setdefault(file.path.resolve(), file)
    if not found:
        kind = " or ".join(f"*{suffix}" for suffix in suffixes) or "file"
        raise UserError(f"no {kind} in {', '.join(paths)}", where="data.paths")
    return tuple(sorted(found.values(), key=by_group_and_name))


def by_group_and_name(file: TextFile) -> tuple[str, str, str]:
    """The one order of files; the path only tells equal names apart."""
    return (file.group, file.name, str(file.path))


def _files_below(path: Path, suffixes: tuple[str, ...]) -> Iterator[TextFile]:
    if not path.is_dir():
        yield TextFile(path=path, name=path.name, group=path.absolute().parent.name or "files")
        return
    root_name = path.resolve().name or "files"
    for folder, folders, names in os.walk(path, onerror=raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            below = (Path(folder) / name).relative_to(path)
            if not name.startswith(".") and name.endswith(suffixes or ("",)):
                group = below.parts[0] if len(below.parts) > 1 else root_name
                yield TextFile(path=path / below, name=below.as_posix(), group=group)


def raise_unreadable(error: OSError) -> None:
    """For `os.walk`, which would pass over a folder that it cannot open."""
    raise UserError(f"cannot read {error.filename}: {error.strerror}", where="data.paths")


def _nothing_matches(given: str) -> UserError:
    parent = Path(given).parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = nearest_word(Path(given).name, names)
    return UserError(
        f"`{given}` matches no file",
        where="data.paths",
        legal="files, folders or globs that exist",
        nearest=str(parent / near) if near else "",
    )


def regular_size(path: Path) -> int:
    """Bytes of a regular file. Raises `UserError` for a pipe, a device, a dangling link."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where="data.paths") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a regular file", where="data.paths")
    return status.st_size


def read_pieces(path: Path, limit: int | None) -> Iterator[str]:
    """The text of a regular file, in pieces of `limit` bytes and the rest of the line, or whole.

    An empty file gives none. Raises `UserError` with file and byte offset for what is not UTF-8.
    """
    regular_size(path)
    offset = 0
    try:
        with path.open("rb") as file:
            while content := file.read(-1 if limit is None else limit):
                content += file.readline()
                yield content.decode()
                offset += len(content)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where="data.paths") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"{path} is not UTF-8: byte {byte:#04x} at offset {offset + error.start}",
            where="data.paths",
            legal="UTF-8 text",
            nearest=f"iconv -f LATIN1 -t UTF-8 {path}, or leave the file out",
        ) from error
