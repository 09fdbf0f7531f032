"""Documents to token files: the part of preparing that takes time.

Documents are encoded a MiB of text at once, which keeps both the library's threads busy and the
memory small; each is written as it comes, except the held-out ones, which wait for their group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from reparto.data.corpus import AnyDocument, Corpus, Document, TokenDocument
from reparto.data.split import SPLITS, Split, Survey
from reparto.data.store import FORMAT, Flags, Header, Ids, SplitWriter, dtype_for, write_header
from reparto.data.tokenize import Tokenizer

_ENCODE_AT_ONCE_BYTES = 1 << 20


def sample_texts(corpus: Corpus, surveyed: Survey, limit_bytes: int) -> Iterator[str]:
    """Training texts of at most `limit_bytes`, chosen by hash, in the order of the corpus."""
    train = [entry for entry in surveyed.entries if entry.split == "train"]
    room: dict[bytes, int] = {}
    left = limit_bytes
    for entry in sorted(train, key=lambda entry: entry.digest[8:]):
        if left > 0:
            room[entry.digest] = left
            left -= entry.num_bytes
    for split, document in surveyed.read(corpus):
        most = room.pop(document.digest(), 0) if split == "train" else 0
        if most and isinstance(document, Document):
            yield document.text.encode()[:most].decode(errors="ignore")


def encode(
    folder: Path,
    corpus: Corpus,
    surveyed: Survey,
    tokenizer: Tokenizer,
    told: Callable[[str, float], None],
) -> None:
    """Write the token files of all splits into `folder`, header last."""
    used = [entry for entry in surveyed.entries if entry.split is not None]
    groups = sorted({entry.group for entry in used})
    index = {group: number for number, group in enumerate(groups)}
    total = sum(entry.num_bytes for entry in used)
    done = 0
    writers = {
        split: SplitWriter(
            folder, split, vocab_size=tokenizer.vocab_size, by_group=split != "train"
        )
        for split in SPLITS
    }
    for batch in _batches(surveyed.read(corpus)):
        encoded = _encode_batch([document for _, document in batch], tokenizer)
        for (split, document), (ids, counted) in zip(batch, encoded, strict=True):
            writers[split].add(
                group=index[document.group],
                num_bytes=document.num_bytes,
                ids=ids,
                counted=counted,
            )
            done += document.num_bytes
        told("encoding", done / total)
    write_header(
        folder,
        Header(
            format=FORMAT,
            corpus_digest=surveyed.digest,
            tokenizer_digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            dtype=dtype_for(tokenizer.vocab_size),
            groups=tuple(groups),
            splits={split: writer.finish() for split, writer in writers.items()},
        ),
    )


def _encode_batch(
    documents: Sequence[AnyDocument], tokenizer: Tokenizer
) -> Iterator[tuple[Ids, Flags]]:
    """(ids with the end of the document, which of them are labels) of each document."""
    texts = [p.text for one in documents if isinstance(one, Document) for p in one.parts]
    encoded = iter(tokenizer.encode_batch(texts))
    for document in documents:
        if isinstance(document, TokenDocument):
            ids = np.append(document.ids, tokenizer.eod_id)
            yield ids, np.ones(len(ids), dtype=np.bool_)
        else:
            pieces = [next(encoded) for _ in document.parts]
            flags = [part.counted for part in document.parts]
            lengths = [len(piece) for piece in pieces]
            ids = np.array([*itertools.chain(*pieces), tokenizer.eod_id], dtype=np.int64)
            yield ids, np.repeat([*flags, flags[-1]], [*lengths, 1])


def _batches(
    documents: Iterator[tuple[Split, AnyDocument]],
) -> Iterator[list[tuple[Split, AnyDocument]]]:
    batch: list[tuple[Split, AnyDocument]] = []
    size = 0
    for split, document in documents:
        batch.append((split, document))
        size += document.num_bytes
        if size >= _ENCODE_AT_ONCE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
