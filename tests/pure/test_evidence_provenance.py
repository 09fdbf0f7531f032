"""Provenance: enough to compare and repeat a run, and nothing about the person or the network."""

from __future__ import annotations

import getpass
import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from reparto.evidence.canonical import canonical
from reparto.evidence.provenance import (
    VARIABLES,
    allowed_environment,
    code_digest,
    collect,
    cpu_model,
    file_digest,
    mask,
    versions,
)

DIGEST = "ab" * 32


def collected(environment: dict[str, str] | None = None) -> dict[str, object]:
    return collect(
        digests={"data": DIGEST, "initial_weights": None},
        seeds={"model": 1, "data": 2},
        environment=environment or {},
        accelerators=["H200"],
        time_s=5.0,
    )


def test_it_holds_what_a_repeat_needs_and_can_be_written() -> None:
    found = json.loads(canonical(collected()))
    assert set(found) == {
        "format", "time_s", "digests", "versions", "hardware", "environment", "seeds"
    }  # fmt: skip
    assert found["digests"]["data"] == DIGEST
    assert found["digests"]["initial_weights"] is None
    assert len(found["digests"]["code"]) == 64
    assert found["seeds"] == {"model": 1, "data": 2}
    assert found["versions"]["python"].endswith(platform.python_version())
    assert found["versions"]["torch"][0].isdigit()
    assert found["hardware"]["accelerators"] == ["H200"]
    assert found["hardware"]["memory_bytes"] > 1 << 28
    assert 1 <= found["hardware"]["cores_usable"] <= found["hardware"]["cores"]


def test_a_digest_that_is_none_is_refused() -> None:
    for wrong in ("", "abc", DIGEST.upper(), DIGEST + "0"):
        with pytest.raises(ValueError, match="digest of data"):
            collect(digests={"data": wrong}, seeds={}, environment={}, time_s=0.0)


def test_nothing_names_the_machine_the_person_or_a_path() -> None:
    text = canonical(collected()).decode()
    for private in filter(None, (platform.node(), str(Path.home()), str(Path.cwd()))):
        assert private not in text
    user = getpass.getuser()
    assert user not in json.loads(text)["environment"].values()


def test_only_listed_variables_are_taken() -> None:
    environment = {
        "OMP_NUM_THREADS": "2",
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "HOME": "/home/ana",
        "MASTER_ADDR": "10.0.0.7",
        "HOSTNAME": "node-7",
        "SECRET": "x",
    }
    assert collected(environment)["environment"] == {"OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnop",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "sk-proj-0123",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.e30.x",
        "https://ana:word@example.org",
        "-----BEGIN PRIVATE KEY-----",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "0f" * 16,
    ],
)
def test_a_value_that_looks_like_a_secret_is_masked_even_in_a_listed_variable(secret: str) -> None:
    environment = {"NCCL_ALGO": secret, "GLOO_SOCKET_IFNAME": f"lo,{secret}"}
    for value in allowed_environment(environment).values():
        assert secret not in value
        assert value.startswith("<masked, ")


@pytest.mark.parametrize(
    "plain",
    [
        "",
        "2",
        "0,1,2,3,4,5,6,7",
        ":4096:8",
        "granularity=fine,compact,1,0",
        "expandable_segments:True",
        "garbage_collection_threshold:0.8,max_split_size_mb:512",
        "eth0,eth1",
        "Ring",
        "DETAIL",
    ],
)
def test_the_values_that_these_variables_really_have_stay_readable(plain: str) -> None:
    assert mask(plain) == plain


def test_the_list_of_variables_holds_no_name_of_a_secret_or_a_place() -> None:
    for name in VARIABLES:
        for word in ("TOKEN", "SECRET", "PASS", "CREDENTIAL", "ADDR", "HOST", "HOME", "PATH"):
            assert word not in name


def test_the_code_digest_sees_every_source_file_its_name_and_nothing_else(tmp_path: Path) -> None:
    def tree(name: str, files: dict[str, str]) -> str:
        for path, text in files.items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        return code_digest(tmp_path / name)

    base = {"a.py": "x = 1\n", "room/b.py": "y = 2\n", "room/data.toml": "z = 3\n"}
    expected = hashlib.sha256()
    for path, text in sorted(base.items()):
        expected.update(f"{path}\n{len(text)}\n{text}".encode())
    first = tree("one", base)
    assert first == expected.hexdigest()
    noise = {"__pycache__/a.cpython-311.pyc": "!", "notes.md": "?", "__pycache__/c.py": "?"}
    assert tree("two", {**base, **noise}) == first
    others = [
        tree("three", {**base, "a.py": "x = 2\n"}),
        tree("four", {**base, "new.py": ""}),
        tree("five", {"a.py": "x = 1\n", "b.py": "y = 2\n", "room/data.toml": "z = 3\n"}),
        tree("six", {**base, "room/data.toml": "z = 4\n"}),
        tree("seven", {**base, "a.py": "", "room/b.py": "x = 1\ny = 2\n"}),
    ]
    assert len({first, *others}) == 6


def test_a_file_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000
    (tmp_path / "file").write_bytes(content)
    assert file_digest(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert versions(["surely-not-installed"])["surely-not-installed"] is None


def test_the_cpu_model_is_read_from_its_table() -> None:
    table = "processor\t: 0\nvendor_id\t: X\nmodel name\t: Fast CPU @ 3 GHz\n\nprocessor\t: 1\n"
    assert cpu_model(table) == "Fast CPU @ 3 GHz"
    assert cpu_model("") == ""


def test_evidence_does_not_import_torch() -> None:
    rooms = "ledger, record, provenance, chain, canonical"
    code = f"import sys; from reparto.evidence import {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
