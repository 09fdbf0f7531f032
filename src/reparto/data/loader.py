"""Samples to microbatches: where reading meets ranks, ahead of the step that needs them.

A loader is a position and pure functions of it (`partition/tokens.py`), so it has no other state to
save, and `position` counts only batches that were handed out, never those read ahead. A thread
reads the next steps into a queue of two; copying mapped tokens releases the interpreter lock, and a
batch of 32 x 256 tokens takes 0.4 ms. Rejected: worker processes (torch's DataLoader), which start
in a second, copy every batch through shared memory, need pickles, and keep an order and a state of
their own to be resumed.

Any map-style dataset works: `dataset[i]` is a sample, `collate(samples, pad_to)` makes a batch.

Legend: B sequences of a microbatch, S sequence length in tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
import torch

from reparto.data.dataset import IGNORED, MapDataset, Ordered, TokenSample
from reparto.data.prepared import Prepared
from reparto.errors import UserError
from reparto.partition.tokens import (
    BatchSplit,
    Order,
    ShuffledOrder,
    batch_slices,
    evaluation_cells,
)

SampleT = TypeVar("SampleT")
BatchT = TypeVar("BatchT")

#: steps that are read ahead; two, so that one is always whole while the next is being read
_STEPS_AHEAD = 2


#: samples and the number of rows wanted to a batch; fewer samples than rows (in evaluation even
#: none) are filled up with rows that no loss counts, or not at all if shapes do not matter
Collate = Callable[[Sequence[SampleT], int], BatchT]


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Sequences that go through the model at once."""

    input_ids_BS: torch.Tensor
    "int64 tokens read"
    labels_BS: torch.Tensor
    "int64 tokens that follow (shifted already); IGNORED (-100) where nothing is asked"
    group_ids_B: torch.Tensor
    "int64 index of each sequence's group; only evaluation uses it"
    sample_ids: tuple[int, ...]
    "of the real sequences; rows after them are padding"
    num_tokens: int
    "labels that are asked: what this microbatch adds to the global count"
    position_ids_BS: torch.Tensor | None = None
    "int64 place of each token in its document; None: its place in the sequence"
    segment_ids_BS: torch.Tensor | None = None
    "int64 which packed document each token belongs to, attention must not cross; None: one text"


@dataclass(frozen=True, kw_only=True)
class TokenCollate:
    """Stacks token samples and fills up with sequences of ignored labels."""

    sequence_length: int
    "tokens a sequence"
    pad_id: int
    "token that padding sequences hold"
    packed: bool = False
    "whether samples hold several documents, so that batches carry their positions and segments"

    def __call__(self, samples: Sequence[TokenSample], pad_to: int) -> Microbatch:
        shape = (max(pad_to, len(samples)), self.sequence_length)
        input_ids_BS = np.full(shape, self.pad_id, dtype=np.int64)
        labels_BS = np.full(shape, IGNORED, dtype=np.int64)
        group_ids_B = np.zeros(shape[0], dtype=np.int64)
        position_ids_BS = np.tile(np.arange(self.sequence_length), (shape[0], 1))
        segment_ids_BS = np.zeros(shape, dtype=np.int64)
        for row, sample in enumerate(samples):
            input_ids_BS[row] = sample.input_ids_S
            labels_BS[row] = sample.labels_S
            group_ids_B[row] = sample.group
            if sample.segment_ids_S is not None and sample.position_ids_S is not None:
                self._refuse_lost_segments()
                position_ids_BS[row] = sample.position_ids_S
                segment_ids_BS[row] = sample.segment_ids_S
        return Microbatch(
            input_ids_BS=torch.from_numpy(input_ids_BS),
            labels_BS=torch.from_numpy(labels_BS),
            group_ids_B=torch.from_numpy(group_ids_B),
            sample_ids=tuple(sample.sample_id for sample in samples),
            num_tokens=int((labels_BS != IGNORED).sum()),
            position_ids_BS=torch.from_numpy(position_ids_BS) if self.packed else None,
            segment_ids_BS=torch.from_numpy(segment_ids_BS) if self.packed else None,
        )

    def _refuse_lost_segments(self) -> None:
        """Packed samples without their segments would let attention cross documents, unseen."""
        if not self.packed:
            raise UserError(
                "packed documents need a model that is given their segments and positions",
                where="data.packing",
                nearest='packing = "stream"',
            )


def collate_for(prepared: Prepared) -> TokenCollate:
    """The collate of prepared data, for training and evaluation."""
    return TokenCollate(
        sequence_length=prepared.sequence_length,
        pad_id=prepared.header.eod_id,
        packed=bool(prepared.pieces),
    )


@dataclass(frozen=True, kw_only=True)
class _Step(Generic[BatchT]):
    """What one rank reads for one step."""

    microbatches: list[BatchT]
    sample_ids: tuple[tuple[int, ...], ...]
    next_position: int


