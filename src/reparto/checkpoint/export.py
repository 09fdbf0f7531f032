"""To and from a Hugging Face folder: config.json, safetensors (with an index when cut), tokenizer.

A checkpoint already speaks the hub's names, one entry per logical matrix and no padding, so export
writes whole tensors in model order and import cuts them into pieces. Optimizer state has no place
in such a folder: export leaves it out, import starts it at zero, which is what a fresh optimizer
has. A folder from elsewhere proves nothing about itself: import reads plain safetensors and JSON
with limits, never pickles, never code, and what it writes is signed by the run that takes it in.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from reparto.checkpoint import layout
from reparto.checkpoint.files import (
    make_private_folder,
    open_plain,
    read_small,
    remove_folder,
    sync_folder,
    write_file,
)
from reparto.checkpoint.layout import MOMENTS, Damaged, moment_name
from reparto.checkpoint.rewrite import Cut, Source, by_rows, write_checkpoint
from reparto.checkpoint.shards import (
    Block,
    Header,
    element_bytes,
    header_bytes,
    lay_out,
    read_box,
    read_header,
)
from reparto.checkpoint.stored import Checkpoint
from reparto.errors import UserError, nearest_word
from reparto.partition.tensors import Rectangle
from reparto.units import DTYPE_BYTES

CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"
_WHOLE = "model.safetensors"
#: what other tools cut at; a file then fits a machine that holds two of them
SHARD_BYTES = 5_000_000_000
_MAX_JSON_BYTES = 16 << 20
_SHARD_NAME = re.compile(r"[A-Za-z0-9_\-]+(?:\.[A-Za-z0-9_\-]+)*\.safetensors")


# --- export --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export wrote."""

    path: Path
    num_bytes: int
    "of all tensors"
    files: tuple[str, ...]
    "names of the tensor files"


