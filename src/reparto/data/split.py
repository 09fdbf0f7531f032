"""Which document trains, which validates, and which is put aside unread.

A document goes to training, validation or confirmation by the hash of its *content*. So a second
copy of a file under another name cannot carry validation text into training, a renamed folder
changes nothing, and a corpus that grows keeps every old document where it was. The price: an edited
document may change sides. Rejected: a hash of the name, where copies leak, and a shuffled list cut
at 5 %, where one new file moves thousands. Documents that are alike but not equal can still stand
on both sides; nothing here looks for them.

A corpus is read once to hash it (0.05 s for 12 MB) and again to encode it, so it never has to fit
in memory; a file that changes in between is an error, not a mixture.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reparto.data.corpus import AnyDocument, Corpus
from reparto.errors import UserError

Split = Literal["train", "validation", "confirmation"]
SPLITS: tuple[Split, ...] = ("train", "validation", "confirmation")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A document as the survey knows it: everything but its text."""

    name: str
    "as `Document.name`"
    group: str
    "as `Document.group`"
    digest: bytes
    "as `Document.digest()`"
    num_bytes: int
    "as `Document.num_bytes`"
    split: Split | None
    "the part it serves; None: left out by `max_bytes`"


@dataclass(frozen=True, kw_only=True)
class Survey:
    """One reading of a corpus: its digest, and which document serves which part."""

    entries: tuple[Entry, ...]
    "in the order of the corpus"
    digest: str
    "hexadecimal SHA-256 over name, group and content of every document that is used"
    warnings: tuple[str, ...]
    "sentences for the user"

    @property
    def num_left_out(self) -> int:
        """Documents that are not used, because of the limit."""
        return sum(entry.split is None for entry in self.entries)

    def read(self, corpus: Corpus) -> Iterator[tuple[Split, AnyDocument]]:
        """The documents in use with their split, checked to be those that were surveyed."""
        documents = corpus.documents()
        for entry in self.entries:
            document = next(documents, None)
            if document is None or document.digest() != entry.digest:
                raise UserError(f"{entry.name} changed while it was being read", where="data.paths")
            if entry.split is not None:
                yield entry.split, document


def survey(
    corpus: Corpus,
    *,
    validation_share: float,
    confirmation_share: float,
    limit_bytes: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Survey:
    """Hash every document, choose within `limit_bytes`, and assign splits.

    Raises `UserError` for a corpus without text.
    """
    entries = []
    for document in corpus.documents():
        entries.append(
            Entry(
                name=document.name,
                group=document.group,
                digest=document.digest(),
                num_bytes=document.num_bytes,
                split="train",
            )
        )
        if progress and len(entries) % 256 == 0:
            progress(f"read {len(entries)} documents", 0.0)
    if not entries:
        raise UserError(
            "the corpus holds no text: every file is empty",
            where="data.paths",
            nearest="name files with text, or a longer corpus",
        )
    kept = _within(entries, limit_bytes)
    assigned = _assign(kept, validation_share, confirmation_share)
    hashed = hashlib.sha256()
    for entry in assigned:
        if entry.split is not None:
            for word in (entry.name.encode(), entry.group.encode(), entry.digest):
                hashed.update(b"%d " % len(word))
                hashed.update(word)
    wanted: list[Split] = ["train"]
    wanted += ["validation"] if validation_share else []
    wanted += ["confirmation"] if confirmation_share else []
    used = [entry for entry in assigned if entry.split is not None]
    found = {entry.split for entry in used}
    return Survey(
        entries=tuple(assigned),
        digest=hashed.hexdigest(),
        warnings=tuple(
            f"{len(used)} document(s) are too few for a {split} part: it is empty"
            for split in wanted
            if split not in found
        ),
    )


def _within(entries: Sequence[Entry], limit: int | None) -> list[Entry]:
    """Whole documents up to `limit` bytes, in the order of their hashes: a fair, stable sample."""
    if limit is None or sum(entry.num_bytes for entry in entries) <= limit:
        return list(entries)
    kept: set[int] = set()
    total = 0
    for index in sorted(range(len(entries)), key=lambda i: (entries[i].digest[8:], i)):
        if not kept or total + entries[index].num_bytes <= limit:
            kept.add(index)
            total += entries[index].num_bytes
    return [e if i in kept else replace(e, split=None) for i, e in enumerate(entries)]


def _assign(entries: Sequence[Entry], validation: float, confirmation: float) -> list[Entry]:
    """Split by the first 8 bytes of the hash.

    Of few documents, some are moved so that training, validation and confirmation, in this order
    of precedence, are not empty.
    """
    of: dict[bytes, Split] = {}
    for entry in entries:
        if entry.split is not None:
            u = int.from_bytes(entry.digest[:8], "big") / 2.0**64
            held_out: Split = "validation" if u < validation else "confirmation"
            of[entry.digest] = held_out if u < validation + confirmation else "train"
    shares = {"train": 1.0, "validation": validation, "confirmation": confirmation}
    for rank, split in enumerate(SPLITS):
        counts = Counter(of.values())
        donors = [
            digest
            for digest in sorted(of)
            if counts[of[digest]] > 1 or SPLITS.index(of[digest]) > rank
        ]
        if shares[split] and not counts[split] and donors:
            of[donors[0]] = split
    return [e if e.split is None else replace(e, split=of[e.digest]) for e in entries]
