"""A tiny real run for the tests of the command line: real text, real processes, a few seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "reparto" / "partition"

RUN = f"""
name = "tiny"
owner = "the tests"
seed = 3
steps = 12

[model]
preset = "1m"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2

[data]
source = "text"
paths = ["{SOURCE}"]
tokenizer = "bytes"
sequence_length = 32
batch_size = 6
max_bytes = 40000

[partition]
data = 2
shard = "parameters"

[recover]
checkpoint_every = 4
"""


def reparto(
    *arguments: str, cache: Path, timeout_s: float = 180.0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command and wait for it, bounded in time."""
    return subprocess.run(
        [sys.executable, "-m", "reparto", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        cwd=cwd,
        check=False,
    )


def start(*arguments: str, cache: Path) -> subprocess.Popen[str]:
    """Run the command in the background, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "reparto", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        start_new_session=True,
    )


def answer(done: subprocess.CompletedProcess[str]) -> Mapping[str, object]:
    """The JSON object in the last line of stdout."""
    assert done.returncode == 0, done.stderr
    found: Mapping[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(run_dir: Path) -> Sequence[Mapping[str, float]]:
    """The rows of metrics.jsonl."""
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir)]
