"""Lines of JSON: one record a line, every fault named with its file and line.

A broken line stops the run before it starts, because a data set with silently missing lines is a
wrong result. Rejected: skipping bad lines and counting them, which nobody reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reparto.data.corpus import Document
from reparto.data.files import TextFile, regular_size
from reparto.data.records import RecordReader
from reparto.errors import UserError


@dataclass(frozen=True)
class JsonLines:
    """A corpus of `*.jsonl` files; the group of a record is its file, or a field of it."""

    files: tuple[TextFile, ...]
    "in a fixed order"
    reader: RecordReader
    "how a line becomes a document"

    def documents(self) -> Iterator[Document]:
        """One document a line, named FILE:LINE; blank lines and empty texts are none."""
        for file in self.files:
            group = Path(file.name).stem
            for number, row in read_rows(file.path):
                document = self.reader.document(
                    row, name=f"{file.name}:{number}", group=group, where=f"{file.path}:{number}"
                )
                if document is not None:
                    yield document


def read_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """(line number from 1, object) of every line that is not blank. Raises `UserError`."""
    regular_size(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _object(line, f"{path}:{number}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where="data.paths") from error


def _object(line: bytes, where: str) -> Mapping[str, object]:
    try:
        value: object = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(
            f"byte {line[error.start]:#04x} at byte {error.start + 1} of the line is not UTF-8",
            where=where,
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"broken line: {error.msg} at column {error.colno}",
            where=where,
            legal="one JSON object a line",
        ) from error
    except (RecursionError, ValueError) as error:
        raise UserError("nested too deeply, or a number too long", where=where) from error
    if not isinstance(value, dict):
        raise UserError("is no JSON object", where=where, legal='{"field": "text", ...}')
    return value
