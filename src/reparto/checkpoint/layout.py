"""The manifest: what a checkpoint is, as one value that is signed, checked and compared.

A checkpoint is a folder of safetensors files and one `manifest.json`, written last. The manifest
says where every rectangle of every global tensor lies, so nothing in a checkpoint depends on the
plan that wrote it: any rank of any plan asks for a rectangle and gets it.

    {"format", "run", "step", "plan",
     "tensors": {name: {"shape", "dtype", "pieces": [{"file", "start", "size"}], "alias_of"?}},
     "files": {file: {"sha256", "bytes"}}, "per_rank", "state", "parent", "hmac"}

Names are Hugging Face's, one entry per logical matrix; the moments of `w` are `exp_avg/w` and
`exp_avg_sq/w`; the vocabulary is unpadded; a tied weight is stored once, and its other name is an
entry with `alias_of` and no pieces.

The text is canonical JSON (sorted keys, no spaces, ASCII) with the signature as its last key. So
the signature is checked on raw bytes *before* a parser sees them, and there is exactly one text for
one manifest: any changed byte is found, a changed space or escape too. Rejected: signing the parsed
value, by which every parser oddity (doubled keys, 1e999, depth) is met before the signature is.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from reparto.checkpoint.tiling import tiles, why_not_tiled
from reparto.errors import CheckFailed, UserError
from reparto.partition.tensors import Rectangle
from reparto.units import DTYPE_BYTES

FORMAT = 1
MANIFEST = "manifest.json"
MOMENTS = ("exp_avg", "exp_avg_sq")

#: a manifest of 500,000 pieces, far more than 1,000 ranks of a 70B model write
MAX_MANIFEST_BYTES = 64 << 20
#: without a key the parser meets bytes that nobody vouches for; the worst 4 MiB take 60 MB parsed
MAX_UNSIGNED_BYTES = 4 << 20
MAX_DEPTH = 32
MAX_DIMS = 8
MAX_ELEMENTS = 1 << 50

_TENSOR_NAME = r"^(?:exp_avg/|exp_avg_sq/)?[A-Za-z0-9_]+(?:[.\-][A-Za-z0-9_]+)*\Z"
_FILE_NAME = r"^rank-[0-9]{5}\.safetensors\Z"
_RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._\-]*\Z"
_SIGNATURE = re.compile(rb',"hmac":"([0-9a-f]{64})"}\Z')
_SIGNATURE_BYTES = 10 + 64 + 1  # of the match above, without its closing brace


def run_name(folder: str) -> str:
    """The name of a run in its manifests: that of its folder, in letters they allow.

    A folder may be called `data=2,tensor=2`; the run must not come to its first save to hear of it.
    """
    safe = re.sub(r"[^A-Za-z0-9._\-]", "-", folder)[:120]
    return safe if re.match(_RUN_NAME, safe) else f"run{safe}"


class Damaged(CheckFailed):
    """A checkpoint, or a file of it, is not what it should be. Exit status 3.

    where   folder or file
    faults  every fault found, each naming its file
    """

    def __init__(self, where: object, *faults: str) -> None:
        self.where = str(where)
        self.faults = faults
        super().__init__(f"{where}: " + "; ".join(faults))


TensorName = Annotated[StrictStr, Field(max_length=512, pattern=_TENSOR_NAME)]
FileName = Annotated[StrictStr, Field(pattern=_FILE_NAME)]
RunName = Annotated[StrictStr, Field(max_length=128, pattern=_RUN_NAME)]
Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[StrictInt, Field(ge=0, le=1 << 62)]
Extents = Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", regex_engine="python-re")


class PieceEntry(_Value):
    """One rectangle of a tensor and the file it lies in, under the key `piece_key`."""

    file: FileName
    "name of a file of this folder"
    start: Extents
    "first index along every dim of the global tensor"
    size: Extents
    "extent along every dim"

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(start=self.start, size=self.size)


class TensorEntry(_Value):
    """One global tensor."""

    shape: Extents
    "global shape, vocabulary unpadded"
    dtype: StrictStr
    "element type, by the names of `units.DTYPE_BYTES`"
    pieces: tuple[PieceEntry, ...]
    "rectangles that tile the tensor exactly; empty for an alias"
    alias_of: TensorName | None = None
    "the entry that holds the values, where two parameters are one tensor"


class FileEntry(_Value):
    """One file of the folder."""

    sha256: Digest
    "SHA-256 of the whole file, hex"
    bytes: Count
    "its length"


class Parent(_Value):
    """The checkpoint that a run went on from."""

    run: RunName
    step: Count
    manifest: Digest
    "SHA-256 of its `manifest.json`"


class Manifest(_Value):
    """A whole checkpoint, without the signature (which is a property of the text)."""

    format: StrictInt
    "version of this schema"
    run: RunName
    "the run that wrote it; the same over its resumes"
    step: Count
    "optimizer steps done"
    plan: Annotated[StrictStr, Field(max_length=4096)]
    "text of the plan that wrote it; information only, nothing is laid out by it"
    tensors: dict[TensorName, TensorEntry]
    files: dict[FileName, FileEntry]
    per_rank: dict[Annotated[StrictStr, Field(pattern=r"^(0|[1-9][0-9]{0,6})\Z")], JsonValue] | None
    "values that belong to one rank each, by rank; None if the run has none"
    state: dict[StrictStr, JsonValue]
    "values of the whole run: update count, data position, ledger head and count, provenance"
    parent: Parent | None
    "None for a run from fresh weights"

    @model_validator(mode="after")
    def _hangs_together(self) -> Manifest:
        for name, entry in self.tensors.items():
            if entry.alias_of is None:
                _check_entry(name, entry, self.files)
        for name, entry in self.tensors.items():
            if entry.alias_of is not None:
                _check_alias(name, entry, self.tensors.get(entry.alias_of))
        used = {piece.file for entry in self.tensors.values() for piece in entry.pieces}
        for file in sorted(set(self.files) - used):
            raise ValueError(f"file {file} holds no piece of any tensor")
        if self.per_rank is not None:
            ranks = {int(rank) for rank in self.per_rank}
            if ranks != set(range(len(ranks))):
                raise ValueError(f"per_rank has the ranks {sorted(ranks)}, which has gaps")
        return self


def _check_entry(name: str, entry: TensorEntry, files: Mapping[str, FileEntry]) -> None:
    if entry.dtype not in DTYPE_BYTES:
        raise ValueError(f"{name} has the unknown dtype {entry.dtype[:40]!r}")
    if math.prod(entry.shape) > MAX_ELEMENTS:
        raise ValueError(f"{name} has shape {list(entry.shape)}, more than 2^50 elements")
    for piece in entry.pieces:
        if piece.file not in files:
            raise ValueError(f"{name} has a piece in {piece.file}, which is not listed")
    boxes = [piece.rectangle for piece in entry.pieces]
    if any(0 in box.size for box in boxes) or not tiles(entry.shape, boxes):
        raise ValueError(f"{name}: {why_not_tiled(entry.shape, boxes)}")


def _check_alias(name: str, entry: TensorEntry, target: TensorEntry | None) -> None:
    if target is None or target.alias_of is not None:
        raise ValueError(f"{name} is an alias of {entry.alias_of}, which holds no values")
    if entry.pieces or (target.shape, target.dtype) != (entry.shape, entry.dtype):
        raise ValueError(f"{name} is an alias of {entry.alias_of}, but not the same tensor")


# --- names ---------------------------------------------------------------------------------------


def moment_name(moment: str, name: str) -> str:
    """`exp_avg`, `w` -> `exp_avg/w`."""
    assert moment in MOMENTS, moment
    return f"{moment}/{name}"


def is_moment(name: str) -> bool:
    """Whether an entry is optimizer state of a weight."""
    return "/" in name


def piece_key(name: str, start: Sequence[int]) -> str:
    """The key of a piece inside its file: unique, since pieces of one tensor do not overlap."""
    return f"{name}@{','.join(map(str, start))}"


def file_of_rank(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


# --- text ----------------------------------------------------------------------------------------


def canonical(value: object) -> bytes:
    """The one JSON text of a value. `UserError` for what JSON cannot say and give back equal."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot be written as JSON: {error}",
            where="checkpoint state",
            legal="numbers (finite), text, lists, and dicts with text keys",
        ) from error
    return text.encode("ascii")


