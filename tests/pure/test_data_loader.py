"""Loaders: exactly once for any plan, resumable from one number, reading ahead without a trace."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.config.data import DataConfig
from reparto.data.dataset import IGNORED, EvaluationDataset, TokenDataset
from reparto.data.loader import Loader, Microbatch, TokenCollate, evaluation_batches
from reparto.data.prepare import prepare
from reparto.data.store import TokenSplit
from reparto.errors import UserError
from reparto.partition.tokens import sample_at


class Squares:
    """A map-style dataset that has nothing to do with tokens."""

    def __init__(self, length: int, *, bad: int = -1) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == self.bad:
            raise OSError("disk is gone")
        return index, index * index


def pairs(samples: Sequence[tuple[int, int]], pad_to: int) -> list[tuple[int, int]]:
    return list(samples) + [(-1, -1)] * (pad_to - len(samples))


def tokens(count: int, length: int = 4) -> TokenDataset:
    split = TokenSplit(
        ids=np.arange(count * length + 1, dtype=np.uint16),
        ends=np.array([count * length + 1]),
        groups=np.array([0]),
        counted=None,
    )
    return TokenDataset(split, length)


def run(
    n: int, batch: int, data: int, microbatches: int, start: int, steps: int, *, workers: int = 0
) -> list[list[tuple[tuple[int, ...], ...]]]:
    """Sample ids of every rank, step and microbatch."""
    found = []
    for rank in range(data):
        with Loader(
            Squares(n),
            pairs,
            seed=1,
            batch_size=batch,
            data_degree=data,
            data_rank=rank,
            num_microbatches=microbatches,
            position=start,
            workers=workers,
        ) as loader:
            rows = []
            for step in range(steps):
                batches = next(loader)
                assert loader.position == start + (step + 1) * batch
                real = [tuple(i for i, _ in cell if i >= 0) for cell in batches]
                assert tuple(real) == loader.sample_ids
                assert {len(cell) for cell in batches} == {loader.split.sequences}
                rows.append(loader.sample_ids)
            found.append(rows)
    return found


def flat(found: list[list[tuple[tuple[int, ...], ...]]], step: int) -> list[int]:
    return [i for rank in found for cell in rank[step] for i in cell]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 30), st.integers(1, 5), st.integers(1, 5), st.integers(0, 90)
)
def test_a_step_holds_the_same_samples_under_every_plan(
    n: int, batch: int, data: int, microbatches: int, start: int
) -> None:
    batch = max(batch, data * microbatches)
    found = run(n, batch, data, microbatches, start, steps=3)
    for step in range(3):
        first = start + step * batch
        assert flat(found, step) == [
            sample_at(1, position, n)[1] for position in range(first, first + batch)
        ]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_do_not_depend_on_workers(workers: int) -> None:
    assert run(17, 6, 2, 2, 5, 20, workers=workers) == run(17, 6, 2, 2, 5, 20)


def test_an_epoch_is_exact_and_may_end_inside_a_batch() -> None:
    found = run(n=10, batch=4, data=2, microbatches=1, start=0, steps=5)
    seen = [i for step in range(5) for i in flat(found, step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_L38_a_batch_read_ahead_is_not_counted_as_seen() -> None:
    seen: list[int] = []
    positions = set()
    for rank in range(2):
        with Loader(
            Squares(40), pairs, seed=1, batch_size=4, data_degree=2, data_rank=rank, workers=1
        ) as loader:
            for _ in range(5):
                seen += [i for i, _ in next(loader)[0]]
            time.sleep(0.05)  # let it read ahead
            positions.add(loader.position)
    assert positions == {20}
    for rank in range(2):
        with Loader(
            Squares(40),
            pairs,
            seed=1,
            batch_size=4,
            data_degree=2,
            data_rank=rank,
            position=20,
            workers=1,
        ) as loader:
            for _ in range(5):
                seen += [i for i, _ in next(loader)[0]]
    assert Counter(seen) == Counter(range(40))


@pytest.mark.parametrize("ranks", [(2, 4), (4, 1), (3, 2)])
def test_resuming_on_another_number_of_ranks_repeats_and_loses_nothing(
    ranks: tuple[int, int],
) -> None:
    n, batch = 48, 12
    before = run(n, batch, ranks[0], 1, 0, 2)
    after = run(n, batch, ranks[1], 2, 2 * batch, 2)
    seen = [i for found in (before, after) for step in range(2) for i in flat(found, step)]
    assert sorted(seen) == list(range(n))


def test_L44_no_rank_runs_out_before_another() -> None:
    # 9 batches of one sample over 2 ranks: both ranks take 5 steps, into the next epoch
    found = run(n=9, batch=2, data=2, microbatches=1, start=0, steps=5)
    assert [len(rank) for rank in found] == [5, 5]
    seen = [i for step in range(5) for i in flat(found, step)]
    assert sorted(seen[:9]) == list(range(9))


def test_epoch_counts_what_is_complete() -> None:
    loader = Loader(Squares(10), pairs, seed=1, batch_size=4, workers=0)
    epochs = []
    for _ in range(5):
        next(loader)
        epochs.append(loader.epoch)
    assert epochs == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_of_a_sample_reaches_the_step_with_its_number(workers: int) -> None:
    with Loader(Squares(8, bad=5), pairs, seed=1, batch_size=8, workers=workers) as loader:
        for _ in range(2):
            with pytest.raises(OSError, match="disk is gone") as caught:
                next(loader)
            assert "while reading sample 5 of 8" in caught.value.__notes__
        assert loader.position == 0


def reading_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("reparto-")]


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("workers", [1, 3])
def test_closing_ends_all_threads(taken: int, workers: int) -> None:
    before = set(reading_threads())  # those of other tests in this process
    loader = Loader(Squares(8), pairs, seed=1, batch_size=4, workers=workers)
    for _ in range(taken):
        next(loader)
    loader.close()
    loader.close()
    assert set(reading_threads()) <= before
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_reading_ahead_is_bounded() -> None:
    read: list[int] = []

    class Counting(Squares):
        def __getitem__(self, index: int) -> tuple[int, int]:
            read.append(index)
            return super().__getitem__(index)

    with Loader(Counting(1000), pairs, seed=1, batch_size=4, workers=1) as loader:
        next(loader)
        deadline = time.monotonic() + 5
        while len(read) < 16 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(read) == 16  # the step, two waiting, one in hand


def test_an_empty_dataset_and_a_small_batch_are_refused() -> None:
    with pytest.raises(UserError, match="no samples"):
        Loader(Squares(0), pairs, seed=1, batch_size=4)
    with pytest.raises(UserError) as caught:
        Loader(Squares(9), pairs, seed=1, batch_size=4, data_degree=2, num_microbatches=3)
    assert caught.value.nearest == "batch_size = 6"


def test_token_microbatches_have_one_shape_and_count_their_labels() -> None:
    dataset = tokens(count=10)
    collate = TokenCollate(sequence_length=4, pad_id=9)
    with Loader(dataset, collate, seed=1, batch_size=5, num_microbatches=2, workers=0) as loader:
        first, second = next(loader)
    assert first.input_ids_BS.shape == second.input_ids_BS.shape == (3, 4)
    assert first.input_ids_BS.dtype == first.labels_BS.dtype == torch.int64
    assert (first.num_tokens, second.num_tokens) == (8, 12)
    assert first.input_ids_BS[2].tolist() == [9] * 4
    assert first.labels_BS[2].tolist() == [IGNORED] * 4
    for batch in (first, second):
        for row, sample_id in enumerate(batch.sample_ids):
            start = 4 * sample_id
            assert batch.input_ids_BS[row].tolist() == list(range(start, start + 4))
            assert batch.labels_BS[row].tolist() == list(range(start + 1, start + 5))


def test_no_samples_make_a_batch_of_padding() -> None:
    batch = TokenCollate(sequence_length=4, pad_id=0)([], 2)
    assert batch.labels_BS.tolist() == [[IGNORED] * 4] * 2
    assert (batch.num_tokens, batch.sample_ids) == (0, ())


def loss_by_group(batches: list[Microbatch], groups: int) -> tuple[list[int], list[int]]:
    """An integer stand-in for a loss, summed and counted by group: exact in any order."""
    sums, counts = [0] * groups, [0] * groups
    for batch in batches:
        valid = batch.labels_BS != IGNORED
        for row, group in enumerate(batch.group_ids_B.tolist()):
            sums[group] += int((batch.labels_BS[row][valid[row]] ** 2).sum())
            counts[group] += int(valid[row].sum())
    return sums, counts


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9))
def test_L33_evaluation_is_the_same_sum_on_any_number_of_ranks(
    data: int, microbatch_size: int, length: int
) -> None:
    split = TokenSplit(
        ids=np.arange(60, dtype=np.uint16),
        ends=np.array([7, 20, 21, 60]),
        groups=np.array([0, 0, 1, 2]),
        counted=None,
    )
    dataset = EvaluationDataset(split, length, pad_id=0)
    collate = TokenCollate(sequence_length=length, pad_id=0)
    by_rank = [
        list(
            evaluation_batches(
                dataset,
                collate,
                microbatch_size=microbatch_size,
                data_degree=data,
                data_rank=rank,
            )
        )
        for rank in range(data)
    ]
    assert len({len(batches) for batches in by_rank}) == 1
    assert {batch.labels_BS.shape for batches in by_rank for batch in batches} == {
        (microbatch_size, length)
    }
    found = loss_by_group([batch for batches in by_rank for batch in batches], 3)
    squares = [sum(i * i for i in range(1, 20)), 0, sum(i * i for i in range(22, 60))]
    assert found == (squares, [19, 0, 38])


def test_from_config_to_microbatch(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {number}\n" for number in range(3000)))
    config = DataConfig(
        source="text", paths=(str(tmp_path / "book.txt"),), tokenizer="bytes", sequence_length=64
    )
    prepared = prepare(config, tmp_path / "cache")
    collate = TokenCollate(sequence_length=64, pad_id=prepared.header.eod_id)
    with Loader(prepared.train_dataset(), collate, seed=1, batch_size=8) as loader:
        (batch,) = next(loader)
    assert batch.input_ids_BS.shape == (8, 64)
    assert (batch.input_ids_BS[:, 1:] == batch.labels_BS[:, :-1]).all()
    assert int(batch.input_ids_BS.max()) < prepared.vocab_size
