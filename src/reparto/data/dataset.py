"""Tokens to samples: fixed windows or packed documents, for training and for evaluation.

A stream sample i is tokens [i S, i S + S] of all documents in a row: S inputs, and the same shifted
by one as labels, so the label at a sample's border is the next sample's first input and no token is
lost or asked twice. The last fewer than S + 1 tokens of the corpus are not trained on. Rejected:
one document a sample, which pads more than half of a library of short files.

A packed sample holds whole documents side by side (`partition/packing.py`). Each has its own
segment id, on which attention must not cross, and its own positions from 0. A document's last
token is only a label and its first is none, so nothing is asked across a border.

Evaluation samples never cross groups, and are filled up with ignored labels, so every token but
each group's first (packed: each document's first) is asked exactly once and sums by group are
exact.

Legend: S sequence length, in tokens. Labels are shifted already; IGNORED marks what is not asked.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from reparto.data.store import Ids, TokenSplit
from reparto.partition.packing import pack, pieces
from reparto.partition.tokens import MixtureOrder, Order

#: the label that no loss counts; torch's cross-entropy ignores it by default
IGNORED = -100

SampleT_co = TypeVar("SampleT_co", covariant=True)


class MapDataset(Protocol[SampleT_co]):
    """Anything with a length and an index."""

    def __len__(self) -> int:
        """Samples, over all ranks."""
        ...

    def __getitem__(self, index: int, /) -> SampleT_co:
        """Sample `index`: the same at every call."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """A dataset that knows in which order it wants to be read."""

    def order(self, seed: int) -> Order:
        """Its order under this seed."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenSample:
    """One sequence."""

    sample_id: int
    "its index in the dataset"
    input_ids_S: Ids
    "tokens read"
    labels_S: Ids
    "the token that follows each, or IGNORED"
    group: int = 0
    "index of its group in evaluation; training samples cross groups and do not use it"
    position_ids_S: Ids | None = None
    "place of each token in its document; None: the place in the sequence"
    segment_ids_S: Ids | None = None
    "which of the packed documents each token belongs to; None: the sequence is one text"


class TokenDataset:
    """The training samples of one split, read from its mapped tokens."""

    def __init__(self, split: TokenSplit, sequence_length: int) -> None:
        self._split = split
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._split.ids) - 1) // self.sequence_length)

    def __getitem__(self, sample_id: int) -> TokenSample:
        input_ids_S, labels_S = self.sample(sample_id)
        return TokenSample(sample_id=sample_id, input_ids_S=input_ids_S, labels_S=labels_S)

    def sample(self, sample_id: int) -> tuple[Ids, Ids]:
        """(input ids, labels), both int64 of the sequence length."""
        _check_index(sample_id, len(self))
        start = sample_id * self.sequence_length
        return window(self._split, start, start + self.sequence_length)


class EvaluationDataset:
    """The stream samples of a split whose groups lie together; none crosses a group."""

    def __init__(self, split: TokenSplit, sequence_length: int, *, pad_id: int) -> None:
        self._split = split
        self.sequence_length = sequence_length
        self._pad_id = pad_id
        self._windows = _windows(split, sequence_length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, sample_id: int) -> TokenSample:
        _check_index(sample_id, len(self))
        start, stop, group = (int(value) for value in self._windows[sample_id])
        input_ids, labels = window(self._split, start, stop)
        missing = (0, self.sequence_length - len(input_ids))
        return TokenSample(
            sample_id=sample_id,
            input_ids_S=np.pad(input_ids, missing, constant_values=self._pad_id),
            labels_S=np.pad(labels, missing, constant_values=IGNORED),
            group=group,
        )


