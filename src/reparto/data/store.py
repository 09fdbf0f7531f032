"""Token files: written once as a stream, then mapped into memory by every rank.

One folder holds one corpus encoded by one tokenizer:

| file | content |
|---|---|
| `tokens.json` | the header: dtype, groups, and of each split counts, entropy and digests |
| `SPLIT.tokens` | ids, each document with its end-of-document token, all documents in a row |
| `SPLIT.documents` | int64 pairs, one a document: end offset in tokens, index of its group |
| `SPLIT.frequencies` | int64 a token of the vocabulary: how often it is a label |
| `SPLIT.counted` | uint8 a token, 1 where it is a label; only where some token is none |

All little-endian; ids are uint16 for vocabularies up to 65,536 and uint32 above.
Mapped, 1e9 tokens cost 2 GB of page cache shared by all ranks of a host, and no start-up time.
Rejected: numpy's own file format (its reader can execute pickles), and one JSON with the offsets
(15 MB a million documents, parsed by each rank).

Validation and confirmation are written group after group, so that a group is one range of tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reparto.data.cache import create, create_json
from reparto.data.split import SPLITS, Split
from reparto.errors import UserError

FORMAT = "reparto-tokens/1"
HEADER = "tokens.json"

Ids = npt.NDArray[np.int64]
FileKind = Literal["tokens", "documents", "counted", "frequencies"]
Flags = npt.NDArray[np.bool_]

#: label tokens whose frequencies are counted at once
_COUNT_AT_ONCE = 1 << 20


def dtype_for(vocab_size: int) -> str:
    """The narrower of the two dtypes that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def little_endian(dtype: str) -> np.dtype[np.generic]:
    """The numpy dtype of a token file."""
    return np.dtype(dtype).newbyteorder("<")


