"""Mixtures and packing, from the config to the microbatch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from reparto.config.data import DataConfig
from reparto.config.validate import build
from reparto.data.dataset import IGNORED, TokenDataset
from reparto.data.loader import Loader, TokenCollate, collate_for, evaluation_batches
from reparto.data.prepare import open_prepared, prepare
from reparto.data.prepared import Prepared
from reparto.errors import UserError


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    for name, count in (("prose", 90), ("code", 30)):
        for number in range(count):
            path = tmp_path / name / f"{number}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{name} {number}: " + name[0] * (number % 50 + 4))
    return tmp_path


def table(corpora: Path, weights: dict[str, float], **changes: object) -> DataConfig:
    members = [
        {"name": name, "source": "text", "paths": [str(corpora / name)], "weight": weight}
        for name, weight in weights.items()
    ]
    values = {"source": "mixture", "mixture": members, "tokenizer": "bytes"}
    return build(
        DataConfig, {**values, "sequence_length": 8, "batch_size": 4, **changes}, where="data"
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_of_a_mixture_is_exact_for_any_degree(corpora: Path, ranks: int) -> None:
    prepared = prepare(table(corpora, {"prose": 0.5, "code": 2.0}), corpora / "cache")
    dataset = prepared.train_dataset()
    sizes = [(member.header.splits["train"].num_tokens - 1) // 8 for member in prepared.members]
    assert len(dataset) == sum(sizes)
    shares = [round(0.5 * sizes[0]), 2 * sizes[1]]
    assert prepared.num_train_samples == sum(shares)
    batch = 6
    epochs = 2 * batch  # so that epochs end where a step ends
    seen: Counter[int] = Counter()
    for rank in range(ranks):
        loader = Loader(
            dataset,
            collate_for(prepared),
            seed=1,
            batch_size=batch,
            data_degree=ranks,
            data_rank=rank,
            workers=0,
        )
        while loader.position < epochs * sum(shares):
            for microbatch in next(loader):
                seen.update(microbatch.sample_ids)
    prose = [seen[sample] for sample in range(sizes[0])]
    code = [seen[sample] for sample in range(sizes[0], sum(sizes))]
    assert set(code) == {2 * epochs}
    assert sum(prose) == epochs * shares[0] and max(prose) - min(prose) <= 1


def test_a_loader_takes_the_order_of_a_mixture_by_itself(corpora: Path) -> None:
    prepared = prepare(table(corpora, {"prose": 1.0, "code": 3.0}), corpora / "cache")
    loader = Loader(
        prepared.train_dataset(), collate_for(prepared), seed=7, batch_size=10, workers=0
    )
    (batch,) = next(loader)
    assert list(batch.sample_ids) == prepared.order(7).at(range(10))
    assert loader.epoch == 0


def test_groups_of_a_mixture_name_their_corpus(corpora: Path) -> None:
    prepared = prepare(
        table(corpora, {"prose": 1.0, "code": 1.0}, validation_share=0.3), corpora / "cache"
    )
    assert prepared.groups == ("prose/prose", "code/code")
    batches = evaluation_batches(
        prepared.validation_dataset(), collate_for(prepared), microbatch_size=4
    )
    asked: Counter[int] = Counter()
    for batch in batches:
        for row, group in enumerate(batch.group_ids_B.tolist()):
            asked[group] += int((batch.labels_BS[row] != IGNORED).sum())
    tokens = [member.header.splits["validation"].num_tokens for member in prepared.members]
    assert asked == {0: tokens[0] - 1, 1: tokens[1] - 1}


def test_adding_a_corpus_encodes_only_that_one(corpora: Path) -> None:
    prepare(table(corpora, {"prose": 1.0}), corpora / "cache")
    told: list[str] = []
    prepared = prepare(
        table(corpora, {"prose": 0.7, "code": 1.0}),
        corpora / "cache",
        lambda what, share: told.append(what),
    )
    assert told.count("encoding") == 1
    assert prepared == open_prepared(prepared.folder)
    assert len(list((corpora / "cache" / "tokens").iterdir())) == 2


def test_the_entropy_of_a_mixture_is_weighted(corpora: Path) -> None:
    cache = corpora / "cache"
    even = prepare(table(corpora, {"prose": 1.0, "code": 1.0}), cache).unigram_entropy_nats
    doubled = prepare(table(corpora, {"prose": 2.0, "code": 2.0}), cache).unigram_entropy_nats
    mostly = prepare(table(corpora, {"prose": 1e-1, "code": 50.0}), cache).unigram_entropy_nats
    code = prepare(table(corpora, {"code": 1.0}), cache).unigram_entropy_nats
    assert doubled == pytest.approx(even, rel=1e-12)
    assert abs(mostly - code) < 0.1 < abs(even - code)


def test_a_mixture_trains_its_bpe_on_all_corpora(corpora: Path) -> None:
    config = table(corpora, {"prose": 1.0, "code": 1.0}, tokenizer="bpe", vocab_size=300)
    prepared = prepare(config, corpora / "cache")
    tokenizer = prepared.tokenizer()
    assert len(tokenizer.encode("prose")) < 5 and len(tokenizer.encode("code")) < 4


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"mixture": []}, "data.mixture", "need each other"),
        ({"source": "text", "paths": ["x"]}, "data.mixture", "need each other"),
        ({"paths": ["x"]}, "data.paths", "belong into"),
        ({"tokenizer": "none"}, "data.tokenizer", "text needs a tokenizer"),
        ({"mixture": [{"name": "a", "source": "text"}]}, "data.mixture.a.paths", "none is named"),
        (
            {"mixture": [{"name": "a", "source": "text", "paths": ["x"]}] * 2},
            "data.mixture",
            "two corpora have one name",
        ),
        (
            {"mixture": [{"name": "a", "source": "text", "paths": ["x"], "weight": 0}]},
            "data.mixture.0.weight",
            "0 is not allowed",
        ),
        (
            {"mixture": [{"name": "a", "source": "tokens", "paths": ["x"]}], "tokenizer": "bpe"},
            "data.tokenizer",
            "was encoded already",
        ),
        (
            {"mixture": [{"name": "a", "source": "text", "paths": ["x"], "record": "chat"}]},
            "data.mixture.a.record",
            "has no records",
        ),
    ],
)
def test_bad_mixtures(corpora: Path, changes: dict[str, object], where: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        table(corpora, {"prose": 1.0}, **changes)
    assert caught.value.where == where
    assert what in caught.value.what


def test_errors_name_the_table_of_the_mixture(corpora: Path) -> None:
    with pytest.raises(UserError) as caught:
        prepare(table(corpora, {"prose": 1.0, "gone": 1.0}), corpora / "cache")
    assert caught.value.where == "data.mixture.gone.paths"
    with pytest.raises(UserError) as caught:
        prepare(table(corpora, {"prose": 1.0, "code": 1e-4}), corpora / "cache")
    assert caught.value.where == "data.mixture.code.weight"
    assert "is no sample an epoch" in caught.value.what


def packed(corpora: Path, size: int, **changes: object) -> Prepared:
    config = DataConfig.model_validate(
        {
            "source": "text",
            "paths": (str(corpora / "prose"), str(corpora / "code")),
            "tokenizer": "bytes",
            "sequence_length": size,
            "packing": "documents",
            "validation_share": 0.3,
            **changes,
        }
    )
    return prepare(config, corpora / "cache")


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("size", [8, 64, 500])
def test_packed_documents_stand_alone(corpora: Path, split: str, size: int) -> None:
    prepared = packed(corpora, size)
    train = split == "train"
    dataset = prepared.train_dataset() if train else prepared.validation_dataset()
    texts = {path.read_text() for path in corpora.glob("*/*.txt")}
    asked: Counter[str] = Counter()
    for sample_id in range(len(dataset)):
        sample = dataset[sample_id]
        assert sample.segment_ids_S is not None and sample.position_ids_S is not None
        assert len(sample.input_ids_S) == len(sample.segment_ids_S) == size
        for segment in np.unique(sample.segment_ids_S):
            place = sample.segment_ids_S == segment
            ids, labels = sample.input_ids_S[place], sample.labels_S[place]
            assert sample.position_ids_S[place].tolist() == list(range(len(ids)))
            if (labels == IGNORED).all():
                assert set(ids.tolist()) == {256}  # what is left over
                continue
            assert (labels != IGNORED).all()  # a border is never asked, so nothing is to ignore
            assert (ids[1:] == labels[:-1]).all() and 256 not in ids
            whole = bytes([*ids, *([labels[-1]] if labels[-1] != 256 else [])]).decode()
            asked[whole] += 1
            if not train:
                assert prepared.groups[sample.group] == whole.split(" ")[0] or size == 8
    if size == 500:
        documents = prepared.counts("train" if train else "validation").num_documents
        assert set(asked.values()) == {1} and len(asked) == documents
        assert set(asked) <= texts
    labels = sum(int((dataset[i].labels_S != IGNORED).sum()) for i in range(len(dataset)))
    counts = prepared.counts("train" if train else "validation")
    assert labels == counts.num_tokens - counts.num_documents


def test_packed_microbatches_carry_segments_and_positions(corpora: Path) -> None:
    prepared = packed(corpora, 64)
    loader = Loader(
        prepared.train_dataset(),
        collate_for(prepared),
        seed=1,
        batch_size=3,
        num_microbatches=2,
        workers=0,
    )
    short, full = next(loader)
    for batch in (short, full):
        assert batch.segment_ids_BS is not None and batch.position_ids_BS is not None
        assert batch.segment_ids_BS.shape == batch.position_ids_BS.shape == (2, 64)
    assert short.segment_ids_BS is not None and short.position_ids_BS is not None
    assert short.segment_ids_BS[1].tolist() == [0] * 64
    assert short.position_ids_BS[1].tolist() == list(range(64))
    assert short.labels_BS[1].tolist() == [IGNORED] * 64


def test_segments_are_never_lost_in_silence(corpora: Path) -> None:
    dataset = packed(corpora, 64).train_dataset()
    with pytest.raises(UserError, match="need a model that is given their segments"):
        TokenCollate(sequence_length=64, pad_id=0)([dataset[0]], 1)


def test_a_stream_has_no_segments(corpora: Path) -> None:
    prepared = prepare(table(corpora, {"prose": 1.0}), corpora / "cache")
    assert isinstance(prepared.train_dataset(), TokenDataset)
    batch = collate_for(prepared)([prepared.train_dataset()[0]], 1)
    assert batch.segment_ids_BS is None and batch.position_ids_BS is None


def test_a_damaged_packing_is_refused_by_workers_and_made_again(corpora: Path) -> None:
    prepared = packed(corpora, 64)
    path = prepared.folder / "0.train.packing"
    content = path.read_bytes()
    rows = np.fromfile(path, dtype="<i8").reshape(-1, 3)
    for column, value in ((0, 5), (1, -1), (2, 10**9), (2, 0)):
        broken = rows.copy()
        broken[0, column] = value
        broken.tofile(path)
        with pytest.raises(UserError, match="does not fit its tokens"):
            open_prepared(prepared.folder)
    path.write_bytes(content[:-8])
    with pytest.raises(UserError, match="its header says"):
        open_prepared(prepared.folder)
    assert packed(corpora, 64) == prepared
    assert path.read_bytes() == content


def test_padding_by_packing_is_told(corpora: Path) -> None:
    (warning,) = packed(corpora, 4096, batch_size=1).warnings
    assert warning.startswith("packed documents fill ")