class PackedDataset:
    """Samples of whole documents side by side, for training and evaluation alike."""

    def __init__(
        self, split: TokenSplit, packing: Ids, sequence_length: int, *, pad_id: int
    ) -> None:
        self._split, self._packing = split, packing
        self.sequence_length = sequence_length
        self._pad_id = pad_id
        num_samples = int(packing[-1, 0]) + 1 if len(packing) else 0
        self._first = np.searchsorted(packing[:, 0], np.arange(num_samples + 1))

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, sample_id: int) -> TokenSample:
        _check_index(sample_id, len(self))
        rows = self._packing[self._first[sample_id] : self._first[sample_id + 1]]
        size = self.sequence_length
        # what is left over at the end is a segment of its own, so that it has something to attend
        input_ids_S = np.full(size, self._pad_id, dtype=np.int64)
        labels_S = np.full(size, IGNORED, dtype=np.int64)
        segment_ids_S = np.full(size, len(rows), dtype=np.int64)
        position_ids_S = np.zeros(size, dtype=np.int64)
        at = 0
        for segment, (_, start, stop) in enumerate(rows.tolist()):
            place = slice(at, at + stop - start)
            input_ids_S[place], labels_S[place] = window(self._split, start, stop)
            segment_ids_S[place] = segment
            position_ids_S[place] = np.arange(stop - start)
            at = place.stop
        position_ids_S[at:] = np.arange(size - at)
        document = np.searchsorted(self._split.ends, rows[0, 1], side="right")
        return TokenSample(
            sample_id=sample_id,
            input_ids_S=input_ids_S,
            labels_S=labels_S,
            group=int(self._split.groups[document]),
            position_ids_S=position_ids_S,
            segment_ids_S=segment_ids_S,
        )


class Concatenated:
    """Several datasets as one; groups of each are counted on from those before it."""

    def __init__(
        self,
        datasets: Sequence[MapDataset[TokenSample]],
        *,
        num_groups: Sequence[int],
        passes: Sequence[float],
    ) -> None:
        self._datasets = tuple(datasets)
        self._sizes = tuple(len(dataset) for dataset in datasets)
        self._firsts = (0, *itertools.accumulate(self._sizes))
        self._groups = (0, *itertools.accumulate(num_groups))
        self._passes = tuple(passes)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, sample_id: int) -> TokenSample:
        _check_index(sample_id, len(self))
        which = bisect.bisect_right(self._firsts, sample_id) - 1
        sample = self._datasets[which][sample_id - self._firsts[which]]
        return replace(sample, sample_id=sample_id, group=sample.group + self._groups[which])

    def order(self, seed: int) -> MixtureOrder:
        """Each dataset by its weight."""
        return MixtureOrder(seed=seed, sizes=self._sizes, passes=self._passes)


def _check_index(sample_id: int, count: int) -> None:
    if not 0 <= sample_id < count:
        raise IndexError(f"sample {sample_id} of {count}")


def window(split: TokenSplit, start: int, stop: int) -> tuple[Ids, Ids]:
    """Tokens [start, stop) and the tokens that follow each; token `stop` must exist."""
    tokens = split.ids[start : stop + 1].astype(np.int64)
    input_ids, labels = tokens[:-1], tokens[1:]
    if split.counted is not None:
        labels = np.where(split.counted[start + 1 : stop + 1] == 1, labels, IGNORED)
    return input_ids, labels


def _groups_of(split: TokenSplit) -> list[range]:
    """The documents of each group, for a split whose groups lie together."""
    changes = (np.flatnonzero(np.diff(split.groups)) + 1).tolist()
    edges = [0, *changes, len(split.groups)] if len(split.groups) else []
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def _windows(split: TokenSplit, sequence_length: int) -> Ids:
    """(start, stop, group) of every window; each group's last token is only a label."""
    rows: list[tuple[int, int, int]] = []
    for documents in _groups_of(split):
        begin = int(split.ends[documents.start - 1]) if documents.start else 0
        end = int(split.ends[documents.stop - 1]) - 1
        for start in range(begin, end, sequence_length):
            stop = min(start + sequence_length, end)
            rows.append((start, stop, int(split.groups[documents.start])))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def packing_of(split: TokenSplit, sequence_length: int, *, by_group: bool) -> Ids:
    """(sample, start, stop) of every piece of every document, samples in order.

    With `by_group` no sample holds documents of two groups.
    """
    rows: list[tuple[int, int, int]] = []
    begins = [0, *split.ends.tolist()]
    num_samples = 0
    for documents in _groups_of(split) if by_group else [range(len(split.ends))]:
        cut = [
            (begins[document] + piece.start, begins[document] + piece.stop)
            for document in documents
            for piece in pieces(begins[document + 1] - begins[document], sequence_length)
        ]
        bins = pack([stop - start for start, stop in cut], sequence_length)
        for sample, chosen in enumerate(bins, start=num_samples):
            rows += [(sample, *cut[index]) for index in chosen]
        num_samples += len(bins)
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
