"""Bytes that a run moved and held, beside what the arithmetic said before it began.

    python docs/pictures/measured.py RUN_DIR ...

For each run, rank 0: the payload of every kind of message in step 2 from trace/rank-0.json against
what `reparto plan --show` says of the plan, and likewise the bytes of state from the ledger's
partition record. Prints Markdown, which the strategy pages quote. Equal means to the byte.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from reparto.config.model import ModelConfig
from reparto.config.run import Run, read_run
from reparto.partition.activations import decoder_flow
from reparto.partition.show import RankView, decoder_map, view_rank

Key = tuple[str, str]


def expected_of(run: Run, model: ModelConfig) -> RankView:
    """What rank 0 holds and sends under the run's plan."""
    plan, data = run.partition, run.data
    sequences = -(-data.batch_size // (plan.data * plan.num_microbatches))
    return view_rank(
        decoder_map(model, sequence_length=data.sequence_length),
        plan,
        0,
        flow=decoder_flow(model, tokens=sequences * data.sequence_length),
    )


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
    view = expected_of(run, run.model.resolved(vocabulary))
    expected: Counter[Key] = Counter()
    for what, operation, _, _, _, payload_bytes, _ in view.message_sums():
        expected[what, operation] += payload_bytes
    times, payload = recorded(run_dir)
    print(f"\n`{run.partition.text}`\n")
    print("| message | times a step | arithmetic, bytes | recorded, bytes | |")
    print("|---|---|---|---|---|")
    for key in payload:
        same = "equal" if expected[key] == payload[key] else ""
        print(f"| {' '.join(key)} | {times[key]} | {expected[key]:,} | {payload[key]:,} | {same} |")
    state, found = view.state, held(run_dir)
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
