"""From config to mapped tokens: right ids, exact counts, nothing half-made, nothing believed."""

from __future__ import annotations

import builtins
import json
import math
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.config.data import DataConfig
from reparto.data.cache import default_cache_dir, publish
from reparto.data.dataset import IGNORED, EvaluationDataset, TokenDataset
from reparto.data.prepare import Prepared, open_prepared, prepare
from reparto.data.store import TokenSplit, dtype_for, entropy_nats
from reparto.errors import UserError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    for number in range(80):
        path = root / f"part{number % 4}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}: " + "words of the text, " * (number % 7 + 1))
    return root


def table(corpus: Path, **changes: object) -> DataConfig:
    values = {"source": "text", "paths": (str(corpus),), "tokenizer": "bytes"}
    return DataConfig.model_validate(
        {**values, "sequence_length": 16, "batch_size": 4, "validation_share": 0.2, **changes}
    )


def texts_of(prepared: Prepared, split: str) -> list[str]:
    header = prepared.header.splits[split]  # type: ignore[index]
    ids = np.fromfile(prepared.members[0].folder / f"{split}.tokens", dtype=prepared.header.dtype)
    assert len(ids) == header.num_tokens
    cuts = np.flatnonzero(ids == prepared.header.eod_id)
    pieces = np.split(ids, cuts + 1)[:-1]
    return [prepared.tokenizer().decode(piece[:-1].tolist()) for piece in pieces]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_text_is_in_exactly_one_split(corpus: Path, tmp_path: Path, tokenizer: str) -> None:
    config = table(corpus, tokenizer=tokenizer, vocab_size=300)
    prepared = prepare(config, tmp_path / "cache")
    stored = [t for s in ("train", "validation", "confirmation") for t in texts_of(prepared, s)]
    assert sorted(stored) == sorted(path.read_text() for path in corpus.rglob("*.txt"))
    assert prepared.groups == ("part0", "part1", "part2", "part3")
    assert prepared.vocab_size == (257 if tokenizer == "bytes" else 300)
    assert prepared.header.dtype == "uint16"
    train = prepared.counts("train")
    assert train.num_bytes == sum(len(text) for text in texts_of(prepared, "train"))
    assert prepared.num_train_samples == (train.num_tokens - 1) // 16


def test_samples_are_the_text_shifted_by_one(corpus: Path, tmp_path: Path) -> None:
    prepared = prepare(table(corpus), tmp_path / "cache")
    stream = b"\0".join(text.encode() for text in texts_of(prepared, "train"))
    dataset = prepared.train_dataset()
    for sample_id in range(len(dataset)):
        input_ids, labels = dataset[sample_id].input_ids_S, dataset[sample_id].labels_S
        assert input_ids.dtype == labels.dtype == np.int64
        start = 16 * sample_id
        found = bytes(0 if i == 256 else i for i in [*input_ids, labels[-1]])
        assert found == stream[start : start + 17]
        assert (input_ids[1:] == labels[:-1]).all()
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_second_run_finds_everything_done(corpus: Path, tmp_path: Path) -> None:
    told: list[str] = []
    config = table(corpus, tokenizer="bpe", vocab_size=300)
    first = prepare(config, tmp_path / "cache", lambda what, share: told.append(what))
    assert "encoding" in told and "training the tokenizer" in told
    told.clear()
    second = prepare(config, tmp_path / "cache", lambda what, share: told.append(what))
    assert second == first == open_prepared(first.folder)
    assert "encoding" not in told and "training the tokenizer" not in told
    longer = prepare(
        table(corpus, tokenizer="bpe", vocab_size=300, sequence_length=32),
        tmp_path / "cache",
        lambda what, share: told.append(what),
    )
    assert longer.members[0].folder == first.members[0].folder and longer.folder != first.folder
    assert "encoding" not in told


def test_a_changed_corpus_is_prepared_again(corpus: Path, tmp_path: Path) -> None:
    first = prepare(table(corpus), tmp_path / "cache")
    (corpus / "part0" / "0.txt").write_text("changed")
    second = prepare(table(corpus), tmp_path / "cache")
    assert second.corpus_digest != first.corpus_digest
    assert second.tokens_digest != first.tokens_digest
    assert second.tokenizer_digest == first.tokenizer_digest


def test_moving_the_corpus_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    first = prepare(table(corpus), tmp_path / "cache")
    moved = corpus.rename(tmp_path / "elsewhere")
    assert prepare(table(moved), tmp_path / "cache") == first


