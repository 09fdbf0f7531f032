"""A model whose training state no worker may hold, trained by workers that hold an eighth of it.

    python examples/beyond_one_device/run.py
    python examples/beyond_one_device/run.py --limit-gb 0.7 --steps 40 --folder runs/beyond

Every worker process has a memory limit that the kernel enforces (`compute.memory_gb`). Three plans
meet it:

    data=1               refused before anything starts: the state alone is larger than the limit
    pipeline=2           half of the state fits by arithmetic, but not with the process around it:
                         the kernel says no, and the worker says what it held
    data=2,tensor=2,...  matrices and layers cut, and the rest shared by two: it trains

The limit is a stand-in for the memory of an accelerator. It also holds for what is not state:
activations, message buffers, python and torch themselves (about 180 MiB a process).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PLANS = (
    "data=1",
    "pipeline=2,num_microbatches=2",
    "data=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=2",
)
SETTINGS = (
    "model.preset=50m", "model.vocab_size=4096",
    "data.source=python-stdlib", "data.tokenizer=bytes", "data.max_bytes=100000",
    "data.sequence_length=64", "data.batch_size=4",
    "compute.threads=1",
    "synchronize.learning_rate=5e-4", "synchronize.learning_rate_schedule=constant",
    # one checkpoint, at the end; written without a second copy of the state
    "recover.checkpoint_every=0", "recover.background=false", "recover.max_restarts=0",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one plan."""

    plan: str
    workers: int
    state_mib: float
    "weights, gradients and optimizer of the fullest worker, by arithmetic"
    peak_mib: float | None
    "private memory of the fullest worker, measured; None: nothing was started"
    losses: tuple[float, ...]
    "of every step; empty if it did not train"
    exit_status: int
    told: str
    "what it said when it did not train"


def reparto(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one verb of the command line."""
    return subprocess.run(
        [sys.executable, "-m", "reparto", *arguments, "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def as_options(settings: Sequence[str]) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


def state_mib(plan: str) -> tuple[int, float]:
    """(workers, MiB of the fullest one) by the arithmetic of `plan --show`."""
    done = reparto("plan", "--show", plan, *as_options(SETTINGS))
    if done.returncode:
        raise SystemExit(done.stderr)
    shown = json.loads(done.stdout.splitlines()[-1])
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    fullest = max(sum(rank[part] for part in parts) for rank in shown["ranks"])
    return shown["world_size"], fullest / (1 << 20)


def attempt(plan: str, folder: Path, *, limit_gb: float, steps: int) -> Row:
    """Train under one plan and the limit."""
    workers, needed = state_mib(plan)
    limit = [f"compute.memory_gb={limit_gb}"]
    done = reparto(
        "train", "--plan", plan, "--steps", str(steps), "--run-dir", str(folder),
        *as_options([*SETTINGS, *limit]),
    )  # fmt: skip
    peak, losses, told = None, [], ""
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
        peak = max(found["peak_memory_bytes"]) / (1 << 20)
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(row)["loss"] for row in rows]
    else:
        told = done.stderr[done.stderr.rfind("reparto: ") :].strip()
        held = re.search(r"it held up to ([\d.]+) MiB", told)
        peak = float(held[1]) if held else None
    return Row(
        plan=plan, workers=workers, state_mib=needed, peak_mib=peak, losses=tuple(losses),
        exit_status=done.returncode, told=told,
    )  # fmt: skip


def table(rows: Sequence[Row], limit_gb: float) -> str:
    wide = max(len(row.plan) for row in rows)
    lines = [
        f"limit of a worker: {limit_gb * 1024:.0f} MiB of private memory, "
        "python and torch included",
        f"{'plan':{wide}}  workers  state MiB  peak MiB  outcome",
    ]
    for row in rows:
        peak = f"{row.peak_mib:.0f}" if row.peak_mib is not None else "-"
        outcome = (
            f"trains: loss {row.losses[0]:.3f} -> {row.losses[-1]:.3f} in {len(row.losses)} steps"
            if row.losses
            else f"exit {row.exit_status}: "
            + ("refused before it starts" if row.exit_status == 2 else "stopped by the limit")
        )
        lines.append(
            f"{row.plan:{wide}}  {row.workers:7}  {row.state_mib:9.0f}  {peak:>8}  {outcome}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-gb", type=float, default=0.6, help="GiB of one worker")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch)
        for number, plan in enumerate(PLANS):
            print(f"-- {plan}", file=sys.stderr)
            row = attempt(
                plan, folder / f"plan-{number}", limit_gb=asked.limit_gb, steps=asked.steps
            )
            if row.told:
                print(row.told, file=sys.stderr)
            rows.append(row)
    print(table(rows, asked.limit_gb))
    if asked.json:
        print(json.dumps({"limit_gb": asked.limit_gb, "rows": [vars(row) for row in rows]}))
    if not rows[-1].losses:
        raise SystemExit(rows[-1].exit_status)


if __name__ == "__main__":
    main()