def encode(manifest: Manifest, key: bytes) -> bytes:
    """The signed text of a manifest: what `manifest.json` holds."""
    body = canonical(_plain(manifest))
    return body[:-1] + b',"hmac":"' + _sign(body, key).encode() + b'"}'


def decode(raw: bytes, key: bytes | None, *, where: object = MANIFEST) -> Manifest:
    """Check the signature, then read. Without a key the signature is *not* checked.

    Raises `Damaged` for anything that does not hold, and `UserError` for a manifest that is whole
    and signed but written by another version of the format.
    """
    limit = MAX_MANIFEST_BYTES if key is not None else MAX_UNSIGNED_BYTES
    if len(raw) > limit:
        raise Damaged(where, f"{len(raw)} bytes or more, the limit is {limit}")
    found = _SIGNATURE.search(raw, max(0, len(raw) - _SIGNATURE_BYTES - 1))
    if found is None:
        raise Damaged(where, "not a manifest: it does not end in a signature")
    body = raw[: found.start()] + b"}"
    if key is not None and not hmac.compare_digest(found[1].decode(), _sign(body, key)):
        raise Damaged(where, "signature does not fit: changed since it was written, or another key")
    value = parse(body, where=where)
    if not isinstance(value, dict):
        raise Damaged(where, "not a manifest: no JSON object")
    version = value.get("format")
    if type(version) is int and version != FORMAT:
        raise UserError(
            f"written in checkpoint format {version}",
            where=str(where),
            legal=f"format {FORMAT}",
            nearest="use the version of reparto that wrote it and export, then import here",
        )
    try:
        manifest = Manifest.model_validate(value)
    except ValidationError as error:
        raise Damaged(where, *_first_errors(error)) from error
    except RecursionError:
        raise Damaged(where, "nested too deeply") from None
    return manifest


