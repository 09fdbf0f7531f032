"""Every block of docs/api.md runs and prints what it says; the Spanish page has the same code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reparto

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(folder: Path, name: str) -> str:
    done = subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_languages_have_the_same_code() -> None:
    assert blocks("api.md") == blocks("api.es.md")
    assert len(blocks("api.md")) >= 8


def test_every_public_name_is_imported_in_an_example() -> None:
    code = "\n".join(blocks("api.md"))
    imported = {
        name.strip()
        for line in re.findall(r"^from reparto import (.*)$", code, re.MULTILINE)
        for name in line.split(",")
    }
    assert imported == set(reparto.__all__)


def test_blocks_print_what_they_say(tmp_path: Path) -> None:
    """All but the first as one script, in the order of the page; the first is its `train.py`."""
    first, *others = blocks("api.md")
    (tmp_path / "train.py").write_text(first, encoding="utf-8")
    (tmp_path / "page.py").write_text(
        "from train import launch\n" + "\n".join(others), encoding="utf-8"
    )
    said = re.findall(r"^.*print\(.*\)  # (.*)$", "\n".join(others), re.MULTILINE)
    assert len(said) >= 12
    assert run(tmp_path, "page.py").splitlines() == said
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_script_trains_on_two_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("api.md")[0], encoding="utf-8")
    lines = run(tmp_path, "train.py").splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["20", "40"]
    assert "'count': 120" in lines[-1]
