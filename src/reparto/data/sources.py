"""From a table of the config to the corpus it names: the only file that knows all kinds."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reparto.config.data import DataConfig, MixtureMember
from reparto.data.corpus import Corpus, Document, TextFiles, python_library
from reparto.data.files import find_files
from reparto.data.huggingface import HuggingFaceFolder
from reparto.data.jsonl import JsonLines
from reparto.data.records import RecordReader
from reparto.data.token_files import open_token_files
from reparto.errors import UserError


def open_corpus(config: DataConfig | MixtureMember) -> Corpus:
    """The corpus that one table names. Raises `UserError` when a path matches nothing."""
    reader = RecordReader(
        record=config.record,
        text_field=config.text_field,
        prompt_field=config.prompt_field,
        completion_field=config.completion_field,
        messages_field=config.messages_field,
        group_field=config.group_field,
    )
    match config.source:
        case "python-stdlib":
            return python_library(Path(sysconfig.get_path("stdlib")))
        case "text":
            return TextFiles(find_files(config.paths))
        case "jsonl":
            return JsonLines(find_files(config.paths, (".jsonl",)), reader)
        case "tokens":
            return open_token_files(find_files(config.paths, (".json",)))
        case "huggingface":
            folders = tuple(Path(path) for path in config.paths)
            for folder in folders:
                if not folder.is_dir():
                    raise UserError(
                        f"{folder} is no folder",
                        where="data.paths",
                        legal="a folder of save_to_disk, or of parquet, arrow or jsonl files",
                    )
            return _Joined(
                tuple(HuggingFaceFolder(folder, config.subset, reader) for folder in folders)
            )
        case "mixture":
            raise AssertionError("a mixture is not one corpus")


@dataclass(frozen=True)
class _Joined:
    """Several folders, one after another."""

    folders: tuple[HuggingFaceFolder, ...]

    def documents(self) -> Iterator[Document]:
        for folder in self.folders:
            yield from folder.documents()
