"""One text for one value, so that a digest names a value and not a spelling of it.

JSON with sorted keys, no spaces, ASCII only (control characters and newlines in names stay
escaped). Numbers that are not finite become the strings "NaN", "Infinity" and "-Infinity": JSON
has no word for them, and refusing them would lose the record of exactly the step that diverged.
Everything that JSON would bend silently is refused instead: keys that are not strings, and types
that only look like a number or a list.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

#: deeper values are refused, because a reader must not run out of stack on a hostile file
MAX_DEPTH = 64


def canonical(value: object) -> bytes:
    """The canonical JSON text of `value`; `TypeError` names the place of what cannot be written,
    `ValueError` says that it is nested more than 64 deep."""
    plain = _plain(value, "value", 0)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest_of(value: object) -> str:
    """SHA-256 of the canonical text, in hex."""
    return hashlib.sha256(canonical(value)).hexdigest()


def parse(text: bytes) -> object:
    """The value of a JSON text; `ValueError` if it is none, or says one key twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _plain(value: object, place: str, depth: int) -> object:
    """`value` with floats made finite or named, tuples as lists, and exact types only."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{place} has the key {key!r}, and keys must be strings")
        return {key: _plain(item, f"{place}.{key}", depth + 1) for key, item in value.items()}
    raise TypeError(
        f"{place} is a {type(value).__name__}, which JSON has no word for; "
        "give a number, text, list or dict"
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("one key stands twice")
    return found


def _refuse_constant(word: str) -> object:
    raise ValueError(f"{word} is not JSON")
