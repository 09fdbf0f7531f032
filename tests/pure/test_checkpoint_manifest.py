"""The manifest: one text for one value, signed before it is parsed, strict in every field."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import resource
from typing import Any

import pytest
from tests.checkpoint_worlds import KEY

from reparto.checkpoint.layout import (
    MAX_MANIFEST_BYTES,
    MAX_UNSIGNED_BYTES,
    Damaged,
    Manifest,
    build,
    canonical,
    decode,
    encode,
    run_name,
)
from reparto.errors import CheckFailed, RepartoError, UserError

SHA = "0" * 64


def plain() -> dict[str, Any]:
    """A legal manifest with every feature, as JSON."""
    piece = {"file": "rank-00000.safetensors", "start": [0, 0], "size": [2, 3]}
    lower = {"file": "rank-00001.safetensors", "start": [2, 0], "size": [2, 3]}
    whole = {"shape": [4, 3], "dtype": "float32", "pieces": [piece, lower]}
    scalar = {"file": "rank-00001.safetensors", "start": [], "size": []}
    return {
        "format": 1,
        "run": "run-a",
        "step": 40,
        "plan": "data=2,shard=parameters",
        "tensors": {
            "model.embed_tokens.weight": whole,
            "exp_avg/model.embed_tokens.weight": whole,
            "exp_avg_sq/model.embed_tokens.weight": whole,
            "lm_head.weight": {
                "shape": [4, 3], "dtype": "float32", "pieces": [],
                "alias_of": "model.embed_tokens.weight",
            },
            "scale": {"shape": [], "dtype": "bfloat16", "pieces": [scalar]},
        },
        "files": {
            "rank-00000.safetensors": {"sha256": SHA, "bytes": 10},
            "rank-00001.safetensors": {"sha256": SHA, "bytes": 11},
        },
        "per_rank": {"0": {"seed": 1}, "1": None},
        "state": {"updates": 40, "position": 1280, "rates": [1e-3, 0.5], "note": "ü\n"},
        "parent": {"run": "run-a", "step": 20, "manifest": SHA},
    }  # fmt: skip


def signed(value: object, key: bytes = KEY) -> bytes:
    """Any value signed as `encode` does, written from the description of the format alone."""
    body = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return body[:-1] + b',"hmac":"' + hmac.new(key, body, "sha256").hexdigest().encode() + b'"}'


def good() -> bytes:
    fields = plain()
    fields.pop("format")
    return encode(build(**fields), KEY)


def test_the_text_is_what_the_schema_says() -> None:
    raw = good()
    value = json.loads(raw)
    assert set(value) == {
        "format", "run", "step", "plan", "tensors", "files", "per_rank", "state", "parent", "hmac",
    }  # fmt: skip
    assert {name: value[name] for name in plain()} == plain()
    assert raw == signed(plain())


def test_reads_back_equal_with_and_without_the_key() -> None:
    manifest = decode(good(), KEY)
    assert encode(manifest, KEY) == good()
    assert decode(good(), None) == manifest
    assert manifest.tensors["lm_head.weight"].alias_of == "model.embed_tokens.weight"


def test_another_key_is_refused() -> None:
    with pytest.raises(Damaged, match="another key"):
        decode(good(), b"another key" + bytes(21))


def test_every_single_flipped_bit_is_found() -> None:
    raw = good()
    for at in range(len(raw)):
        for bit in (0, 3, 7):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            with pytest.raises(Damaged):
                decode(bytes(changed), KEY)


def test_every_truncation_is_found() -> None:
    raw = good()
    for length in range(len(raw)):
        with pytest.raises(Damaged):
            decode(raw[:length], KEY)


def test_nothing_is_parsed_before_the_signature_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr("reparto.checkpoint.layout.json.loads", never)
    with pytest.raises(Damaged, match="signature"):
        decode(b"[" * 100_000 + b',"hmac":"' + b"0" * 64 + b'"}', KEY)


@pytest.mark.parametrize("key", [KEY, None])
def test_a_newer_format_is_no_damage_but_a_refusal(key: bytes | None) -> None:
    newer = {**plain(), "format": 2, "compression": "zstd"}
    with pytest.raises(UserError, match="format 2") as caught:
        decode(signed(newer), key)
    assert "format 1" in caught.value.legal


def test_unsigned_text_has_a_lower_limit() -> None:
    state = {"state": {"text": "x" * MAX_UNSIGNED_BYTES}}
    raw = signed({**plain(), **state})
    assert decode(raw, KEY).state["text"]
    with pytest.raises(Damaged, match="limit"):
        decode(raw, None)
    with pytest.raises(Damaged, match="limit"):
        decode(b" " * (MAX_MANIFEST_BYTES + 1), KEY)


#: path of keys, new value (or DELETE), words of the refusal; every one is correctly signed
DELETE = object()
EMBEDDING = ("tensors", "model.embed_tokens.weight")
HOSTILE: list[tuple[tuple[Any, ...], Any, str]] = [
    (("step",), -1, "step"),
    (("step",), "40", "step"),
    (("step",), 1.0, "step"),
    (("step",), True, "step"),
    (("step",), 10**30, "step"),
    (("format",), "1", "format"),
    (("format",), DELETE, "format"),
    (("run",), "", "run"),
    (("run",), "../run", "run"),
    (("run",), "a\n", "run"),
    (("run",), "a" * 200, "run"),
    (("plan",), None, "plan"),
    (("plan",), "x" * 5000, "plan"),
    (("more",), 1, "more"),
    (("state",), [], "state"),
    (("state",), DELETE, "state"),
    (("parent",), {"run": "a", "step": 1}, "parent"),
    (("parent", "manifest"), "0" * 63, "manifest"),
    (("files", "rank-00000.safetensors", "sha256"), "g" * 64, "sha256"),
    (("files", "rank-00000.safetensors", "bytes"), -5, "bytes"),
    (("files", "rank-00000.safetensors", "mode"), 0, "mode"),
    (("files", "rank-00002.safetensors"), {"sha256": SHA, "bytes": 1}, "holds no piece"),
    (("files", "../rank-00000.safetensors"), {"sha256": SHA, "bytes": 1}, "files"),
    (("files", "/etc/passwd"), {"sha256": SHA, "bytes": 1}, "files"),
    (("files", "rank-00000.safetensors"), DELETE, "not listed"),
    (("tensors", "a/b"), {"shape": [0], "dtype": "float32", "pieces": []}, "tensors"),
    (("tensors", "exp_avg/../b"), {"shape": [0], "dtype": "float32", "pieces": []}, "tensors"),
    (("tensors", "a\x00b"), {"shape": [0], "dtype": "float32", "pieces": []}, "tensors"),
    (("tensors", "a" * 600), {"shape": [0], "dtype": "float32", "pieces": []}, "tensors"),
    (("tensors", "\x1b[31m"), {"shape": [0], "dtype": "float32", "pieces": []}, "tensors"),
    ((*EMBEDDING, "dtype"), "object", "dtype"),
    ((*EMBEDDING, "dtype"), "float32; import os", "dtype"),
    ((*EMBEDDING, "shape"), [4, -3], "shape"),
    ((*EMBEDDING, "shape"), [4, 4], "in no piece"),
    ((*EMBEDDING, "shape"), [2, 3], "inside"),
    ((*EMBEDDING, "shape"), [1 << 30, 1 << 30], "2^50"),
    ((*EMBEDDING, "shape"), [1] * 9, "shape"),
    ((*EMBEDDING, "pieces"), [], "in no piece"),
    ((*EMBEDDING, "pieces", 1, "start"), [1, 0], "overlap"),
    ((*EMBEDDING, "pieces", 1, "start"), [2], "dims"),
    ((*EMBEDDING, "pieces", 1, "size"), [2, 0], "inside"),
    ((*EMBEDDING, "pieces", 1, "file"), "../../x.safetensors", "file"),
    ((*EMBEDDING, "pieces", 1, "file"), "/dev/zero", "file"),
    ((*EMBEDDING, "pieces", 1, "file"), "rank-00007.safetensors", "not listed"),
    ((*EMBEDDING, "alias_of"), "scale", "holds no values"),
    (("tensors", "lm_head.weight", "alias_of"), "scale", "same tensor"),
    (("tensors", "lm_head.weight", "alias_of"), "lm_head.weight", "holds no values"),
    (("tensors", "lm_head.weight", "alias_of"), "gone", "holds no values"),
    (("tensors", "lm_head.weight", "shape"), [3, 4], "same tensor"),
    (("per_rank", "7"), 1, "gaps"),
    (("per_rank", "-1"), 1, "per_rank"),
    (("per_rank", "01"), 1, "per_rank"),
]


@pytest.mark.parametrize(("path", "value", "words"), HOSTILE)
def test_signed_nonsense_is_refused_too(path: tuple[Any, ...], value: Any, words: str) -> None:
    manifest = place = json.loads(json.dumps(plain()))  # entries of `plain` share their pieces
    for part in path[:-1]:
        place = place[part]
    if value is DELETE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(Damaged) as caught:
        decode(signed(manifest), KEY)
    assert words in str(caught.value)
    assert "\x1b" not in str(caught.value) and "\x00" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"format":1,"format":1}',
        b'{"format": 1}',
        b'{"format":1e999}',
        b'{"format":NaN}',
        b"[" * 5000 + b"]" * 5000,
        b'{"state":' + b'{"a":' * 40 + b"1" + b"}" * 41,
        b'{"run":"\xff"}',
        b"{}",
        b"nul}",
        b"9" * 10_000 + b"}",
    ],
)
def test_spellings_that_parsers_disagree_about_are_refused(body: bytes) -> None:
    tail = hmac.new(KEY, body, hashlib.sha256).hexdigest().encode()
    with pytest.raises(Damaged):
        decode(body[:-1] + b',"hmac":"' + tail + b'"}', KEY)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x", object()])
def test_values_that_would_not_come_back_equal_are_refused_at_save(value: object) -> None:
    with pytest.raises(UserError, match="JSON"):
        canonical({"state": value})


def mutated(value: Any, draw: random.Random) -> Any:
    """`value` with one thing somewhere inside changed, dropped, doubled or replaced."""
    strange = draw.choice(
        [None, True, -1, 0, 2**63, 10**40, 1.5, "", "..", "a" * 3000, "\ud800", [], {}, [[[[]]]],
         {"file": "x"}, "rank-00000.safetensors", [2**40, 2**40], "\n", "float64"]
    )  # fmt: skip
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        changed = dict(value)
        kind = draw.random()
        if kind < 0.1:
            del changed[key]
        elif kind < 0.2:
            changed[draw.choice(["x", "", "a/b", "..", key + "2"])] = changed[key]
        else:
            changed[key] = mutated(value[key], draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        changed_list = list(value)
        kind = draw.random()
        if kind < 0.15:
            changed_list.pop(at)
        elif kind < 0.3:
            changed_list.insert(at, value[at])
        else:
            changed_list[at] = mutated(value[at], draw)
        return changed_list
    if type(value) is int and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 2**40])
    if isinstance(value, str) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return value[:at] + chr(draw.randrange(1, 0x250)) + value[at + 1 :]
    return strange


@pytest.mark.parametrize(
    ("first", "last"), [(0, 2_000), pytest.param(2_000, 10_000, marks=pytest.mark.slow)]
)
def test_ten_thousand_mutated_manifests_meet_only_defined_errors_and_little_memory(
    first: int, last: int
) -> None:
    base, raw = plain(), good()
    refused = 0
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(first, last):
        draw = random.Random(turn)
        if turn % 4 == 3:  # bytes, as a disk or a stranger would change them
            text = bytearray(raw)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(text))
                text[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
            changed, key = bytes(text), draw.choice([KEY, None])
        else:  # values, signed by somebody who has the key
            value = base
            for _ in range(draw.randint(1, 3)):
                value = mutated(value, draw)
            changed, key = signed(value), draw.choice([KEY, None])
        try:
            found = decode(changed, key)
        except RepartoError as error:
            assert isinstance(error, CheckFailed | UserError)
            refused += 1
        else:
            assert isinstance(found, Manifest)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert refused > 0.8 * (last - first)
    assert grown_kib < 100 << 10


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"ab",', b"1.5,", b'{"a":[]},', b"[[]],"])
def test_a_bomb_of_small_values_stays_small(unit: bytes) -> None:
    body = b'{"state":[' + unit * ((MAX_UNSIGNED_BYTES - 200) // len(unit)) + b"1]}"
    raw = body[:-1] + b',"hmac":"' + b"0" * 64 + b'"}'
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Damaged):
        decode(raw, None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 << 10


@pytest.mark.parametrize(
    ("folder", "name"),
    [("first-run", "first-run"), ("data=2,tensor=2", "data-2-tensor-2"), ("-x", "run-x"),
     ("corrida ñ", "corrida--"), (".hidden", "run.hidden"), ("", "run")],
)  # fmt: skip
def test_any_folder_gives_a_name_that_a_manifest_allows(folder: str, name: str) -> None:
    assert run_name(folder) == name
    assert len(run_name("=" * 4000)) <= 128
