"""Units and element sizes: one place that knows them, so that no other file has a bare 4 or 1e9.

Quantities inside the program are plain numbers in base units, and the unit stands in the name:
`_bytes`, `_s`, `_flops`, `_tokens`. This file turns them into words for people.
"""

from __future__ import annotations

from types import MappingProxyType

#: bytes of one element, by the names that configs and checkpoints use
DTYPE_BYTES = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "int64": 8,
        "int32": 4,
        "uint32": 4,
        "int16": 2,
        "uint16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)

_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def human_bytes(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`. Binary units, because memory is counted in them."""
    for size, name in _BINARY:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {name}"
    return f"{num_bytes:.0f} B"


def human_count(count: float) -> str:
    """`10_240_000` -> `10.2M`. Decimal units, for parameters, tokens and FLOPs."""
    for size, name in _DECIMAL:
        if abs(count) >= size:
            return f"{count / size:.1f}{name}"
    return f"{count:.0f}"


def human_seconds(seconds: float) -> str:
    """`0.0021` -> `2.1 ms`, `75` -> `1 min 15 s`, `7300` -> `2 h 1 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
