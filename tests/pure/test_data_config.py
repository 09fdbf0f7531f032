"""The `[data]` table refuses what it cannot do, and says what it can."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w

from reparto.config.data import STDLIB_MAX_BYTES, DataConfig, byte_limit
from reparto.config.validate import build
from reparto.errors import UserError


@pytest.mark.parametrize(
    ("table", "where", "nearest"),
    [
        ({"sequence_lenght": 5}, "data.sequence_lenght", "sequence_length"),
        ({"tokenizer": "bpee"}, "data.tokenizer", "bpe"),
        ({"source": "txt", "paths": ["a"]}, "data.source", "text"),
        ({"source": "text"}, "data.paths", 'paths = ["corpus/"]'),
        ({"paths": ["a"]}, "data.paths", 'source = "text"'),
        ({"vocab_size": 256}, "data.vocab_size", ""),
        ({"batch_size": 0}, "data.batch_size", ""),
        ({"batch_size": "32"}, "data.batch_size", ""),
        (
            {"validation_share": 0.5, "confirmation_share": 0.5},
            "data.validation_share",
            "validation_share = 0.05, confirmation_share = 0.05",
        ),
    ],
)
def test_bad_tables(table: dict[str, object], where: str, nearest: str) -> None:
    with pytest.raises(UserError) as caught:
        build(DataConfig, table, where="data")
    assert caught.value.where == where
    assert nearest in caught.value.nearest


def test_a_table_survives_being_written_and_read() -> None:
    config = build(DataConfig, {"source": "text", "paths": ["a", "b/*"], "validation_share": 0})
    assert build(DataConfig, config.model_dump(mode="json")) == config


def test_a_mixture_survives_a_file() -> None:
    text = """
    source = "mixture"
    [[mixture]]
    name = "code"
    source = "python-stdlib"
    [[mixture]]
    name = "chat"
    source = "jsonl"
    paths = ["chat.jsonl"]
    record = "chat"
    weight = 2
    """
    config = build(DataConfig, tomllib.loads(text), where="data")
    assert [(where, one.source) for where, one in config.corpora()] == [
        ("data.mixture.code", "python-stdlib"),
        ("data.mixture.chat", "jsonl"),
    ]
    written = tomli_w.dumps(config.model_dump(mode="json"))
    assert build(DataConfig, tomllib.loads(written), where="data") == config
    assert config.absolute(Path("/x")).mixture[1].paths == ("/x/chat.jsonl",)


def test_only_the_default_corpus_has_a_limit_of_its_own() -> None:
    assert byte_limit(DataConfig()) == STDLIB_MAX_BYTES
    assert byte_limit(DataConfig(source="text", paths=("a",))) is None
    assert byte_limit(DataConfig(source="text", paths=("a",), max_bytes=5)) == 5


def test_absolute_paths_mean_the_same_from_anywhere() -> None:
    config = DataConfig(source="text", paths=("a/*.txt", "/b"), tokenizer="t.json")
    moved = config.absolute(Path("/home/x"))
    assert moved.paths == ("/home/x/a/*.txt", "/b")
    assert moved.tokenizer == "/home/x/t.json"
    assert moved.absolute(Path("/other")) == moved
    assert DataConfig().absolute() == DataConfig()
