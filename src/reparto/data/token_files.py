"""Tokens that somebody else made: a file of ids beside a JSON header that says what they are.

    corpus.json   {"file": "corpus.bin", "dtype": "uint16", "tokens": 1000000,
                   "vocab_size": 50257, "eod_id": 50256}
    corpus.bin    the ids, little-endian, each document followed by eod_id

The header is what the config names, and everything in it is checked against the file: its size, and
every id against vocab_size. Documents are then split by hash like any text, so the ids are copied
once into the cache; mapping them in place would save that copy and lose the held-out parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reparto.data.corpus import TokenDocument
from reparto.data.files import TextFile, regular_size
from reparto.errors import UserError

#: fewer documents than this are cut into pieces, as few files are, so that there is a split
_FEW_DOCUMENTS = 64
_PIECE_TOKENS = (1 << 10, 1 << 14)
_SCAN_TOKENS = 1 << 20


class TokenHeader(BaseModel):
    """The JSON header of a token file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str = Field(pattern=r"^[^/\\]+$")
    "name of the file of ids, in the header's own folder"
    dtype: Literal["uint16", "uint32"]
    "of an id, little-endian"
    tokens: int = Field(ge=1)
    "ids in the file"
    vocab_size: int = Field(ge=1, le=1 << 32)
    "one more than the largest id allowed"
    eod_id: int = Field(ge=0)
    "the id that ends a document"


@dataclass(frozen=True)
class TokenFiles:
    """A corpus of token files; the group of a document is its file."""

    headers: tuple[tuple[TextFile, TokenHeader], ...]
    "in a fixed order, all with one end-of-document id"

    @property
    def vocab_size(self) -> int:
        """The largest of the headers."""
        return max(header.vocab_size for _, header in self.headers)

    @property
    def eod_id(self) -> int:
        """The one of all headers."""
        return self.headers[0][1].eod_id

    def documents(self) -> Iterator[TokenDocument]:
        """What stands between end-of-document ids, or pieces of it where there are few."""
        for file, header in self.headers:
            ids = _map(file, header)
            ends = [*_ends(ids, header), len(ids)]
            limit = len(ids)
            if len(ends) < _FEW_DOCUMENTS:
                smallest, largest = _PIECE_TOKENS
                limit = max(smallest, min(largest, len(ids) // _FEW_DOCUMENTS))
            start = 0
            for number, end in enumerate(ends):
                for piece in range(start, end, limit):
                    yield TokenDocument(
                        name=f"{file.name}:{number}@{piece}",
                        group=Path(file.name).stem,
                        ids=ids[piece : min(piece + limit, end)].astype(np.int64),
                    )
                start = end + 1


def open_token_files(files: tuple[TextFile, ...]) -> TokenFiles:
    """Read and check the headers. Raises `UserError` naming the header and the key."""
    corpus = TokenFiles(tuple((file, _header(file.path)) for file in files))
    for file, header in corpus.headers:
        if header.eod_id >= header.vocab_size:
            raise UserError(
                f"eod_id {header.eod_id} is not below vocab_size {header.vocab_size}",
                where=str(file.path),
            )
        if header.eod_id != corpus.eod_id:
            raise UserError(
                f"eod_id {header.eod_id} differs from {corpus.eod_id} of {files[0].path}",
                where=str(file.path),
                legal="one end-of-document id for all files of a corpus",
            )
    return corpus


def _header(path: Path) -> TokenHeader:
    try:
        return TokenHeader.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where="data.paths") from error
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "it"
        raise UserError(
            f"is no header of a token file: {key}: {fault['msg']}",
            where=str(path),
            legal='{"file": NAME, "dtype": "uint16" or "uint32", "tokens": N, "vocab_size": N, '
            '"eod_id": N}',
        ) from error


def _map(file: TextFile, header: TokenHeader) -> npt.NDArray[np.generic]:
    path = file.path.parent / header.file
    dtype = np.dtype(header.dtype).newbyteorder("<")
    found, wanted = regular_size(path), header.tokens * dtype.itemsize
    if found != wanted:
        raise UserError(
            f"{path} has {found} bytes; {header.tokens} tokens of {header.dtype} are {wanted}",
            where=str(file.path),
            nearest=f'"tokens": {found // dtype.itemsize}' if found else "",
        )
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _ends(ids: npt.NDArray[np.generic], header: TokenHeader) -> Iterator[int]:
    """Offsets of the end-of-document ids; checks every id on the way."""
    for start in range(0, len(ids), _SCAN_TOKENS):
        block = ids[start : start + _SCAN_TOKENS].astype(np.int64)
        too_large = np.flatnonzero(block >= header.vocab_size)
        if len(too_large):
            at = int(too_large[0])
            raise UserError(
                f"id {block[at]} at token {start + at} of {header.file} is not below "
                f"vocab_size {header.vocab_size}: wrong dtype, or wrong vocab_size",
                where="data.paths",
            )
        yield from (start + np.flatnonzero(block == header.eod_id)).tolist()
