"""Files of ids: used as they are, and refused by name when header and file disagree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reparto.config.data import DataConfig
from reparto.data.corpus import TokenDocument
from reparto.data.prepare import prepare
from reparto.data.sources import open_corpus
from reparto.data.tokenize import train_bpe
from reparto.errors import UserError


def write(folder: Path, ids: list[int], **changes: object) -> Path:
    header = {
        "file": "corpus.bin",
        "dtype": "uint16",
        "tokens": len(ids),
        "vocab_size": 100,
        "eod_id": 99,
        **changes,
    }
    np.array(ids, dtype="<u2" if header["dtype"] == "uint16" else "<u4").tofile(
        folder / "corpus.bin"
    )
    (folder / "corpus.json").write_text(json.dumps(header))
    return folder / "corpus.json"


def table(path: Path, **changes: object) -> DataConfig:
    values = {"source": "tokens", "paths": (str(path),), "tokenizer": "none"}
    return DataConfig.model_validate({**values, "sequence_length": 4, **changes})


def documents(path: Path) -> list[list[int]]:
    found = []
    for document in open_corpus(table(path)).documents():
        assert isinstance(document, TokenDocument)
        found.append(document.ids.tolist())
    return found


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_documents_are_what_stands_between_ends(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path, [1, 2, 99, 99, 3, 99, 4, 5, 6], dtype=dtype)
    assert documents(path) == [[1, 2], [3], [4, 5, 6]]


def test_ids_arrive_unchanged(tmp_path: Path) -> None:
    ids = [i for document in range(200) for i in (document % 90, 5, document % 7, 99)]
    prepared = prepare(table(write(tmp_path, ids)), tmp_path / "cache")
    assert prepared.vocab_size == 100 and prepared.header.eod_id == 99
    stored = []
    for split in ("train", "validation", "confirmation"):
        tokens = np.fromfile(prepared.members[0].folder / f"{split}.tokens", dtype="<u2")
        stored += [tokens[start : start + 4].tolist() for start in range(0, len(tokens), 4)]
    assert sorted(stored) == sorted(ids[start : start + 4] for start in range(0, 800, 4))
    with pytest.raises(UserError, match="cannot turn text into tokens"):
        prepared.tokenizer().encode("x")
    assert prepared.tokenizer().decode([1, 2]) == "1 2"


def test_one_long_document_is_cut_so_that_there_is_a_split(tmp_path: Path) -> None:
    ids = (np.arange(100_000) % 90).tolist()
    path = write(tmp_path, ids)
    pieces = documents(path)
    assert len(pieces) > 50 and [i for piece in pieces for i in piece] == ids
    assert prepare(table(path), tmp_path / "cache").warnings == ()


def test_the_tokenizer_that_made_them_may_be_named(tmp_path: Path) -> None:
    bpe = train_bpe(["some text to train on, some more text"] * 5, 270)
    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    ids = [i for n in range(50) for i in (*bpe.encode(f"some text {n}"), bpe.eod_id)]
    path = write(tmp_path, ids, vocab_size=bpe.vocab_size, eod_id=bpe.eod_id)
    named = table(path, tokenizer=str(tmp_path / "tokenizer.json"))
    prepared = prepare(named, tmp_path / "cache")
    text = prepared.tokenizer().decode(prepared.train_dataset()[0].input_ids_S.tolist())
    assert "some text" in text + "some text"[len(text) :]
    path = write(tmp_path, ids, vocab_size=5000, eod_id=bpe.eod_id)
    with pytest.raises(UserError, match="the tokens have vocab_size 5000 and eod_id 0") as caught:
        prepare(named, tmp_path / "cache")
    assert caught.value.where == "data.paths"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dtype": "int16"}, "dtype: Input should be 'uint16' or 'uint32'"),
        ({"tokens": -1}, "tokens: Input should be greater than or equal to 1"),
        ({"vocab_size": "many"}, "vocab_size: Input should be a valid integer"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"file": "../corpus.bin"}, "file: String should match pattern"),
        ({"file": "gone.bin"}, "cannot read"),
        ({"tokens": 5}, "has 12 bytes; 5 tokens of uint16 are 10"),
        ({"eod_id": 100}, "eod_id 100 is not below vocab_size 100"),
        ({"vocab_size": 50, "eod_id": 49}, "id 50 at token 2 of corpus.bin is not below"),
    ],
)
def test_headers_that_do_not_fit(tmp_path: Path, changes: dict[str, object], what: str) -> None:
    path = write(tmp_path, [1, 2, 50, 3, 99, 4], **changes)
    with pytest.raises(UserError) as caught:
        documents(path)
    assert what in caught.value.what


def test_a_wrong_dtype_of_the_right_size_is_found_by_its_ids(tmp_path: Path) -> None:
    path = write(tmp_path, [1, 99] * 10, dtype="uint32")
    header = json.loads(path.read_text())
    path.write_text(json.dumps({**header, "dtype": "uint16", "tokens": 40, "vocab_size": 99}))
    with pytest.raises(UserError, match="not below"):
        documents(path)


def test_a_broken_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    path.write_text("{")
    with pytest.raises(UserError, match="is no header of a token file: it: Invalid JSON") as caught:
        documents(path)
    assert caught.value.where == str(path)


def test_two_files_need_one_end(tmp_path: Path) -> None:
    for name, eod in (("a", 99), ("b", 98)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, [1, eod, 2], eod_id=eod)
    config = table(tmp_path / "a" / "corpus.json")
    both = config.model_copy(update={"paths": (str(tmp_path),)})
    with pytest.raises(UserError, match="eod_id 98 differs from 99"):
        list(open_corpus(both).documents())
