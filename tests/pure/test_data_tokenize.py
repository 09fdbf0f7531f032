"""Tokenizers write any text, never forge the end of one, and are the same twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reparto.data.tokenize import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    Tokenizer,
    open_tokenizer,
    train_bpe,
)
from reparto.errors import UserError

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "naïve café, señor\n" * 10, END_OF_DOCUMENT * 9]
BPE = train_bpe(TEXTS, 300)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(text=st.text())
def test_any_text_comes_back_and_holds_no_end(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_the_end_of_a_document_cannot_be_forged(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{END_OF_DOCUMENT}b")
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eod_id]) == f"a{END_OF_DOCUMENT}b{END_OF_DOCUMENT}"


def test_byte_ids_are_bytes() -> None:
    assert ByteTokenizer().encode("aé") == [97, 0xC3, 0xA9]
    assert ByteTokenizer().decode([0xC3, 97]) == "\ufffda"


def test_bpe_is_smaller_than_bytes_and_has_the_asked_size() -> None:
    assert BPE.vocab_size == 300
    text = TEXTS[0]
    assert len(BPE.encode(text)) < len(text) / 2
    assert BPE.encode_batch([text, "x"]) == [BPE.encode(text), BPE.encode("x")]


def test_training_is_repeatable() -> None:
    again = train_bpe(TEXTS, 300)
    assert again.digest == BPE.digest
    assert train_bpe(TEXTS[:1], 300).digest != BPE.digest


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_a_tokenizer_is_saved_and_opened(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    opened = open_tokenizer(path)
    assert opened.digest == tokenizer.digest
    assert (opened.vocab_size, opened.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)
    assert opened.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "No such file"),
        (b"\xff", "it is not UTF-8"),
        (b"{", "is no tokenizer.json"),
        (b"{}", "is no tokenizer.json"),
    ],
)
def test_a_bad_tokenizer_file(content: bytes | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=what) as caught:
        open_tokenizer(path)
    assert caught.value.where == "data.tokenizer"


def test_a_tokenizer_that_ends_no_document(tmp_path: Path) -> None:
    described = json.loads(BPE.to_json())
    described["added_tokens"] = []
    del described["model"]["vocab"][END_OF_DOCUMENT]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    with pytest.raises(UserError, match="has no token that ends a document"):
        open_tokenizer(path)
