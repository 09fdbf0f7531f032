"""What a document is, and the two corpora that need no format.

A document is one text that stands alone, and its group is what its validation loss is summed
under: the top-level package of a library, the top-level folder of the user's files. The default
corpus is the standard library of the Python that runs: 12 MB of real text that is on every machine
where this program is, so nothing is shipped and nothing is downloaded. Rejected: bundling a text
(megabytes in every install, and its licence), and random tokens (a loss that means nothing).
"""

from __future__ import annotations

import hashlib
import io
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from reparto.data.files import (
    TextFile,
    by_group_and_name,
    raise_unreadable,
    read_pieces,
    regular_size,
)
from reparto.errors import UserError

#: a corpus with fewer files than this is cut into smaller documents, so that there is a split
_FEW_FILES = 64
_PIECE_BYTES = (4 * 1024, 64 * 1024)

#: folders of the standard library that are no part of what a program imports
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a document that is either learned or only read."""

    text: str
    "never empty"
    counted: bool = True
    "whether its tokens are labels; a prompt's are not"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text that stands alone: a file, a piece of a long file, a line of a jsonl file."""

    name: str
    "unique enough for a person to find it: path below the named folder, with piece or line"
    group: str
    "what its validation loss is summed under: top-level package or folder"
    parts: tuple[Part, ...]
    "its text in order"

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(part.text for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the whole text."""
        return sum(len(part.text.encode()) for part in self.parts)

    def digest(self) -> bytes:
        """SHA-256 of the content: parts with their lengths, so that no two documents collide."""
        hashed = hashlib.sha256()
        for part in self.parts:
            encoded = part.text.encode()
            hashed.update(b"%d %d " % (part.counted, len(encoded)))
            hashed.update(encoded)
        return hashed.digest()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenDocument:
    """A document that is encoded already."""

    name: str
    "as `Document.name`"
    group: str
    "as `Document.group`"
    ids: npt.NDArray[np.int64]
    "its tokens, without an end-of-document token"

    @property
    def num_bytes(self) -> int:
        """Two a token: the size of the usual token file."""
        return 2 * len(self.ids)

    def digest(self) -> bytes:
        """SHA-256 of the ids."""
        return hashlib.sha256(b"ids " + self.ids.astype("<i8").tobytes()).digest()


AnyDocument = Document | TokenDocument


class Corpus(Protocol):
    """Anything that yields documents in a fixed order, any number of times."""

    def documents(self) -> Iterator[AnyDocument]:
        """All documents that hold text, in the same order at every call."""
        ...


@dataclass(frozen=True)
class PythonLibrary:
    """The running interpreter's own source: real text that is always there."""

    files: tuple[TextFile, ...]
    "the modules, without tests and installed packages, sorted by group and name"

    def documents(self) -> Iterator[Document]:
        """One document a module; group: top package, or `modules` for single files."""
        for file in self.files:
            if text := _python_source(file.path):
                yield Document(name=file.name, group=file.group, parts=(Part(text=text),))


def python_library(root: Path) -> PythonLibrary:
    """The library source under `root`. Raises `UserError` where Python ships none."""
    found = []
    for folder, folders, names in os.walk(root, onerror=raise_unreadable):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                below = (Path(folder) / name).relative_to(root)
                group = below.parts[0] if len(below.parts) > 1 else "modules"
                found.append(TextFile(path=root / below, name=below.as_posix(), group=group))
    if not found:
        raise UserError(
            f"this Python has no library source under {root}",
            where="data.source",
            nearest='source = "text", paths = ["FOLDER"]',
        )
    return PythonLibrary(tuple(sorted(found, key=by_group_and_name)))


def _python_source(path: Path) -> str:
    """The text of a Python file: UTF-8, else what its first lines declare."""
    content = path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError:
        try:
            return content.decode(tokenize.detect_encoding(io.BytesIO(content).readline)[0])
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UserError(f"cannot decode {path}: {error}", where="data.source") from error


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 files of the user. Where there are few, long ones are cut at line ends."""

    files: tuple[TextFile, ...]
    "sorted by group and name, each once"

    def documents(self) -> Iterator[Document]:
        """One document a file, or a piece of about 4 to 64 KiB where there are few files."""
        limit = self._piece_bytes()
        for file in self.files:
            whole = limit is None or regular_size(file.path) <= limit
            for number, text in enumerate(read_pieces(file.path, None if whole else limit)):
                name = file.name if whole else f"{file.name}#{number}"
                yield Document(name=name, group=file.group, parts=(Part(text=text),))

    def _piece_bytes(self) -> int | None:
        if len(self.files) >= _FEW_FILES:
            return None
        total = sum(regular_size(file.path) for file in self.files)
        smallest, largest = _PIECE_BYTES
        return max(smallest, min(largest, total // _FEW_FILES))
