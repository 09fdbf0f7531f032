"""The `[data]` table: which text, which tokens, how much of it a step. A frozen value, no torch.

Split by hash, order by seed: nothing here says where one sample goes, because that is a pure
function of this table, the seed and the position (`partition/tokens.py`). What is declared is what
changes the numbers of a run; only `loader_workers` never does.

A mixture is several corpora, each with the keys of its source and a weight:

    [data]
    source = "mixture"
    [[data.mixture]]
    name = "code"
    source = "python-stdlib"
    [[data.mixture]]
    name = "chat"
    source = "jsonl"
    paths = ["chat.jsonl"]
    record = "chat"
    weight = 2.0
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from reparto.errors import UserError, nearest_word

CorpusName = Literal["python-stdlib", "text", "jsonl", "tokens", "huggingface"]
SourceName = Literal[CorpusName, "mixture"]
RecordKind = Literal["text", "prompt", "chat"]

#: bytes of the standard library taken when `max_bytes` is 0: encoding it with a `bpe` tokenizer
#: takes about 7 s on one core (1.2 MB/s measured), and it is about 3 million tokens at 1,024 words
STDLIB_MAX_BYTES = 8 * 1024 * 1024

#: 256 bytes and the end-of-document token: no byte-level vocabulary is smaller
SMALLEST_VOCABULARY = 257

#: sources made of records (lines of jsonl, rows of a data set) rather than of whole files
_RECORD_SOURCES = ("jsonl", "huggingface")


class _CorpusFields(BaseModel):
    """What every corpus has besides its source."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    paths: tuple[str, ...] = Field((), strict=False)
    "files, folders and globs, relative to the working directory; of `tokens`, the JSON headers; of"
    " `huggingface`, folders that `save_to_disk` wrote, or of parquet, arrow or jsonl files"
    max_bytes: int = Field(0, ge=0)
    "bytes of text taken over all splits, whole documents chosen by hash; 0: 8 MiB of the standard"
    " library, all of anything else"
    record: RecordKind = "text"
    "what a record of `jsonl` or `huggingface` holds: a text, a prompt with its completion, or a "
    "chat; only completions and the assistant's messages are learned"
    text_field: str = "text"
    "field of the text, for record `text`"
    prompt_field: str = "prompt"
    "field of the prompt, for record `prompt`"
    completion_field: str = "completion"
    "field of the completion, for record `prompt`"
    messages_field: str = "messages"
    "field of the list of {role, content}, for record `chat`"
    group_field: str = ""
    "field whose value is the record's group; empty: the name of its file"
    subset: str = "train"
    "which data set of a `huggingface` folder that holds several"


