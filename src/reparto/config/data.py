"""The `[data]` table: which text, which tokens, how much of it a step. A frozen value, no torch.

Split by hash, order by seed: nothing here says where one sample goes, because that is a pure
function of this table, the seed and the position (`partition/tokens.py`). What is declared is what
changes the numbers of a run; only `loader_workers` never does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from reparto.errors import UserError, nearest_word

SourceName = Literal["python-stdlib", "text"]

#: bytes of the standard library taken when `max_bytes` is 0: encoding it with a `bpe` tokenizer
#: takes about 7 s on one core (1.2 MB/s measured), and it is about 3 million tokens at 1,024 words
STDLIB_MAX_BYTES = 8 * 1024 * 1024

#: 256 bytes and the end-of-document token: no byte-level vocabulary is smaller
SMALLEST_VOCABULARY = 257


class DataConfig(BaseModel):
    """Stage 1: the text of a run and how it is cut into samples."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: SourceName = "python-stdlib"
    "where documents come from: the running interpreter's own standard library, or files of `paths`"
    paths: tuple[str, ...] = Field((), strict=False)
    "files, folders and globs of source `text`, relative to the working directory"
    max_bytes: int = Field(0, ge=0)
    "bytes of text taken over all splits, whole documents chosen by hash; 0: 8 MiB of the standard"
    " library, all of anything else"
    tokenizer: str = "bpe"
    "`bytes`, `bpe` (trained on this corpus's training documents), or the path of a tokenizer.json"
    vocab_size: int = Field(1024, ge=SMALLEST_VOCABULARY)
    "token kinds of `bpe`, the end-of-document token included; the other tokenizers have their own"
    bpe_sample_bytes: int = Field(4 * 1024 * 1024, ge=1)
    "bytes of training text that `bpe` is trained on (about 0.5 s a MiB)"
    sequence_length: int = Field(256, ge=1)
    "tokens a sample"
    batch_size: int = Field(32, ge=1)
    "sequences a step, over all ranks"
    validation_share: float = Field(0.05, ge=0, lt=1, strict=False)
    "share of the documents, by hash, that the validation loss is measured on"
    confirmation_share: float = Field(0.05, ge=0, lt=1, strict=False)
    "share of the documents, by hash, put aside unread to confirm a claim once"
    loader_workers: int = Field(1, ge=0)
    "threads a rank that read samples ahead; 0 reads inside the step; results never depend on it"

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, name: str) -> str:
        if name not in ("bytes", "bpe") and not name.endswith(".json"):
            raise UserError(
                f"`{name}` is no tokenizer",
                legal="bytes, bpe, or the path of a tokenizer.json",
                nearest=nearest_word(name, ("bytes", "bpe")) or "bpe",
            )
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> DataConfig:
        if self.source == "python-stdlib" and self.paths:
            raise UserError(
                "`paths` belong to a source that reads files, not to `python-stdlib`",
                where="data.paths",
                nearest='source = "text"',
            )
        if self.source != "python-stdlib" and not self.paths:
            raise UserError(
                f"source `{self.source}` reads files, and none is named",
                where="data.paths",
                legal="files, folders or globs",
                nearest='paths = ["corpus/"]',
            )
        held_out = self.validation_share + self.confirmation_share
        if held_out >= 1:
            raise UserError(
                f"validation_share + confirmation_share = {held_out:g} leaves nothing to train on",
                where="data.validation_share",
                legal="a sum below 1",
                nearest="validation_share = 0.05, confirmation_share = 0.05",
            )
        return self

    @property
    def byte_limit(self) -> int | None:
        """Bytes of text to take at most, with the source's own number filled in; None: all."""
        if self.max_bytes:
            return self.max_bytes
        return STDLIB_MAX_BYTES if self.source == "python-stdlib" else None

    def absolute(self, base: Path | None = None) -> DataConfig:
        """The same with every path absolute (from `base`), so that it can be read from anywhere."""
        root = base or Path.cwd()
        tokenizer = self.tokenizer
        if tokenizer.endswith(".json"):
            tokenizer = os.path.normpath(root / tokenizer)
        paths = tuple(os.path.normpath(root / path) for path in self.paths)
        return self.model_copy(update={"paths": paths, "tokenizer": tokenizer})