def export(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    config: Mapping[str, object],
    tokenizer_json: str | None = None,
    end_of_text: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    names: Mapping[str, str] | None = None,
) -> Exported:
    """Write the weights as a Hugging Face folder, whole or not at all.

    folder          made here; `UserError` if there is something already
    config          the model's config.json (`config.huggingface.to_hf_config`)
    tokenizer_json  text of a tokenizer.json; None leaves the tokenizer out
    end_of_text     the token that ends a text, for the tokenizer's own config
    dtype           element type to write; None keeps the stored one
    shard_bytes     more bytes than this are cut into several files and an index
    names           our name -> the one to write (`config.huggingface.hub_names`); None keeps ours
    """
    if os.path.lexists(folder):
        raise UserError("is there already", where=str(folder), nearest="choose a new folder")
    if dtype is not None and dtype not in ("float64", "float32", "bfloat16", "float16"):
        raise UserError(
            f"weights cannot be written as {dtype!r}",
            where="--dtype",
            legal="float64, float32, bfloat16, float16",
            nearest=nearest_word(dtype, DTYPE_BYTES),
        )
    types = {name: dtype or checkpoint.manifest.tensors[name].dtype for name in checkpoint.weights}
    written = {name: (names or {}).get(name, name) for name in checkpoint.weights}
    shards = _cut_into_files(checkpoint.weights, types, shard_bytes, written)
    unfinished = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(8)}")
    make_private_folder(unfinished)
    try:
        for name, blocks in shards.items():
            write_file(unfinished / name, _tensors(checkpoint, blocks, written))
        total = sum(block.num_bytes for blocks in shards.values() for block in blocks)
        if len(shards) > 1:
            where = {block.key: name for name, blocks in shards.items() for block in blocks}
            _write_json(
                unfinished / INDEX, {"metadata": {"total_size": total}, "weight_map": where}
            )
        stored = sorted(set(types.values()))
        _write_json(
            unfinished / CONFIG,
            {**config, "dtype": stored[0]} if len(stored) == 1 else dict(config),
        )
        if tokenizer_json is not None:
            write_file(unfinished / TOKENIZER, [tokenizer_json.encode()])
            names = {"eos_token": end_of_text} if end_of_text is not None else {}
            _write_json(
                unfinished / "tokenizer_config.json",
                {"tokenizer_class": "PreTrainedTokenizerFast", **names},
            )
        sync_folder(unfinished)
        os.rename(unfinished, folder)
        sync_folder(folder.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_folder(unfinished)
        raise
    return Exported(path=folder, num_bytes=total, files=tuple(shards))


def _cut_into_files(
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, str],
    shard_bytes: int,
    written: Mapping[str, str],
) -> dict[str, list[Block]]:
    """File name -> blocks, in the checkpoint's order; a tensor is never cut."""
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = Rectangle.whole(shape).numel * DTYPE_BYTES[types[name]]
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((written[name], types[name], shape))
        filled += size
    if len(groups) == 1:
        return {_WHOLE: lay_out(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": lay_out(group)
        for number, group in enumerate(groups, 1)
    }


def _tensors(
    checkpoint: Checkpoint, blocks: list[Block], written: Mapping[str, str]
) -> Iterator[memoryview | bytes]:
    ours = {theirs: name for name, theirs in written.items()}
    yield header_bytes(blocks, {"format": "pt"})
    for block in blocks:
        yield element_bytes(checkpoint.read(ours[block.key], dtype=getattr(torch, block.dtype)))


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    write_file(path, [(json.dumps(value, indent=2) + "\n").encode()])


# --- import --------------------------------------------------------------------------------------


class HuggingFaceFolder:
    """The tensors and JSON files of a Hugging Face folder, read with limits.

    Raises `UserError` for a folder that has no safetensors, and `Damaged` for files that do not
    hold: links, a wrong header, an index that points to what is not there.
    """

    def __init__(self, path: Path, *, names: Mapping[str, str] | None = None) -> None:
        """path is a folder with `model.safetensors`, or with shards and their index.

        names  our name -> the folder's (`config.huggingface.hub_names`), where they differ; its
               tensors go by our names from then on
        """
        ours = {theirs: name for name, theirs in (names or {}).items()}
        self._stored: dict[str, str] = {}
        if not path.is_dir():
            raise UserError("is no folder", where=str(path))
        self.path = path
        self._file_of: dict[str, str] = {}
        self._headers: dict[str, Header] = {}
        for name in sorted(self._shards()):
            header = self._headers[name] = self._read_header(name)
            for stored in header.blocks:
                key = ours.get(stored, stored)
                if key in self._file_of:
                    raise Damaged(path, f"{key[:120]} is in {self._file_of[key]} and in {name}")
                self._file_of[key] = name
                self._stored[key] = stored

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""
        return {name: self._block(name).shape for name in self._file_of}

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its tensor files."""
        return tuple(sorted(self._headers))

    @property
    def config(self) -> dict[str, JsonValue]:
        """Its config.json."""
        return _read_json(self.path / CONFIG)

    def dtype(self, name: str) -> str:
        """Element type of a tensor."""
        return self._block(name).dtype

    def read(self, name: str, box: Rectangle, dtype: str) -> Tensor:
        """A rectangle of a tensor, as `dtype`."""
        block, file = self._block(name), self._file_of[name]
        out = torch.empty(box.size, dtype=getattr(torch, block.dtype))
        descriptor = open_plain(_refuse_link(self.path / file), foreign=True)
        try:
            read_box(descriptor, self._headers[file], block, box, out, where=self.path / file)
        finally:
            os.close(descriptor)
        return out.to(getattr(torch, dtype))

    def _block(self, name: str) -> Block:
        return self._headers[self._file_of[name]].blocks[self._stored[name]]

    def _shards(self) -> set[str]:
        if os.path.lexists(self.path / INDEX):
            where = _read_json(self.path / INDEX).get("weight_map")
            if not isinstance(where, dict) or not where:
                raise Damaged(self.path / INDEX, "has no weight_map")
            names = {name if isinstance(name, str) else "" for name in where.values()}
            bad = [name for name in names if not _SHARD_NAME.fullmatch(name)]
            if bad:
                raise Damaged(self.path / INDEX, f"{bad[0][:120]!r} is not the name of a shard")
            return names
        if os.path.lexists(self.path / _WHOLE):
            return {_WHOLE}
        pickles = [one for one in os.listdir(self.path) if one.endswith((".bin", ".pt", ".pth"))]
        raise UserError(
            "holds no model.safetensors and no index of shards"
            + (f"; {pickles[0]!r} is a pickle, which would be run, not read" if pickles else ""),
            where=str(self.path),
            legal="weights in safetensors",
            nearest="save the model with safe_serialization=True where it comes from",
        )

    def _read_header(self, name: str) -> Header:
        descriptor = open_plain(_refuse_link(self.path / name), foreign=True)
        try:
            return read_header(descriptor, where=self.path / name)
        finally:
            os.close(descriptor)


def import_huggingface(
    source: HuggingFaceFolder,
    root: Path,
    *,
    run: str,
    key: bytes,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    frozen: frozenset[str] = frozenset(),
    dtype: str = "float32",
    cut: Cut | None = None,
    plan: str = "",
) -> Path:
    """Write `root/step-0` with the folder's weights and moments of zero; returns that folder.

    shapes  what the model needs, tied weights once (`config.model.parameter_shapes`)
    tied    alias -> the name it is stored under; the folder may hold either or both
    frozen  weights that are not trained, and get no moments
    dtype   element type of the master weights; float32 holds bfloat16 and float16 exactly
    cut     how to lay it out; None writes one file

    Raises `UserError` listing every missing, unused and wrong-shape tensor.
    """
    found = source.shapes
    stored_as = {name: _stored_name(name, tied, found) for name in shapes}
    _refuse_other_model(source, shapes, tied, stored_as)
    sources: dict[str, Source] = {}
    for name, shape in shapes.items():
        weight = _weight_reader(source, stored_as[name], dtype)
        sources[name] = Source(shape=shape, dtype=dtype, read=weight)
        if name not in frozen:
            zero = Source(shape=shape, dtype=dtype, read=_zero_reader(dtype))
            sources.update({moment_name(moment, name): zero for moment in MOMENTS})
    return write_checkpoint(
        root, run=run, step=0, key=key, plan=plan, sources=sources, aliases=tied,
        cut=cut or by_rows(1), parent=None,
        state={"updates": 0, "position": 0, "imported": {
            "files": list(source.files),
            "config_sha256": layout.digest(_json_text(source.path / CONFIG)),
        }},
    )  # fmt: skip


def _stored_name(name: str, tied: Mapping[str, str], found: Mapping[str, object]) -> str:
    """Under which of its names the folder holds a weight."""
    names = [name, *(alias for alias, target in tied.items() if target == name)]
    return next((one for one in names if one in found), name)


def _refuse_other_model(
    source: HuggingFaceFolder,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    stored_as: Mapping[str, str],
) -> None:
    found = source.shapes
    missing = [name for name in shapes if stored_as[name] not in found]
    unused = [name for name in found if name not in shapes and name not in tied]
    wrong = [
        f"{name} is {list(found[stored_as[name]])}, the model needs {list(shape)}"
        for name, shape in shapes.items()
        if stored_as[name] in found and found[stored_as[name]] != shape
    ]
    for alias, name in tied.items():  # both there: then they must be one tensor
        if alias in found and name in found and alias != stored_as[name]:
            whole = Rectangle.whole(shapes[name])
            types = source.dtype(alias), source.dtype(name)
            if found[alias] != found[name] or types[0] != types[1]:
                wrong.append(f"{alias} and {name} are tied, but not alike")
            elif not torch.equal(
                source.read(alias, whole, types[0]), source.read(name, whole, types[1])
            ):
                wrong.append(f"{alias} and {name} are tied, but hold different values")
    if missing or unused or wrong:
        lists = (("missing", missing), ("unused", unused), ("wrong", wrong))
        text = [f"{what} ({len(names)}): {', '.join(names)}" for what, names in lists if names]
        raise UserError(
            "does not hold this model\n  " + "\n  ".join(text),
            where=str(source.path),
            legal="exactly the tensors that its config.json asks for",
        )


def _weight_reader(
    source: HuggingFaceFolder, name: str, dtype: str
) -> Callable[[Rectangle], Tensor]:
    return lambda box: source.read(name, box, dtype)


def _zero_reader(dtype: str) -> Callable[[Rectangle], Tensor]:
    return lambda box: torch.zeros(box.size, dtype=getattr(torch, dtype))


def _refuse_link(path: Path) -> Path:
    """The path, unless it is a link. The hub's cache holds links, so the way out is said."""
    if path.is_symlink():
        raise UserError(
            "is a link, and links are not followed",
            where=str(path),
            legal="plain files",
            nearest=f"cp -rL {path.parent} COPY, and import COPY",
        )
    return path


def _json_text(path: Path) -> bytes:
    return read_small(_refuse_link(path), _MAX_JSON_BYTES, foreign=True)


def _read_json(path: Path) -> dict[str, JsonValue]:
    """A JSON object out of a foreign folder; one key once, limits on size and depth."""
    value = layout.parse_foreign(_json_text(path), where=path)
    if not isinstance(value, dict):
        raise Damaged(path, "is not a JSON object")
    return value