class MixtureMember(_CorpusFields):
    """One corpus of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    "what its groups are prefixed with"
    source: CorpusName
    "as `data.source`"
    weight: float = Field(1.0, gt=0, strict=False, allow_inf_nan=False)
    "passes over this corpus in one epoch of the mixture: 2 reads it twice, 0.5 one half each epoch"


class DataConfig(_CorpusFields):
    """Stage 1: the text of a run and how it is cut into samples."""

    source: SourceName = "python-stdlib"
    "where documents come from: the running interpreter's own standard library, files of `paths`,"
    " or the corpora of `mixture`"
    mixture: tuple[MixtureMember, ...] = Field((), strict=False)
    "the corpora of source `mixture`"
    tokenizer: str = "bpe"
    "`bytes`, `bpe` (trained on this corpus's training documents), the path of a tokenizer.json, or"
    " `none` for source `tokens`, whose header says what is needed"
    vocab_size: int = Field(1024, ge=SMALLEST_VOCABULARY)
    "token kinds of `bpe`, the end-of-document token included; the other tokenizers have their own"
    bpe_sample_bytes: int = Field(4 * 1024 * 1024, ge=1)
    "bytes of training text that `bpe` is trained on (about 0.5 s a MiB)"
    sequence_length: int = Field(128, ge=1)
    "tokens a sample"
    packing: Literal["stream", "documents"] = "stream"
    "`stream`: one endless text cut every `sequence_length` tokens; `documents`: whole documents "
    "side by side in a sample, with attention that does not cross them"
    batch_size: int = Field(16, ge=1)
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
        if name not in ("bytes", "bpe", "none") and not name.endswith(".json"):
            raise UserError(
                f"`{name}` is no tokenizer",
                legal="bytes, bpe, none, or the path of a tokenizer.json",
                nearest=nearest_word(name, ("bytes", "bpe", "none")) or "bpe",
            )
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for where, corpus in self.corpora():
            _check_corpus(where, corpus)
        self._check_mixture()
        self._check_tokenizer()
        held_out = self.validation_share + self.confirmation_share
        if held_out >= 1:
            raise UserError(
                f"validation_share + confirmation_share = {held_out:g} leaves nothing to train on",
                where="data.validation_share",
                legal="a sum below 1",
                nearest="validation_share = 0.05, confirmation_share = 0.05",
            )
        return self

    def _check_mixture(self) -> None:
        names = [member.name for member in self.mixture]
        if (self.source == "mixture") != bool(self.mixture):
            raise UserError(
                "source `mixture` and the tables [[data.mixture]] need each other",
                where="data.mixture",
                nearest='source = "mixture"' if self.mixture else "add [[data.mixture]] tables",
            )
        if len(set(names)) < len(names):
            raise UserError(f"two corpora have one name: {', '.join(names)}", where="data.mixture")
        if self.source == "mixture" and self.paths:
            raise UserError("`paths` belong into the [[data.mixture]] tables", where="data.paths")

    def _check_tokenizer(self) -> None:
        sources = {corpus.source for _, corpus in self.corpora()}
        if self.tokenizer == "none" and sources != {"tokens"}:
            raise UserError(
                "text needs a tokenizer; `none` is for source `tokens`",
                where="data.tokenizer",
                legal="bytes, bpe, or the path of a tokenizer.json",
                nearest="bpe",
            )
        if self.tokenizer == "bpe" and "tokens" in sources:
            raise UserError(
                "source `tokens` was encoded already, so no tokenizer can be trained for it",
                where="data.tokenizer",
                legal="the tokenizer.json that made the tokens, bytes, or none",
                nearest="none" if sources == {"tokens"} else "tokenizer.json",
            )

    def corpora(self) -> Iterator[tuple[str, DataConfig | MixtureMember]]:
        """(the table's place in the file, the corpus) of the one corpus or of each of a mixture."""
        if self.source != "mixture":
            yield "data", self
        for member in self.mixture:
            yield f"data.mixture.{member.name}", member

    def absolute(self, base: Path | None = None) -> DataConfig:
        """The same with every path absolute (from `base`), so that it can be read from anywhere."""
        root = base or Path.cwd()

        def fixed(paths: tuple[str, ...]) -> dict[str, object]:
            return {"paths": tuple(os.path.normpath(root / path) for path in paths)}

        named = self.tokenizer
        changes = fixed(self.paths)
        changes["mixture"] = tuple(m.model_copy(update=fixed(m.paths)) for m in self.mixture)
        changes["tokenizer"] = os.path.normpath(root / named) if named.endswith(".json") else named
        return self.model_copy(update=changes)


def byte_limit(corpus: DataConfig | MixtureMember) -> int | None:
    """Bytes of text to take at most, with the source's own number filled in; None: all."""
    if corpus.max_bytes:
        return corpus.max_bytes
    return STDLIB_MAX_BYTES if corpus.source == "python-stdlib" else None


def _check_corpus(where: str, corpus: DataConfig | MixtureMember) -> None:
    if corpus.source == "python-stdlib" and corpus.paths:
        raise UserError(
            "`paths` belong to a source that reads files, not to `python-stdlib`",
            where=f"{where}.paths",
            nearest='source = "text"',
        )
    if corpus.source != "python-stdlib" and not corpus.paths:
        raise UserError(
            f"source `{corpus.source}` reads files, and none is named",
            where=f"{where}.paths",
            legal="files, folders or globs",
            nearest='paths = ["corpus/"]',
        )
    if corpus.source not in _RECORD_SOURCES and (corpus.record != "text" or corpus.group_field):
        raise UserError(
            f"source `{corpus.source}` has no records, so `record` and `group_field` mean nothing",
            where=f"{where}.record",
            legal=f"with source {' or '.join(_RECORD_SOURCES)}",
            nearest='source = "jsonl"',
        )