class SplitHeader(BaseModel):
    """What the header says of one split."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_tokens: int = Field(ge=0)
    "end-of-document tokens included"
    num_documents: int = Field(ge=0)
    "documents"
    num_bytes: int = Field(ge=0)
    "UTF-8 bytes of text"
    num_labels: int = Field(ge=0)
    "tokens that are counted as labels"
    digests: dict[FileKind, str]
    "hexadecimal SHA-256 of each file"


class Header(BaseModel):
    """`tokens.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: str
    "`FORMAT`"
    corpus_digest: str
    "of the documents in use"
    tokenizer_digest: str
    "of the tokenizer"
    vocab_size: int = Field(ge=1)
    "one more than the largest id"
    eod_id: int = Field(ge=0)
    "the id that ends a document"
    dtype: str = Field(pattern="^uint(16|32)$")
    "of the token files"
    groups: tuple[str, ...] = Field(strict=False)
    "names of the groups, in the order of their indices"
    splits: dict[Split, SplitHeader]
    "one entry a split"

    @model_validator(mode="after")
    def _has_all_splits(self) -> Header:
        missing = [split for split in SPLITS if split not in self.splits]
        if missing:
            raise ValueError(f"no split {', '.join(missing)}")
        return self


class SplitWriter:
    """Writes one split, document by document."""

    def __init__(self, folder: Path, split: Split, *, vocab_size: int, by_group: bool) -> None:
        self._folder, self._split = folder, split
        self._dtype = little_endian(dtype_for(vocab_size))
        self._frequencies = np.zeros(vocab_size, dtype=np.int64)
        self._held: list[tuple[int, int, Ids, Flags]] | None = [] if by_group else None
        self._labels: list[Ids] = []
        self._tokens = Stream(folder / f"{split}.tokens")
        self._counted: Stream | None = None
        self._documents: list[tuple[int, int]] = []
        self._num_tokens = self._num_bytes = 0

    def add(self, *, group: int, num_bytes: int, ids: Ids, counted: Flags) -> None:
        """One document with its end-of-document token; kept back if groups must lie together."""
        if self._held is None:
            self._write(group, num_bytes, ids, counted)
        else:
            self._held.append((group, num_bytes, ids, counted))

    def _write(self, group: int, num_bytes: int, ids: Ids, counted: Flags) -> None:
        if self._counted is None and not counted.all():
            self._counted = Stream(self._folder / f"{self._split}.counted")
            self._counted.write(np.ones(self._num_tokens, dtype=np.uint8))
        if self._counted is not None:
            self._counted.write(counted.astype(np.uint8))
        self._tokens.write(ids.astype(self._dtype))
        if (self._num_tokens + len(ids)) // _COUNT_AT_ONCE > self._num_tokens // _COUNT_AT_ONCE:
            self._count_labels()
        self._labels.append(ids[counted])
        self._num_tokens += len(ids)
        self._num_bytes += num_bytes
        self._documents.append((self._num_tokens, group))

    def _count_labels(self) -> None:
        if self._labels:
            labels = np.concatenate(self._labels)
            self._frequencies += np.bincount(labels, minlength=len(self._frequencies))
            self._labels.clear()

    def finish(self) -> SplitHeader:
        """Write what was kept back, close the files, and say what is in them."""
        for document in sorted(self._held or (), key=lambda held: held[0]):
            self._write(*document)
        self._count_labels()
        documents = Stream(self._folder / f"{self._split}.documents")
        documents.write(np.array(self._documents, dtype="<i8").reshape(-1, 2))
        frequencies = Stream(self._folder / f"{self._split}.frequencies")
        frequencies.write(self._frequencies.astype("<i8"))
        streams: dict[FileKind, Stream] = {
            "tokens": self._tokens,
            "documents": documents,
            "frequencies": frequencies,
        }
        if self._counted is not None:
            streams["counted"] = self._counted
        return SplitHeader(
            num_tokens=self._num_tokens,
            num_documents=len(self._documents),
            num_bytes=self._num_bytes,
            num_labels=int(self._frequencies.sum()),
            digests={kind: stream.close() for kind, stream in streams.items()},
        )


class Stream:
    """A new file of numbers that knows its own digest."""

    def __init__(self, path: Path) -> None:
        self._file = create(path)
        self._hashed = hashlib.sha256()

    def write(self, values: npt.NDArray[np.generic]) -> None:
        """Append the numbers."""
        content = values.tobytes()
        self._hashed.update(content)
        self._file.write(content)

    def close(self) -> str:
        """The hexadecimal SHA-256 of all that was written."""
        self._file.close()
        return self._hashed.hexdigest()


def entropy_nats(frequencies: npt.NDArray[np.float64]) -> float:
    """-sum p ln p of these counts (weighted, so fractional); 0 when there are none."""
    total = float(frequencies.sum())
    if not total:
        return 0.0
    p = frequencies[frequencies > 0] / total
    return float(-(p * np.log(p)).sum()) + 0.0


def write_header(folder: Path, header: Header) -> None:
    """Last of all files of a folder."""
    create_json(folder / HEADER, header.model_dump(mode="json"))


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """One split, mapped."""

    ids: npt.NDArray[np.generic]
    "uint16 or uint32, all documents in a row"
    ends: Ids
    "end offset of each document, its end-of-document token included"
    groups: Ids
    "index of each document's group"
    counted: npt.NDArray[np.uint8] | None
    "1 where a token is a label; None: everywhere"


def read_header(folder: Path) -> Header:
    """The header of a token folder. Raises `UserError` for what is no header."""
    path = folder / HEADER
    try:
        header = Header.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where=str(folder)) from error
    except ValidationError as error:
        raise UserError(f"{path} is no token header: {_first(error)}", where=str(folder)) from error
    if header.format != FORMAT:
        raise UserError(f"{path} has format `{header.format}`", where=str(folder), legal=FORMAT)
    return header


def _first(error: ValidationError) -> str:
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'JSON'}: {fault['msg']}"


def open_split(folder: Path, header: Header, split: Split) -> TokenSplit:
    """Map one split. Raises `UserError` when a file's size or an offset is not the header's."""
    told = header.splits[split]
    ids = map_array(folder / f"{split}.tokens", header.dtype, told.num_tokens)
    pairs = map_array(folder / f"{split}.documents", "int64", 2 * told.num_documents)
    documents = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    counted = None
    if "counted" in told.digests:
        counted = map_array(folder / f"{split}.counted", "uint8", told.num_tokens).view(np.uint8)
    ends, groups = documents[:, 0], documents[:, 1]
    edges = np.concatenate([[0], ends])
    if (np.diff(edges) <= 0).any() or edges[-1] != told.num_tokens:
        raise UserError(f"{split}.documents does not fit {split}.tokens", where=str(folder))
    if len(groups) and not 0 <= groups.min() <= groups.max() < len(header.groups):
        raise UserError(f"{split}.documents names a group that the header lacks", where=str(folder))
    return TokenSplit(ids=ids, ends=ends, groups=groups, counted=counted)


def open_frequencies(folder: Path, header: Header, split: Split) -> npt.NDArray[np.float64]:
    """How often each token is a label of a split, (vocabulary,)."""
    path = folder / f"{split}.frequencies"
    return map_array(path, "int64", header.vocab_size).astype(np.float64)


def map_array(path: Path, dtype: str, count: int) -> npt.NDArray[np.generic]:
    """A file of exactly `count` numbers, mapped. Raises `UserError` for another size."""
    size = count * little_endian(dtype).itemsize
    try:
        found = path.stat().st_size
        if found != size:
            raise UserError(
                f"{path.name} has {found} bytes, its header says {size} ({count} x {dtype})",
                where=str(path.parent),
            )
        if not count:
            return np.empty(0, dtype=little_endian(dtype))
        return np.asarray(np.memmap(path, dtype=little_endian(dtype), mode="r"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where=str(path.parent)) from error


def damaged_files(folder: Path) -> list[str]:
    """Names of training and validation files whose content is not what was written (1.7 GB/s)."""
    try:
        header = read_header(folder)
    except UserError:
        return [HEADER]
    damaged = []
    for split in ("train", "validation"):
        for kind, digest in header.splits[split].digests.items():
            path = folder / f"{split}.{kind}"
            try:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError:
                found = "missing"
            if found != digest:
                damaged.append(path.name)
    return damaged
