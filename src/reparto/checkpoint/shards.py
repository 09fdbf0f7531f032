"""One safetensors file: its header laid out, written and read with limits.

The format is 8 bytes of header length, a JSON header, then raw little-endian elements. We write it
ourselves because the library wants all tensors in memory at once and gives no digest on the way;
we read it ourselves because a loader asks for rectangles, which are byte ranges here, and because
each length in the header is a number from a file: all are checked against the file's real size
before one byte is allocated. The files are plain safetensors: `safetensors.safe_open` reads them.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reparto.checkpoint.layout import Damaged, parse_foreign
from reparto.errors import UserError
from reparto.partition.tensors import Rectangle
from reparto.units import DTYPE_BYTES

#: 100,000 tensors; more than any model of the hub has in one file
MAX_HEADER_BYTES = 16 << 20
_MAX_DIMS = 8

#: our dtype names -> safetensors' names
SAFETENSORS_DTYPE = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint32": "U32",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_OUR_DTYPE = {theirs: ours for ours, theirs in SAFETENSORS_DTYPE.items()}

#: runs shorter than this are not read one by one: a system call costs as much as reading 4 KiB
_SHORT_RUN_BYTES = 4096
_STAGING_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One tensor of a file."""

    key: str
    "its key in the header"
    dtype: str
    "our name of the element type"
    shape: tuple[int, ...]
    "its own shape, which for a piece is the rectangle's"
    offset: int
    "first byte, counted from the end of the header"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a file says that it holds."""

    blocks: Mapping[str, Block]
    "key -> block, in the order of bytes"
    metadata: Mapping[str, str]
    "free text: format, run, step"
    data_start: int
    "bytes before the first element"


# --- writing -------------------------------------------------------------------------------------


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Block]:
    """Blocks for `(key, dtype, shape)`, without holes; wide elements first, so all are aligned."""
    ordered = sorted(tensors, key=lambda one: -DTYPE_BYTES[one[1]])
    blocks, offset = [], 0
    for key, dtype, shape in ordered:
        blocks.append(Block(key=key, dtype=dtype, shape=shape, offset=offset))
        offset += blocks[-1].num_bytes
    return blocks


def header_bytes(blocks: Iterable[Block], metadata: Mapping[str, str]) -> bytes:
    """Length and header, padded with spaces so that elements start at a multiple of 8."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    for block in blocks:
        fields[block.key] = {
            "dtype": SAFETENSORS_DTYPE[block.dtype],
            "shape": list(block.shape),
            "data_offsets": [block.offset, block.offset + block.num_bytes],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UserError(
            f"one file would hold {len(fields) - 1} pieces, more than a header of "
            f"{MAX_HEADER_BYTES} bytes names",
            where="checkpoint",
            nearest="write from more ranks, or with fewer pieces a tensor",
        )
    return struct.pack("<Q", len(text)) + text


def element_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor in row-major order; a view for contiguous ones in host memory."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy().data


# --- reading -------------------------------------------------------------------------------------


def read_header(descriptor: int, *, where: object) -> Header:
    """Read and check a header; `Damaged` for anything that does not fit the file exactly."""
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise Damaged(where, f"header of {length} bytes in a file of {size}")
    raw = parse_foreign(os.pread(descriptor, length, 8), where=where)
    if not isinstance(raw, dict):
        raise Damaged(where, "header is not a JSON object")
    texts = raw.pop("__metadata__", {})
    metadata = _texts(texts)
    if metadata != texts:
        raise Damaged(where, "header metadata is not text")
    blocks = [_block(key, entry, where=where) for key, entry in raw.items()]
    blocks.sort(key=lambda block: (block.offset, block.num_bytes))
    end = 0
    for block in blocks:
        if block.offset != end:
            raise Damaged(where, f"{block.key} starts at byte {block.offset}, expected {end}")
        end += block.num_bytes
    if 8 + length + end != size:
        raise Damaged(where, f"header speaks of {8 + length + end} bytes, the file has {size}")
    return Header(
        blocks={block.key: block for block in blocks}, metadata=metadata, data_start=8 + length
    )


def _block(key: str, entry: object, *, where: object) -> Block:
    """One entry of the header, or `Damaged`."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Damaged(where, f"header entry {key[:80]!r} has other fields than it must")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _OUR_DTYPE:
        raise Damaged(where, f"{key[:80]!r} has an unknown element type")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise Damaged(where, f"{key[:80]!r} has no legal shape")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise Damaged(where, f"{key[:80]!r} has no legal offsets")
    block = Block(key=key, dtype=_OUR_DTYPE[dtype], shape=tuple(shape), offset=offsets[0])
    if offsets[1] - offsets[0] != block.num_bytes:
        raise Damaged(
            where, f"{key[:80]!r} takes {offsets[1] - offsets[0]} bytes, not {block.num_bytes}"
        )
    return block


def _texts(value: object) -> dict[str, str]:
    """The part of `value` that is text by text."""
    if not isinstance(value, dict):
        return {}
    return {str(key): text for key, text in value.items() if isinstance(text, str)}


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 62 for one in value)


def read_box(
    descriptor: int, header: Header, block: Block, box: Rectangle, out: Tensor, *, where: object
) -> None:
    """Read `box` of a block (indices from the block's own corner) into `out`, of the box's shape.

    Whole trailing dims are one run of bytes. Where runs are long, only they are read; where they
    are short (a narrow column cut), whole rows are, a few MiB at a time.
    """
    dtype: torch.dtype = getattr(torch, block.dtype)
    itemsize = DTYPE_BYTES[block.dtype]
    base = header.data_start + block.offset
    if not block.shape:
        out.copy_(_read(descriptor, base, itemsize, where=where).view(dtype)[0])
        return

    inner = len(block.shape)  # dims from `inner` on are taken whole
    while inner > 1 and box.size[inner - 1] == block.shape[inner - 1]:
        inner -= 1
    row_bytes = math.prod(block.shape[1:]) * itemsize
    run_bytes = math.prod(box.size[inner - 1 :]) * itemsize

    if inner == 1 or (inner == 2 and run_bytes >= _SHORT_RUN_BYTES):
        target = out if out.is_contiguous() and out.dtype == dtype else torch.empty_like(
            out, dtype=dtype, memory_format=torch.contiguous_format)  # fmt: skip
        if inner == 1:
            at = base + box.start[0] * row_bytes
            _read_into(descriptor, at, element_view(target), where=where)
        else:
            skip = box.start[1] * math.prod(block.shape[2:]) * itemsize
            for row in range(box.size[0]):
                at = base + (box.start[0] + row) * row_bytes + skip
                _read_into(descriptor, at, element_view(target[row]), where=where)
        if target is not out:
            out.copy_(target)
        return

    rows_at_once = max(1, _STAGING_BYTES // row_bytes)
    inside = tuple(slice(a, b) for a, b in zip(box.start[1:], box.stop[1:], strict=True))
    for row in range(0, box.size[0], rows_at_once):
        rows = min(rows_at_once, box.size[0] - row)
        at = base + (box.start[0] + row) * row_bytes
        raw = _read(descriptor, at, rows * row_bytes, where=where)
        whole = raw.view(dtype).view(rows, *block.shape[1:])
        out[row : row + rows].copy_(whole[(slice(None), *inside)])


def element_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, to be written to."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read(descriptor: int, at: int, num_bytes: int, *, where: object) -> Tensor:
    raw = torch.empty(num_bytes, dtype=torch.uint8)
    _read_into(descriptor, at, raw.numpy().data, where=where)
    return raw


def _read_into(descriptor: int, at: int, view: memoryview, *, where: object) -> None:
    while view:
        count = os.preadv(descriptor, [view], at)
        if count == 0:
            raise Damaged(where, f"ends at byte {at}, in the middle of a tensor")
        at += count
        view = view[count:]
