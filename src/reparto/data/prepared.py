"""Data that is ready to be read: what the launcher leaves in the cache and every rank opens.

`prepared.json` names a tokenizer and the token folders of one or several corpora by the digests of
what made them, so it holds no path, and changing the sequence length, a weight or the packing
writes a kilobyte (packing: 24 bytes a document) and encodes nothing again. A rank opens it in 2 ms
and maps what it reads. Rejected: handing ranks the config and letting each prepare for itself,
which races, and lets ranks of one run read different data when a file changes between them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reparto.config.data import DataConfig
from reparto.data.cache import create_json, publish
from reparto.data.dataset import (
    Concatenated,
    EvaluationDataset,
    MapDataset,
    Ordered,
    PackedDataset,
    TokenDataset,
    TokenSample,
    packing_of,
)
from reparto.data.split import Split
from reparto.data.store import (
    Header,
    Ids,
    SplitHeader,
    Stream,
    TokenSplit,
    entropy_nats,
    map_array,
    open_frequencies,
    open_split,
    read_header,
)
from reparto.data.tokenize import Tokenizer, open_tokenizer
from reparto.errors import UserError
from reparto.partition.tokens import Order, ShuffledOrder

FORMAT = "reparto-prepared/1"
_KEY = "^[0-9a-f]{32}$"
ReadSplit = Literal["train", "validation"]
_READ: tuple[ReadSplit, ...] = ("train", "validation")


class MemberDescription(BaseModel):
    """One corpus in `prepared.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    "its name in a mixture; empty for the only one"
    weight: float = Field(gt=0, strict=False)
    "passes an epoch"
    tokens: str = Field(pattern=_KEY)
    "name of its folder under `tokens`"


class Description(BaseModel):
    """`prepared.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: str
    "`FORMAT`"
    tokenizer: str = Field(pattern=_KEY)
    "name of its folder under `tokenizers`"
    members: tuple[MemberDescription, ...] = Field(min_length=1)
    "the corpora"
    sequence_length: int = Field(ge=1)
    "tokens a sample"
    pieces: tuple[dict[ReadSplit, int], ...]
    "packed pieces of each corpus by split; empty for packing `stream`"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One corpus of prepared data."""

    name: str
    "its name in a mixture; empty for the only one"
    weight: float
    "passes an epoch"
    folder: Path
    "where its token files are"
    header: Header
    "its counts and digests"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Data that is ready to be read. Made by `prepare`, and from its folder by `open_prepared`."""

    folder: Path
    "what `open_prepared` takes"
    sequence_length: int
    "tokens a sample"
    members: tuple[Member, ...]
    "one corpus, or those of a mixture"
    pieces: tuple[dict[ReadSplit, int], ...]
    "packed pieces of each corpus by split; empty for packing `stream`"
    tokenizer_file: Path
    "what `open_tokenizer` takes"
    warnings: tuple[str, ...] = ()
    "sentences for the user, from `prepare` only"

    @property
    def header(self) -> Header:
        """Of the first corpus; tokenizer, vocabulary and end-of-document id are those of all."""
        return self.members[0].header

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id: the rows a model's embedding must have."""
        return self.header.vocab_size

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups (CORPUS/GROUP if mixed), by the index evaluation samples carry."""
        return tuple(
            f"{member.name}/{group}" if member.name else group
            for member in self.members
            for group in member.header.groups
        )

    @property
    def corpus_digest(self) -> str:
        """SHA-256 over name, group and content of all documents in use."""
        digests = [member.header.corpus_digest for member in self.members]
        return digests[0] if len(digests) == 1 else _digest(digests)

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer."""
        return self.header.tokenizer_digest

    @property
    def tokens_digest(self) -> str:
        """SHA-256 of the headers and weights; a header holds the digests of all token files."""
        return _digest(
            [
                [member.header.model_dump(mode="json"), member.weight, member.name]
                for member in self.members
            ]
        )

    @property
    def unigram_entropy_nats(self) -> float:
        """Of the training labels, a token: a model that has learned anything is below it."""
        return self._entropy("train", [member.weight for member in self.members])

    @property
    def validation_unigram_entropy_nats(self) -> float:
        """The same of the validation labels: no model that ignores context gets below it there."""
        return self._entropy("validation", [1.0] * len(self.members))

    def _entropy(self, split: Split, weights: Sequence[float]) -> float:
        counts = np.zeros(self.vocab_size)
        for member, weight in zip(self.members, weights, strict=True):
            counts += weight * open_frequencies(member.folder, member.header, split)
        return entropy_nats(counts)

    @property
    def num_train_samples(self) -> int:
        """Samples an epoch, over all ranks; of a mixture, by weight."""
        return self.order(seed=0).epoch_length

    def order(self, seed: int) -> Order:
        """The order of the training samples; a loader of `train_dataset` takes it by itself."""
        dataset = self.train_dataset()
        if isinstance(dataset, Ordered):
            return dataset.order(seed)
        return ShuffledOrder(seed=seed, num_samples=len(dataset))

    def counts(self, split: Split) -> SplitHeader:
        """Tokens, documents and bytes of a split, over all corpora."""
        found = [member.header.splits[split] for member in self.members]
        return SplitHeader(
            num_tokens=sum(one.num_tokens for one in found),
            num_documents=sum(one.num_documents for one in found),
            num_bytes=sum(one.num_bytes for one in found),
            num_labels=sum(one.num_labels for one in found),
            digests=found[0].digests if len(found) == 1 else {},
        )

    def train_dataset(self) -> MapDataset[TokenSample]:
        """The training samples; of a mixture each once, its order reads them by weight."""
        return self.dataset("train")

    def validation_dataset(self) -> MapDataset[TokenSample]:
        """The validation samples; `group` of each is an index into `groups`."""
        return self.dataset("validation")

    def dataset(self, split: ReadSplit) -> MapDataset[TokenSample]:
        """The samples of a split."""
        datasets = [self._member(number, split) for number in range(len(self.members))]
        if len(datasets) == 1:
            return datasets[0]
        return Concatenated(
            datasets,
            num_groups=[len(member.header.groups) for member in self.members],
            passes=[member.weight for member in self.members],
        )

    def _member(self, number: int, split: ReadSplit) -> MapDataset[TokenSample]:
        member = self.members[number]
        tokens = open_split(member.folder, member.header, split)
        pad_id = member.header.eod_id
        if self.pieces:
            path = self.folder / f"{number}.{split}.packing"
            rows = map_array(path, "int64", 3 * self.pieces[number][split])
            packing = rows.astype(np.int64).reshape(-1, 3)
            _refuse_broken(packing, tokens, self.sequence_length, path)
            return PackedDataset(tokens, packing, self.sequence_length, pad_id=pad_id)
        if split == "train":
            return TokenDataset(tokens, self.sequence_length)
        return EvaluationDataset(tokens, self.sequence_length, pad_id=pad_id)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. Raises `UserError` if its file was changed."""
        tokenizer = open_tokenizer(self.tokenizer_file)
        if tokenizer.digest != self.tokenizer_digest:
            raise UserError(
                "is not the tokenizer that made the tokens", where=str(self.tokenizer_file)
            )
        return tokenizer


def write_prepared(
    cache_dir: Path,
    *,
    tokenizer: str,
    members: Sequence[MemberDescription],
    config: DataConfig,
) -> Prepared:
    """The folder that says which tokens a run reads, made if it is not there or not whole.

    `tokenizer` and the members' `tokens` name folders of the cache. Raises `UserError`.
    """
    facts = [tokenizer, [one.model_dump(mode="json") for one in members]]
    key = _digest([FORMAT, *facts, config.sequence_length, config.packing])[:32]
    folder = cache_dir / "prepared" / key
    if folder.is_dir():
        try:
            return open_prepared(folder)
        except UserError:
            shutil.rmtree(folder)
    pieces: list[dict[ReadSplit, int]] = []

    def write(building: Path) -> None:
        if config.packing == "documents":
            pieces[:] = [
                _pack(building, number, cache_dir / "tokens" / member.tokens, config)
                for number, member in enumerate(members)
            ]
        description = Description(
            format=FORMAT,
            tokenizer=tokenizer,
            members=tuple(members),
            sequence_length=config.sequence_length,
            pieces=tuple(pieces),
        )
        create_json(building / "prepared.json", description.model_dump(mode="json"))

    publish(folder, write)
    return open_prepared(folder)


def _pack(building: Path, number: int, tokens: Path, config: DataConfig) -> dict[ReadSplit, int]:
    """Write where the documents of one corpus go; how many pieces each split has."""
    header = read_header(tokens)
    found: dict[ReadSplit, int] = {}
    for split in _READ:
        rows = packing_of(
            open_split(tokens, header, split),
            config.sequence_length,
            by_group=split == "validation",
        )
        stream = Stream(building / f"{number}.{split}.packing")
        stream.write(rows.astype("<i8"))
        stream.close()
        found[split] = len(rows)
    return found


def open_prepared(folder: Path) -> Prepared:
    """What `prepare` left in `folder`; headers and file sizes are checked, digests are not."""
    path = folder / "prepared.json"
    cache_dir = folder.parent.parent
    refuse_public(cache_dir)
    try:
        found = Description.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where=str(folder)) from error
    except ValidationError as error:
        raise UserError(f"{path} does not describe prepared data", where=str(folder)) from error
    if found.format != FORMAT:
        raise UserError(f"{path} has format `{found.format}`", where=str(folder), legal=FORMAT)
    members = []
    for one in found.members:
        tokens = cache_dir / "tokens" / one.tokens
        header = read_header(tokens)
        members.append(Member(name=one.name, weight=one.weight, folder=tokens, header=header))
    prepared = Prepared(
        folder=folder,
        sequence_length=found.sequence_length,
        members=tuple(members),
        pieces=found.pieces,
        tokenizer_file=cache_dir / "tokenizers" / found.tokenizer / "tokenizer.json",
    )
    for split in _READ:
        prepared.dataset(split)  # what does not fit is refused here, not in the middle of a run
    return prepared


def refuse_public(cache_dir: Path) -> None:
    """A folder in which anyone may write is no place for data that is believed later."""
    if cache_dir.is_dir() and cache_dir.stat().st_mode & stat.S_IWOTH:
        raise UserError(
            f"{cache_dir} may be written by everyone",
            where="cache folder",
            legal="a folder of your own",
            nearest=f"chmod go-w {cache_dir}",
        )


def _refuse_broken(packing: Ids, tokens: TokenSplit, size: int, path: Path) -> None:
    samples, starts, stops = packing.T
    lengths = stops - starts
    fits = (
        bool((lengths > 0).all())
        and bool((starts >= 0).all())
        and bool((stops < len(tokens.ids)).all())
        and bool((np.diff(samples, prepend=-1) >= 0).all())
        and bool((np.diff(samples, prepend=-1) <= 1).all())
        and bool((np.bincount(samples, weights=lengths) <= size).all())
    )
    if not fits:
        raise UserError(f"{path.name} does not fit its tokens", where=str(path.parent))


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
