"""Tokens to samples: fixed windows for training, windows inside one group for evaluation.

A training sample i is tokens [i S, i S + S] of all documents in a row: S inputs, and the same
shifted by one as labels, so the label at a sample's border is the next sample's first input and no
token is lost or asked twice. The last fewer than S + 1 tokens of the corpus are not trained on.
Rejected: one document a sample, which pads more than half of a library of short files.

Evaluation windows never cross groups, and the last window of a group is filled up with ignored
labels, so every token but each group's first is asked exactly once and sums by group are exact.

Legend: S sequence length, in tokens. Labels are shifted already; IGNORED marks what is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reparto.data.store import Ids, TokenSplit

#: the label that no loss counts; torch's cross-entropy ignores it by default
IGNORED = -100


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
        if not 0 <= sample_id < len(self):
            raise IndexError(f"sample {sample_id} of {len(self)}")
        start = sample_id * self.sequence_length
        return window(self._split, start, start + self.sequence_length)


class EvaluationDataset:
    """The samples of a split whose groups lie together; none crosses a group."""

    def __init__(self, split: TokenSplit, sequence_length: int, *, pad_id: int) -> None:
        self._split = split
        self.sequence_length = sequence_length
        self._pad_id = pad_id
        self._windows = _windows(split, sequence_length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, sample_id: int) -> TokenSample:
        start, stop, group = (int(value) for value in self._windows[sample_id])
        input_ids, labels = window(self._split, start, stop)
        missing = (0, self.sequence_length - len(input_ids))
        return TokenSample(
            sample_id=sample_id,
            input_ids_S=np.pad(input_ids, missing, constant_values=self._pad_id),
            labels_S=np.pad(labels, missing, constant_values=IGNORED),
            group=group,
        )


def window(split: TokenSplit, start: int, stop: int) -> tuple[Ids, Ids]:
    """Tokens [start, stop) and the tokens that follow each; token `stop` must exist."""
    tokens = np.asarray(split.ids[start : stop + 1]).astype(np.int64)
    input_ids, labels = tokens[:-1], tokens[1:]
    if split.counted is not None:
        counted = np.asarray(split.counted[start + 1 : stop + 1])
        labels = np.where(counted == 1, labels, IGNORED)
    return input_ids, labels


def _windows(split: TokenSplit, sequence_length: int) -> Ids:
    """(start, stop, group) of every window; each group's last token is only a label."""
    rows: list[tuple[int, int, int]] = []
    changes = np.flatnonzero(np.diff(split.groups)) + 1
    firsts = [0, *changes.tolist()] if len(split.groups) else []
    for first, last in zip(firsts, [*firsts[1:], len(split.groups)], strict=False):
        begin = int(split.ends[first - 1]) if first else 0
        end = int(split.ends[last - 1]) - 1
        for start in range(begin, end, sequence_length):
            rows.append((start, min(start + sequence_length, end), int(split.groups[first])))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
