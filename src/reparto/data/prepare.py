"""From a `[data]` table to token files on disk, once; every rank then only maps them.

The launcher calls `prepare`, workers call `open_prepared` with the folder it names. Three kinds of
folder live in the cache, each named by the digest of everything that decides its content, so a
changed setting makes exactly what depends on it again and nothing is ever overwritten:

| folder | depends on |
|---|---|
| `tokenizers/KEY` | training documents, vocabulary size |
| `tokens/KEY` | documents, their split, the tokenizer |
| `prepared/KEY` | the two above, and the sequence length |

First run, 8 MiB of the standard library, `bpe`: about 9 s on one core (training the tokenizer 2 s,
encoding 6.5 s); later runs 0.1 s, which is reading the corpus again to see that it is the same.
Rejected: trusting names and times of files, which saves that 0.1 s and misses restored back-ups.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reparto.config.data import DataConfig
from reparto.data.cache import create_json, create_text, publish
from reparto.data.corpus import Corpus, open_corpus
from reparto.data.dataset import EvaluationDataset, TokenDataset
from reparto.data.encode import encode, sample_texts
from reparto.data.split import Split, Survey, survey
from reparto.data.store import (
    FORMAT,
    Header,
    SplitHeader,
    damaged_files,
    open_split,
    read_header,
)
from reparto.data.tokenize import ByteTokenizer, Tokenizer, open_tokenizer, train_bpe
from reparto.errors import UserError

#: told what is being done and which share of it is done
Progress = Callable[[str, float], None]

_PREPARED_FORMAT = "reparto-prepared/1"
_KEY = "^[0-9a-f]{32}$"


class _Description(BaseModel):
    """`prepared.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: str
    tokenizer: str = Field(pattern=_KEY)
    tokens: str = Field(pattern=_KEY)
    sequence_length: int = Field(ge=1)
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Data that is ready to be read. Made by `prepare`, and from its folder by `open_prepared`."""

    folder: Path
    "what `open_prepared` takes"
    sequence_length: int
    "tokens a sample"
    warnings: tuple[str, ...]
    "sentences for the user"
    header: Header
    "digests and counts"
    tokens_folder: Path
    "where the token files are"
    tokenizer_file: Path
    "what `open_tokenizer` takes"

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id: the rows a model's embedding must have."""
        return self.header.vocab_size

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, by the index that evaluation samples carry."""
        return self.header.groups

    @property
    def corpus_digest(self) -> str:
        """SHA-256 over name, group and content of all documents in use."""
        return self.header.corpus_digest

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer."""
        return self.header.tokenizer_digest

    @property
    def tokens_digest(self) -> str:
        """SHA-256 of the header, which holds those of all token files."""
        return _digest(self.header.model_dump(mode="json"))

    @property
    def unigram_entropy_nats(self) -> float:
        """Of the training labels, a token: a model that has learned anything is below it."""
        return self.header.splits["train"].unigram_entropy_nats

    @property
    def validation_unigram_entropy_nats(self) -> float:
        """The same of the validation labels: no model that ignores context gets below it there."""
        return self.header.splits["validation"].unigram_entropy_nats

    @property
    def num_train_samples(self) -> int:
        """Samples an epoch, over all ranks."""
        return len(self.train_dataset())

    def counts(self, split: Split) -> SplitHeader:
        """Tokens, documents and bytes of a split."""
        return self.header.splits[split]

    def train_dataset(self) -> TokenDataset:
        """The training samples."""
        split = open_split(self.tokens_folder, self.header, "train")
        return TokenDataset(split, self.sequence_length)

    def validation_dataset(self) -> EvaluationDataset:
        """The validation samples; `group` of each is an index into `groups`."""
        split = open_split(self.tokens_folder, self.header, "validation")
        return EvaluationDataset(split, self.sequence_length, pad_id=self.header.eod_id)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. Raises `UserError` if its file was changed."""
        tokenizer = open_tokenizer(self.tokenizer_file)
        if tokenizer.digest != self.tokenizer_digest:
            raise UserError(
                "is not the tokenizer that made the tokens", where=str(self.tokenizer_file)
            )
        return tokenizer


def prepare(config: DataConfig, cache_dir: Path, progress: Progress | None = None) -> Prepared:
    """Read, split, tokenize and store the corpus, or find it done. For one process of a run.

    Raises `UserError` for a corpus that is empty, unreadable, not UTF-8 or shorter than a sequence.
    """
    told: Progress = progress or (lambda what, share: None)
    _refuse_public(cache_dir)
    corpus = open_corpus(config)
    surveyed = survey(corpus, config, told)
    tokenizer_folder = _tokenizer(config, cache_dir, corpus, surveyed, told)
    tokenizer = open_tokenizer(tokenizer_folder / "tokenizer.json")
    tokens_folder, mended = _tokens(config, cache_dir, corpus, surveyed, tokenizer, told)
    header = read_header(tokens_folder)
    _refuse_short(header, config)
    description = _Description(
        format=_PREPARED_FORMAT,
        tokenizer=tokenizer_folder.name,
        tokens=tokens_folder.name,
        sequence_length=config.sequence_length,
        warnings=(*surveyed.warnings, *mended, *_warnings(header, tokenizer, config)),
    )
    content = description.model_dump(mode="json")
    folder = cache_dir / "prepared" / _digest(content)[:32]
    if not folder.is_dir():
        publish(folder, lambda building: create_json(building / "prepared.json", content))
    return open_prepared(folder)


def open_prepared(folder: Path) -> Prepared:
    """What `prepare` left in `folder`; headers and file sizes are checked, digests are not."""
    path = folder / "prepared.json"
    cache_dir = folder.parent.parent
    _refuse_public(cache_dir)
    try:
        found = _Description.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where=str(folder)) from error
    except ValidationError as error:
        raise UserError(f"{path} does not describe prepared data", where=str(folder)) from error
    if found.format != _PREPARED_FORMAT:
        raise UserError(
            f"{path} has format `{found.format}`", where=str(folder), legal=_PREPARED_FORMAT
        )
    tokens_folder = cache_dir / "tokens" / found.tokens
    prepared = Prepared(
        folder=folder,
        sequence_length=found.sequence_length,
        warnings=found.warnings,
        header=read_header(tokens_folder),
        tokens_folder=tokens_folder,
        tokenizer_file=cache_dir / "tokenizers" / found.tokenizer / "tokenizer.json",
    )
    prepared.train_dataset(), prepared.validation_dataset()
    return prepared


def _tokenizer(
    config: DataConfig, cache_dir: Path, corpus: Corpus, surveyed: Survey, told: Progress
) -> Path:
    """The folder of the tokenizer, trained or copied if it is not there yet."""

    def folder_for(facts: dict[str, object]) -> Path:
        return cache_dir / "tokenizers" / _digest(facts)[:32]

    if config.tokenizer != "bpe":
        named = config.tokenizer
        ready = ByteTokenizer() if named == "bytes" else open_tokenizer(Path(named))
        folder = folder_for({"digest": ready.digest})
        make = ready.to_json
    else:
        folder = folder_for(
            {
                "kind": "bpe",
                "library": tokenizers.__version__,
                "corpus": surveyed.digest,
                "shares": [config.validation_share, config.confirmation_share],
                "vocab_size": config.vocab_size,
                "sample_bytes": config.bpe_sample_bytes,
            }
        )

        def make() -> str:
            told("training the tokenizer", 0.0)
            texts = sample_texts(corpus, surveyed, config.bpe_sample_bytes)
            return train_bpe(texts, config.vocab_size).to_json()

    if folder.is_dir() and _is_whole(folder):
        return folder

    def write(building: Path) -> None:
        content = make()
        create_text(building / "tokenizer.json", content)
        create_text(building / "sha256", hashlib.sha256(content.encode()).hexdigest())

    shutil.rmtree(folder, ignore_errors=True)
    publish(folder, write)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        content = (folder / "tokenizer.json").read_bytes()
        return hashlib.sha256(content).hexdigest() == (folder / "sha256").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _tokens(
    config: DataConfig,
    cache_dir: Path,
    corpus: Corpus,
    surveyed: Survey,
    tokenizer: Tokenizer,
    told: Progress,
) -> tuple[Path, list[str]]:
    """The folder of the token files, and a sentence if it had to be mended."""
    key = _digest(
        {
            "format": FORMAT,
            "corpus": surveyed.digest,
            "shares": [config.validation_share, config.confirmation_share],
            "tokenizer": tokenizer.digest,
        }
    )
    folder = cache_dir / "tokens" / key[:32]
    mended = []
    if folder.is_dir():
        damaged = damaged_files(folder)
        if not damaged:
            return folder, []
        mended = [f"cached {', '.join(damaged)} had been changed and was made again"]
        shutil.rmtree(folder)
    publish(folder, lambda building: encode(building, corpus, surveyed, tokenizer, told))
    return folder, mended


def _refuse_short(header: Header, config: DataConfig) -> None:
    found = header.splits["train"].num_tokens
    if found < config.sequence_length + 1:
        raise UserError(
            f"the training part of the corpus has {found} tokens, and one sample of "
            f"sequence_length {config.sequence_length} takes {config.sequence_length + 1}",
            where="data.sequence_length",
            legal=f"1 to {found - 1}" if found > 1 else "",
            nearest=f"sequence_length = {found - 1}" if found > 1 else "a longer corpus",
        )


def _warnings(header: Header, tokenizer: Tokenizer, config: DataConfig) -> Iterator[str]:
    if config.tokenizer == "bpe" and tokenizer.vocab_size < config.vocab_size:
        yield (
            f"the corpus is too small for vocab_size {config.vocab_size}: "
            f"the tokenizer has {tokenizer.vocab_size}"
        )
    samples = (header.splits["train"].num_tokens - 1) // config.sequence_length
    if samples < config.batch_size:
        yield (
            f"the corpus has {samples} training samples and a step takes {config.batch_size}: "
            "a step reads some of them more than once"
        )


def _refuse_public(cache_dir: Path) -> None:
    """A folder in which anyone may write is no place for data that is believed later."""
    if cache_dir.is_dir() and cache_dir.stat().st_mode & stat.S_IWOTH:
        raise UserError(
            f"{cache_dir} may be written by everyone",
            where="cache folder",
            legal="a folder of your own",
            nearest=f"chmod go-w {cache_dir}",
        )


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