def parse(text: bytes, *, where: object) -> JsonValue:
    """A canonical JSON text, strictly. Else `Damaged`."""
    value = parse_foreign(text, where=where)
    try:
        same = canonical(value) == text
    except UserError:  # 1e999 reads as infinity
        same = False
    if not same:
        raise Damaged(where, "not in canonical form")
    return value


def parse_foreign(text: bytes, *, where: object) -> JsonValue:
    """A JSON text of any spelling: each key once, no NaN, at most 32 deep. Else `Damaged`."""
    if text.count(b"[") + text.count(b"{") > len(text) // 8 + 1000:
        # `[],[],` takes 3 bytes here and 64 in memory; a manifest has a bracket in 25 bytes
        raise Damaged(where, "holds more lists than anything written here")
    try:
        value: JsonValue = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        _refuse_depth(value)
    except RecursionError:
        raise Damaged(where, "nested too deeply") from None
    except ValueError as error:
        raise Damaged(where, f"not readable: {error}") from error
    return value


def build(**fields: object) -> Manifest:
    """A manifest from its fields; a mistake of the caller becomes a `UserError`."""
    try:
        return Manifest.model_validate({"format": FORMAT, **fields})
    except ValidationError as error:
        raise UserError("; ".join(_first_errors(error)), where="checkpoint") from error


def digest(raw: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(raw).hexdigest()


def _plain(manifest: Manifest) -> dict[str, object]:
    plain: dict[str, object] = manifest.model_dump(mode="python")
    tensors = plain["tensors"]
    assert isinstance(tensors, dict)
    for entry in tensors.values():
        if entry["alias_of"] is None:
            del entry["alias_of"]
    return plain


def _sign(body: bytes, key: bytes) -> str:
    return hmac.new(key, body, hashlib.sha256).hexdigest()


def _first_errors(error: ValidationError, limit: int = 5) -> list[str]:
    found = []
    for one in error.errors(include_url=False, include_input=False)[:limit]:
        place = ".".join(ascii(str(part)[:80])[1:-1] for part in one["loc"])
        what = one["msg"].removeprefix("Value error, ")
        found.append(f"{place}: {what}" if place else what)
    return found


def _unique(pairs: list[tuple[str, JsonValue]]) -> Mapping[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("one key stands twice")
    return found


def _refuse_constant(word: str) -> JsonValue:
    raise ValueError(f"{word} is not JSON")


def _refuse_depth(value: JsonValue) -> None:
    level: list[JsonValue] = [value]
    for _ in range(MAX_DEPTH):
        inner: list[JsonValue] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        if not inner:
            return
        level = inner
    raise ValueError(f"nested more than {MAX_DEPTH} deep")