class Loader(Generic[SampleT, BatchT]):
    """One rank's endless steps: each `next` is a list of `num_microbatches` batches.

    `workers` threads read ahead; with 0 each step reads for itself. What is read is the same. An
    error of a sample reaches the caller of `next` as it was raised, with the sample's number noted.
    Close it (or use it as a context manager) to end its threads.
    """

    def __init__(
        self,
        dataset: MapDataset[SampleT],
        collate: Collate[SampleT, BatchT],
        *,
        seed: int,
        batch_size: int,
        data_degree: int = 1,
        data_rank: int = 0,
        num_microbatches: int = 1,
        position: int = 0,
        workers: int = 1,
        order: Order | None = None,
    ) -> None:
        if not len(dataset):
            raise UserError("the dataset has no samples", where="data", legal="at least one")
        self.split: BatchSplit = batch_slices(batch_size, data_degree, num_microbatches)
        self.position = position
        "samples consumed by the steps that were handed out, over all ranks: the resume state"
        self.sample_ids: tuple[tuple[int, ...], ...] = ()
        "samples of the step that was handed out last, by microbatch"
        self._dataset, self._collate = dataset, collate
        self._order: Order = order or _order_of(dataset, seed)
        self._batch_size = batch_size
        self._cells = self.split.cells[data_rank]
        self._workers = workers
        self._ahead: _ReadAhead[_Step[BatchT]] | None = None
        self._closed = False

    @property
    def epoch(self) -> int:
        """Epochs that are complete at `position`."""
        return self.position // self._order.epoch_length

    def __iter__(self) -> Iterator[list[BatchT]]:
        return self

    def __next__(self) -> list[BatchT]:
        if self._closed:
            raise ValueError("the loader is closed")
        if self._workers == 0:
            step = self._read(self.position, map)
        else:
            if self._ahead is None:
                self._ahead = _ReadAhead(self._steps)
            step = self._ahead.take()
        self.position = step.next_position
        self.sample_ids = step.sample_ids
        return step.microbatches

    def _steps(self) -> Iterator[_Step[BatchT]]:
        """All steps from `position` on; runs in the reading thread."""
        position = self.position
        with ThreadPoolExecutor(self._workers, "reparto-data") as pool:
            while True:
                step = self._read(position, pool.map if self._workers > 1 else map)
                position = step.next_position
                yield step

    def _read(self, position: int, apply: Callable[..., Iterator[SampleT]]) -> _Step[BatchT]:
        first, last = position + self._cells[0].start, position + self._cells[-1].stop
        ids = self._order.at(range(first, last))
        samples = list(apply(self._sample, ids))
        microbatches, sample_ids, start = [], [], 0
        for cell in self._cells:
            stop = start + len(cell)
            microbatches.append(self._collate(samples[start:stop], self.split.sequences))
            sample_ids.append(tuple(ids[start:stop]))
            start = stop
        return _Step(
            microbatches=microbatches,
            sample_ids=tuple(sample_ids),
            next_position=position + self._batch_size,
        )

    def _sample(self, index: int) -> SampleT:
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"while reading sample {index} of {len(self._dataset)}")
            raise

    def close(self) -> None:
        """End the threads; steps that were read ahead are forgotten. May be called twice."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> Loader[SampleT, BatchT]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _order_of(dataset: object, seed: int) -> Order:
    """The order a dataset asks for (a mixture's), or each sample once an epoch, shuffled."""
    if isinstance(dataset, Ordered):
        return dataset.order(seed)
    assert isinstance(dataset, Sized)
    return ShuffledOrder(seed=seed, num_samples=len(dataset))


class _ReadAhead(Generic[BatchT]):
    """A thread that keeps a bounded queue full from an endless iterator."""

    def __init__(self, items: Callable[[], Iterator[BatchT]]) -> None:
        self._queue: queue.Queue[BatchT | _Raised] = queue.Queue(_STEPS_AHEAD)
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(items,), name="reparto-loader", daemon=True
        )
        self._thread.start()

    def _run(self, items: Callable[[], Iterator[BatchT]]) -> None:
        try:
            for item in items():
                self._queue.put(item)
                if self._stop.is_set():
                    return
        except BaseException as error:
            self._queue.put(_Raised(error))

    def take(self) -> BatchT:
        """The next item; raises what the thread raised, again and again."""
        if self._failed is not None:
            raise self._failed
        item = self._queue.get()
        if isinstance(item, _Raised):
            self._failed = item.error
            raise item.error
        return item

    def close(self) -> None:
        """Make room, so that a blocked thread sees the stop, and wait for its end."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()


@dataclass(frozen=True)
class _Raised:
    """An error on its way to the thread that can handle it."""

    error: BaseException


def evaluation_batches(
    dataset: MapDataset[SampleT],
    collate: Collate[SampleT, BatchT],
    *,
    microbatch_size: int,
    data_degree: int = 1,
    data_rank: int = 0,
) -> Iterator[BatchT]:
    """One rank's share of an evaluation: every sample exactly once over all ranks.

    Every rank gets the same number of batches, of `microbatch_size` rows each, so that sharded
    forward passes keep step; missing rows are padding that no loss counts.
    """
    for cell in evaluation_cells(len(dataset), data_degree, data_rank, microbatch_size):
        yield collate([dataset[index] for index in cell], microbatch_size)
