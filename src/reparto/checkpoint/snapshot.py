"""What one rank gives to a checkpoint: pieces of global tensors, and how they lie in its file.

The caller names what it owns (`Piece`); nothing here knows a plan. A piece may be any rectangle, so
rows of a sharded tensor, columns of a tensor-parallel one and one expert out of a fused tensor are
all the same thing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from reparto.checkpoint import layout
from reparto.checkpoint.files import write_file
from reparto.checkpoint.layout import FileEntry, Parent, piece_key
from reparto.checkpoint.shards import Block, element_bytes, header_bytes, lay_out
from reparto.errors import UserError
from reparto.partition.tensors import Rectangle
from reparto.units import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One rectangle of one global tensor, as this rank holds it."""

    name: str
    "global name; optimizer state is `moment_name(moment, weight)`"
    shape: tuple[int, ...]
    "global shape, vocabulary unpadded"
    rectangle: Rectangle
    "where it lies"
    tensor: Tensor
    "its values, of the rectangle's shape; any device, any strides"

    @property
    def dtype(self) -> str:
        """Our name of the element type."""
        return str(self.tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that one rank gives."""

    step: int
    "optimizer steps done; equal on all ranks"
    plan: str
    "text of the plan"
    pieces: Sequence[Piece]
    "what this rank writes: every element of the model is in exactly one piece of one rank"
    state: Mapping[str, JsonValue]
    "values of the whole run; rank 0's are kept"
    aliases: Mapping[str, str] = field(default_factory=dict)
    "tied name -> the name it is stored under; rank 0's are kept"
    per_rank: Mapping[str, JsonValue] | None = None
    "values that only this rank can use again; all ranks give some, or none does"
    parent: Parent | None = None
    "the checkpoint that this run was resumed from"


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A snapshot laid out as a file. Values are copies; elements are, once `copied_into`."""

    step: int
    plan: str
    state: dict[str, JsonValue]
    aliases: dict[str, str]
    per_rank: dict[str, JsonValue] | None
    parent: Parent | None
    pieces: tuple[Piece, ...]
    "in the order of the file; empty ones are left out"
    blocks: tuple[Block, ...]
    "one a piece"
    fault: str
    "why this cannot be saved; said at the first meeting, so that all ranks hear it"
    buffer: Tensor | None = None
    "uint8, all elements in the order of the file, where they have been copied"

    @classmethod
    def of(cls, snapshot: Snapshot) -> Contribution:
        """Lay out the pieces. Raises nothing: a fault is kept for the meeting."""
        full = [piece for piece in snapshot.pieces if 0 not in piece.rectangle.size]
        fault = _fault_of(full)
        if fault:
            full = []
        full.sort(key=lambda piece: -DTYPE_BYTES[piece.dtype])  # the order that `lay_out` keeps
        keys = [piece_key(piece.name, piece.rectangle.start) for piece in full]
        blocks = lay_out(
            (key, piece.dtype, piece.rectangle.size) for key, piece in zip(keys, full, strict=True)
        )
        return cls(
            step=snapshot.step,
            plan=snapshot.plan,
            state={key: _copied(value) for key, value in snapshot.state.items()},
            aliases=dict(snapshot.aliases),
            per_rank=None
            if snapshot.per_rank is None
            else {key: _copied(value) for key, value in snapshot.per_rank.items()},
            parent=snapshot.parent,
            pieces=tuple(full),
            blocks=tuple(blocks),
            fault=fault,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of elements."""
        return sum(block.num_bytes for block in self.blocks)

    def refuse_faults(self) -> None:
        """`UserError` for what this rank can see before anything is written."""
        if self.fault:
            raise UserError(self.fault)
        for value in (self.state, self.per_rank):
            if json.loads(layout.canonical(value)) != value:
                raise UserError(
                    "holds a key that is not text, and would not come back equal",
                    where="checkpoint state",
                    legal="dicts with text keys",
                )

    def rows(self) -> list[JsonValue]:
        """`[name, shape, dtype, start, size]` of each piece, for the manifest."""
        return [
            [one.name, list(one.shape), one.dtype, list(one.rectangle.start),
             list(one.rectangle.size)]
            for one in self.pieces
        ]  # fmt: skip

    def write(self, path: Path, metadata: Mapping[str, str]) -> FileEntry | None:
        """Write the file; None, and no file, for a rank that owns nothing."""
        if not self.blocks:
            return None
        return write_file(path, self._chunks(header_bytes(self.blocks, metadata)))

    def _chunks(self, header: bytes) -> Iterator[memoryview | bytes]:
        yield header
        if self.buffer is not None:
            yield self.buffer.numpy().data[: self.num_bytes]
        else:
            for piece in self.pieces:
                yield element_bytes(piece.tensor)

    def copied_into(self, buffer: Tensor) -> Contribution:
        """The same with its elements copied to `buffer`: uint8, `num_bytes` or more, host."""
        for piece, block in zip(self.pieces, self.blocks, strict=True):
            place = buffer[block.offset : block.offset + block.num_bytes]
            place.view(piece.tensor.dtype).view(block.shape).copy_(piece.tensor)
        return replace(self, buffer=buffer, pieces=self.pieces)


def _copied(value: JsonValue | tuple[JsonValue, ...]) -> JsonValue:
    """A copy that later changes do not reach; tuples become the lists that JSON makes of them."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(inner) for inner in value]
    return value


def _fault_of(pieces: Sequence[Piece]) -> str:
    """What is wrong with a rank's pieces; empty if nothing is."""
    seen: set[str] = set()
    for piece in pieces:
        if piece.dtype not in DTYPE_BYTES:
            return f"{piece.name} is {piece.dtype}, which checkpoints do not store"
        if tuple(piece.tensor.shape) != piece.rectangle.size:
            return (
                f"{piece.name} has values of shape {tuple(piece.tensor.shape)} for a piece of "
                f"size {piece.rectangle.size}"
            )
        key = piece_key(piece.name, piece.rectangle.start)
        if key in seen:
            return f"two pieces of {piece.name} start at {list(piece.rectangle.start)}"
        seen.add(key)
    return ""


def clipped(
    name: str, shape: tuple[int, ...], rectangle: Rectangle, tensor: Tensor
) -> Piece | None:
    """A piece of a padded tensor without its padding; None if it is all padding.

    shape      global shape without padding
    rectangle  where `tensor` lies in the padded tensor
    """
    inside = rectangle.intersect(Rectangle.whole(shape)) if shape else rectangle
    if inside is None:
        return None
    for dim, size in enumerate(inside.size):
        tensor = tensor.narrow(dim, 0, size)  # padding is at the end, so the corner stays
    return Piece(name=name, shape=shape, rectangle=inside, tensor=tensor)
