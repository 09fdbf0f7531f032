"""Bytes that a run moved and held, beside what the arithmetic said before it began.

    python docs/pictures/measured.py RUN_DIR ...

For each run, rank 0: the payload of every kind of message in step 2 from trace/rank-0.json against
`reduction_messages` and `word_messages`, and the bytes of state from the ledger's partition record
against `state_bytes`. Prints Markdown, which the strategy pages quote. Equal means to the byte.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from strategies import blocks_of

from reparto.config.model import ModelConfig, parameter_shapes
from reparto.config.run import Run, read_run
from reparto.partition.flat import FlatLayout
from reparto.partition.volume import (
    reduction_messages,
    state_bytes,
    unit_layouts,
    word_messages,
)

Key = tuple[str, str]


def layouts_of(run: Run, model: ModelConfig) -> tuple[list[FlatLayout], list[bool]]:
    """The flat layouts of the run's plan, and which are kept from forward to backward."""
    shapes = parameter_shapes(model)
    taken: set[str] = set()
    blocks = []
    for names in blocks_of(model):
        blocks.append({name: shapes[name] for name in names if name not in taken})
        taken.update(names)
    filled = [block for block in blocks if block]
    layouts = unit_layouts(filled, plan=run.partition, gradient_bytes=4)
    last = set(blocks_of(model)[-1])
    return layouts, [any(slot.name in last for slot in one.slots) for one in layouts]


def recorded(run_dir: Path, step: int = 2) -> tuple[Counter[Key], Counter[Key]]:
    """Times and payload bytes of rank 0's messages in one step, by what and operation."""
    times: Counter[Key] = Counter()
    payload: Counter[Key] = Counter()
    events = json.loads((run_dir / "trace" / "rank-0.json").read_text())["traceEvents"]
    for event in events:
        args = event.get("args", {})
        if event["ph"] == "X" and args.get("step") == step and "op" in args:
            key = (event["name"].split()[0], args["op"])
            times[key] += 1
            payload[key] += args["payload_bytes"]
    return times, payload


def held(run_dir: Path) -> Mapping[str, float]:
    """What the run says in its partition record that rank 0 held."""
    for line in (run_dir / "ledger.jsonl").read_text().splitlines():
        body = json.loads(line)["body"]
        if body.get("stage") == "partition":
            resources: Mapping[str, float] = body["resources"]
            return resources
    raise SystemExit(f"{run_dir} has not ended, so it has no partition record")


def tell(run_dir: Path) -> None:
    """Print one run."""
    run = read_run(run_dir / "run.toml")
    manifest = sorted((run_dir / "checkpoints").glob("step-*"))[-1] / "manifest.json"
    shapes = json.loads(manifest.read_text())["tensors"]
    vocabulary = shapes["model.embed_tokens.weight"]["shape"][0]
    layouts, kept = layouts_of(run, run.model.resolved(vocabulary))
    expected: Counter[Key] = Counter()
    messages = reduction_messages(layouts, plan=run.partition, kept=kept)
    for one in [*messages, *word_messages(run.partition.world_size)]:
        expected[one.what, one.operation] += one.total_payload_bytes
    times, payload = recorded(run_dir)
    print(f"\n`{run.partition.text}`\n")
    print("| message | times a step | arithmetic, bytes | recorded, bytes | |")
    print("|---|---|---|---|---|")
    for key in payload:
        same = "equal" if expected[key] == payload[key] else ""
        print(f"| {' '.join(key)} | {times[key]} | {expected[key]:,} | {payload[key]:,} | {same} |")
    state, found = state_bytes(layouts, plan=run.partition), held(run_dir)
    print("\n| state | arithmetic, bytes | held, bytes | |")
    print("|---|---|---|---|")
    rows: Sequence[tuple[str, int, str]] = (
        ("weights", state.parameters, "parameter_bytes"),
        ("gradients, at their peak", state.gradients, "gradient_peak_bytes"),
        ("moments", state.optimizer, "optimizer_bytes"),
    )
    for words, size, name in rows:
        same = "equal" if size == found[name] else ""
        print(f"| {words} | {size:,} | {int(found[name]):,} | {same} |")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        tell(Path(name))