def test_entropy_is_of_the_labels_own_frequencies(corpus: Path, tmp_path: Path) -> None:
    assert entropy_nats(np.array([5.0, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert entropy_nats(np.zeros(3)) == 0.0
    prepared = prepare(table(corpus), tmp_path / "cache")
    text = b"\0".join(t.encode() for t in texts_of(prepared, "train")) + b"\0"
    shares = [text.count(byte) / len(text) for byte in set(text)]
    expected = -sum(share * math.log(share) for share in shares)
    assert prepared.unigram_entropy_nats == pytest.approx(expected)
    assert 0 < prepared.validation_unigram_entropy_nats < math.log(257)


def test_a_corpus_shorter_than_a_sequence_says_both_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError) as caught:
        prepare(table(tmp_path / "a.txt"), tmp_path / "cache")
    assert "has 6 tokens, and one sample of sequence_length 16 takes 17" in caught.value.what
    assert caught.value.where == "data.sequence_length"
    assert caught.value.nearest == "sequence_length = 5"


def test_small_corpora_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a short text, but longer than a sequence")
    config = table(tmp_path / "a.txt", tokenizer="bpe", vocab_size=2000, sequence_length=4)
    warnings = "\n".join(prepare(config, tmp_path / "cache").warnings)
    assert "too few for a validation part" in warnings
    assert "too small for vocab_size 2000: the tokenizer has" in warnings
    assert "training samples and a step takes 4" in warnings


@pytest.mark.parametrize("bad", [b"\xff\xfe", b"caf\xe9"])
def test_bad_input_leaves_no_folder(corpus: Path, tmp_path: Path, bad: bytes) -> None:
    (corpus / "bad").write_bytes(bad)
    with pytest.raises(UserError, match="is not UTF-8"):
        prepare(table(corpus), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_failing_writer_leaves_nothing(tmp_path: Path) -> None:
    def fail(building: Path) -> None:
        (building / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path / "cache" / "key", fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_killed_process_left_is_swept_after_a_day(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".building-old", tmp_path / ".building-fresh"
    for folder in (old, fresh):
        folder.mkdir()
        (folder / "half").write_text("x")
    os.utime(old, (0, 0))
    publish(tmp_path / "key", lambda building: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".building-fresh", "key"]


def test_a_place_that_cannot_be_written_is_said(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write") as caught:
        prepare(table(corpus), tmp_path / "file" / "cache")
    assert "XDG_CACHE_HOME" in caught.value.nearest


def test_only_the_owner_reads_the_cache_whatever_the_umask(corpus: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        prepare(table(corpus), tmp_path / "cache")
    finally:
        os.umask(before)
    for path in (tmp_path / "cache").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_a_cache_that_anyone_may_write_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(UserError, match="may be written by everyone"):
        prepare(table(corpus), tmp_path / "cache")


def test_several_processes_at_once_agree(corpus: Path, tmp_path: Path) -> None:
    found: list[Prepared] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        found.append(prepare(table(corpus), tmp_path / "cache"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(prepared == found[0] for prepared in found)
    assert not list((tmp_path / "cache").rglob(".building-*"))


def test_nothing_opens_the_confirmation_part(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(table(corpus), tmp_path / "cache")
    assert first.counts("confirmation").num_documents > 0
    opened: list[str] = []
    real_open, real_io_open = builtins.open, os.open

    def spy(path: object, *rest: object, **named: object) -> object:
        opened.append(str(path))
        return real_open(path, *rest, **named)  # type: ignore[call-overload]

    def spy_os(path: object, *rest: object, **named: object) -> int:
        opened.append(str(path))
        return real_io_open(path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("builtins.open", spy)
    monkeypatch.setattr("io.open", spy)
    monkeypatch.setattr("os.open", spy_os)
    prepared = prepare(table(corpus), tmp_path / "cache")
    len(prepared.train_dataset()), len(prepared.validation_dataset())
    assert any("train.tokens" in name for name in opened)
    assert not [name for name in opened if "confirmation" in name]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train.tokens", "validation.documents", "tokens.json"])
def test_a_changed_cache_is_made_again(corpus: Path, tmp_path: Path, name: str) -> None:
    first = prepare(table(corpus), tmp_path / "cache")
    content = (first.members[0].folder / name).read_bytes()
    flip(first.members[0].folder / name) if name != "tokens.json" else (
        first.members[0].folder / name
    ).write_text("{")
    again = prepare(table(corpus), tmp_path / "cache")
    assert (first.members[0].folder / name).read_bytes() == content
    assert again.warnings == (f"cached {name} had been changed and was made again",)


def test_a_changed_tokenizer_is_made_again(corpus: Path, tmp_path: Path) -> None:
    config = table(corpus, tokenizer="bpe", vocab_size=300)
    first = prepare(config, tmp_path / "cache")
    content = first.tokenizer_file.read_bytes()
    first.tokenizer_file.write_bytes(content.replace(b'prefix_space":false', b'prefix_space":true'))
    with pytest.raises(UserError, match="not the tokenizer that made the tokens"):
        first.tokenizer()
    assert prepare(config, tmp_path / "cache") == first
    assert first.tokenizer_file.read_bytes() == content


def edit(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


def test_workers_refuse_what_does_not_fit(corpus: Path, tmp_path: Path) -> None:
    prepared = prepare(table(corpus), tmp_path / "cache")
    tokens = prepared.members[0].folder / "train.tokens"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(UserError) as caught:
        open_prepared(prepared.folder)
    assert caught.value.what == (
        f"train.tokens has {len(content) - 2} bytes, its header says {len(content)} "
        f"({len(content) // 2} x uint16)"
    )
    tokens.write_bytes(content)
    documents = prepared.members[0].folder / "train.documents"
    pairs = np.fromfile(documents, dtype="<i8")
    for index, value, what in ((0, -1, "does not fit"), (1, 99, "names a group")):
        broken = pairs.copy()
        broken[index] = value
        broken.tofile(documents)
        with pytest.raises(UserError, match=what):
            open_prepared(prepared.folder)


OUTSIDE = [{"name": "", "weight": 1.0, "tokens": "../../elsewhere"}]


@pytest.mark.parametrize(
    ("file", "key", "value", "what"),
    [
        ("prepared.json", "tokenizer", "../../elsewhere", "does not describe prepared data"),
        ("prepared.json", "members", OUTSIDE, "does not describe prepared data"),
        ("prepared.json", "format", "reparto-prepared/9", "has format `reparto-prepared/9`"),
        ("tokens.json", "dtype", "object", "dtype"),
        ("tokens.json", "format", "other", "has format `other`"),
        ("tokens.json", "splits", {}, "no split train, validation, confirmation"),
    ],
)
def test_workers_refuse_odd_headers(
    corpus: Path, tmp_path: Path, file: str, key: str, value: object, what: str
) -> None:
    prepared = prepare(table(corpus), tmp_path / "cache")
    folder = prepared.folder if file == "prepared.json" else prepared.members[0].folder
    edit(folder / file, lambda described: described.update({key: value}))
    with pytest.raises(UserError, match=what):
        open_prepared(prepared.folder)


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        open_prepared(tmp_path / "prepared" / "gone")


def split_of(lengths: list[tuple[int, int]], counted: list[int] | None = None) -> TokenSplit:
    """Documents of (tokens, group), ids counting up from 0."""
    ends = np.cumsum([length for length, _ in lengths], dtype=np.int64)
    total = int(ends[-1]) if len(lengths) else 0
    return TokenSplit(
        ids=np.arange(total, dtype=np.uint16),
        ends=ends,
        groups=np.array([group for _, group in lengths], dtype=np.int64),
        counted=None if counted is None else np.array(counted, dtype=np.uint8),
    )


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=0, max_size=12),
    st.integers(1, 7),
)
def test_evaluation_asks_every_token_of_a_group_but_its_first_once(
    documents: list[tuple[int, int]], length: int
) -> None:
    documents = sorted(documents, key=lambda document: document[1])
    dataset = EvaluationDataset(split_of(documents), length, pad_id=0)
    asked: dict[int, list[int]] = {}
    for sample_id in range(len(dataset)):
        sample = dataset[sample_id]
        assert len(sample.input_ids_S) == len(sample.labels_S) == length
        valid = sample.labels_S != IGNORED
        assert valid.any()
        assert (sample.input_ids_S[valid] + 1 == sample.labels_S[valid]).all()
        asked.setdefault(sample.group, []).extend(sample.labels_S[valid].tolist())
    expected: dict[int, list[int]] = {}
    token = 0
    for tokens, group in documents:
        expected.setdefault(group, []).extend(range(token, token + tokens))
        token += tokens
    assert asked == {group: ids[1:] for group, ids in expected.items() if len(ids) > 1}


def test_tokens_that_are_no_labels_are_read_but_not_asked() -> None:
    split = split_of([(9, 0)], counted=[1, 0, 0, 1, 1, 1, 0, 1, 1])
    input_ids, labels = TokenDataset(split, 4).sample(0)
    assert input_ids.tolist() == [0, 1, 2, 3]
    assert labels.tolist() == [IGNORED, IGNORED, 3, 4]
    assert TokenDataset(split, 4).sample(1)[1].tolist() == [5, IGNORED, 7, 8]


def test_dtype_and_cache_place() -> None:
    assert [dtype_for(n) for n in (257, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/reparto")
    assert default_cache_dir({"XDG_CACHE_HOME": "rel"}) == Path.home() / ".cache" / "reparto"
    assert default_cache_dir({}) == Path.home() / ".cache" / "reparto"
