"""Data sets in the folders of the Hugging Face ecosystem, read from disk and never from a network.

What `save_to_disk` wrote is opened by the `datasets` library; parquet and arrow files are read by
pyarrow, which it brings along (extra `hf`), in blocks of rows, and jsonl files by our own reader.
All of these are data formats. Rejected: `load_dataset(NAME)`, which downloads, keeps a second copy
in a cache of its own, and for years ran the Python scripts it found beside the data.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from reparto.data.corpus import Document
from reparto.data.files import TextFile, find_files
from reparto.data.jsonl import read_rows
from reparto.data.records import RecordReader
from reparto.errors import UserError, nearest_word

_ROWS_AT_ONCE = 1000
_SUFFIXES = (".parquet", ".arrow", ".jsonl")
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A corpus of rows; the group of a record is its folder's or file's name, or a field of it."""

    path: Path
    "the folder"
    subset: str
    "which of several data sets in it"
    reader: RecordReader
    "how a row becomes a document"

    def documents(self) -> Iterator[Document]:
        """One document a row, named by its number; empty texts are none."""
        for name, rows in self._tables():
            group = Path(name).stem
            for number, row in enumerate(rows):
                where = f"{self.path / name}: row {number}"
                document = self.reader.document(
                    row, name=f"{name}:{number}", group=group, where=where
                )
                if document is not None:
                    yield document

    def _tables(self) -> Iterator[tuple[str, Iterator[Mapping[str, object]]]]:
        if any((self.path / name).is_file() for name in _SAVED):
            yield self.path.name, self._saved()
            return
        for file in find_files([str(self.path)], _SUFFIXES):
            yield file.name, self._rows(file)

    def _saved(self) -> Iterator[Mapping[str, object]]:
        datasets = _library("datasets")
        try:
            found = datasets.load_from_disk(str(self.path))
        except Exception as error:  # the library raises many kinds for what it cannot read
            raise UserError(f"cannot open {self.path}: {error}", where="data.paths") from error
        if isinstance(found, dict):
            if self.subset not in found:
                raise UserError(
                    f"{self.path} holds no `{self.subset}`",
                    where="data.subset",
                    legal=", ".join(found),
                    nearest=nearest_word(self.subset, found) or next(iter(found), ""),
                )
            found = found[self.subset]
        wanted = [name for name in self.reader.fields if name in found.column_names]
        for block in found.select_columns(wanted or found.column_names).iter(_ROWS_AT_ONCE):
            yield from _rows_of(block)

    def _rows(self, file: TextFile) -> Iterator[Mapping[str, object]]:
        if file.path.suffix == ".jsonl":
            for _, row in read_rows(file.path):
                yield row
            return
        blocks = _parquet if file.path.suffix == ".parquet" else _arrow
        try:
            yield from blocks(file.path, self.reader.fields)
        except (OSError, ValueError) as error:  # pyarrow's errors are these two
            if isinstance(error, UserError):
                raise
            raise UserError(f"cannot read {file.path}: {error}", where="data.paths") from error


def _parquet(path: Path, fields: tuple[str, ...]) -> Iterator[Mapping[str, object]]:
    file = _library("pyarrow.parquet").ParquetFile(path)
    names = file.schema_arrow.names
    wanted = [name for name in fields if name in names] or names
    for block in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted):
        yield from block.to_pylist()


def _arrow(path: Path, fields: tuple[str, ...]) -> Iterator[Mapping[str, object]]:
    pyarrow = _library("pyarrow")
    with pyarrow.memory_map(str(path)) as source:
        for block in pyarrow.ipc.open_stream(source):
            wanted = [name for name in fields if name in block.schema.names]
            for start in range(0, len(block), _ROWS_AT_ONCE):
                rows = block.slice(start, _ROWS_AT_ONCE)
                yield from rows.select(wanted or block.schema.names).to_pylist()


def _rows_of(block: Mapping[str, list[object]]) -> Iterator[Mapping[str, object]]:
    for values in zip(*block.values(), strict=True):
        yield dict(zip(block, values, strict=True))


def _library(name: str) -> Any:
    try:
        module: ModuleType = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"source `huggingface` needs the package `{name.split('.')[0]}`, which is missing",
            where="data.source",
            nearest='pip install "reparto[hf]"',
        ) from error
    return module
