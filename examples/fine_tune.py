"""Start from weights: train a little on one text, export, and go on with another.

    python examples/fine_tune.py
    python examples/fine_tune.py --steps 1000 --folder runs/tuned      # closer to a real training

    1 pre-train   on the Python library that is on this machine, over two workers
    2 export      as a Hugging Face folder: config.json, model.safetensors, tokenizer.json
    3 fine-tune   on pairs of a remark and the function it asks for, from those weights
    4 compare     with the same steps on the pairs from fresh weights

Weights from elsewhere come in the same way: `model.weights` and `model.config` name a folder of
safetensors, `data.tokenizer` its tokenizer. Of a pair only the function is learned, not the remark.
After 240 and 30 steps it is predicted to 0.68 nats a token from the exported weights, to 2.45 from
fresh ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

#: (remark, name of the function, what it returns); {a} and {b} are the names of its arguments
TASKS = (
    ("the sum of {a} and {b}", "add", "{a} + {b}"),
    ("the difference of {a} and {b}", "subtract", "{a} - {b}"),
    ("the product of {a} and {b}", "multiply", "{a} * {b}"),
    ("the larger of {a} and {b}", "larger", "max({a}, {b})"),
    ("whether {a} is equal to {b}", "equal", "{a} == {b}"),
    ("a list of {a} and {b}", "pair", "[{a}, {b}]"),
    ("the text of {a} followed by that of {b}", "join", "str({a}) + str({b})"),
    ("{a} if it is true and {b} otherwise", "either", "{a} or {b}"),
)
NAMES = ("first", "second", "left", "right", "value", "other", "name", "path", "key", "data",
         "item", "self")  # fmt: skip


def write_pairs(path: Path) -> int:
    """One JSON object a line, prompt and completion; returns how many."""
    pairs = [
        {"prompt": f"# {remark.format(a=a, b=b)}\n",
         "completion": f"def {name}({a}, {b}):\n    return {result.format(a=a, b=b)}\n"}
        for (remark, name, result), (a, b) in itertools.product(
            TASKS, itertools.permutations(NAMES, 2))
    ]  # fmt: skip
    random.Random(1).shuffle(pairs)
    path.write_text("".join(json.dumps(one) + "\n" for one in pairs), encoding="utf-8")
    return len(pairs)


def reparto(*arguments: str) -> dict[str, object]:
    """Run one verb; its last line of output is its result."""
    done = subprocess.run(
        [sys.executable, "-m", "reparto", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def settings(values: Mapping[str, object]) -> list[str]:
    """`--set key=value` for each, with values as TOML writes them."""
    return [part for key, one in values.items() for part in ("--set", f"{key}={json.dumps(one)}")]


def train(run_dir: Path, plan: str, steps: int, values: Mapping[str, object]) -> float:
    """Train and return the loss on documents that were held out, nats a token."""
    found = reparto("train", "--plan", plan, "--steps", str(steps), "--run-dir", str(run_dir),
                    *settings(values))  # fmt: skip
    return float(str(found["validation_loss"]))


def main() -> None:
    """The four steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=240, help="to pre-train; to tune, an eighth")
    parser.add_argument("--plan", default="data=2,shard=parameters")
    parser.add_argument("--folder", help="for runs and weights; default a temporary one")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reparto-tune-") as passing:
        folder = Path(chosen.folder or passing)
        folder.mkdir(parents=True, exist_ok=True)
        library = {
            "model.preset": "1m",
            "data.max_bytes": 1 << 21,
            "data.vocab_size": 512,
            "data.sequence_length": 64,
        }
        before = train(folder / "pretrain", chosen.plan, chosen.steps, library)

        exported = folder / "weights"
        reparto("checkpoint", "export", str(folder / "pretrain"), str(exported))

        count = write_pairs(folder / "pairs.jsonl")
        pairs: dict[str, object] = {
            "model.config": str(exported / "config.json"),
            "data.source": "jsonl",
            "data.paths": [str(folder / "pairs.jsonl")],
            "data.record": "prompt",
            "data.tokenizer": str(exported / "tokenizer.json"),
            "data.packing": "documents",
            "data.sequence_length": 64,
            "data.batch_size": 8,
        }
        few = max(1, chosen.steps // 8)
        tuned = train(folder / "tuned", chosen.plan, few,
                      {**pairs, "model.weights": str(exported)})  # fmt: skip
        fresh = train(folder / "fresh", chosen.plan, few, pairs)
    print(f"pre-trained {chosen.steps} steps on the library: held-out loss {before:.3f}")
    print(f"then {few} steps on {count} pairs, held-out loss a token of the functions:")
    print(f"  from the exported weights {tuned:.3f}")
    print(f"  from fresh weights        {fresh:.3f}")


if __name__ == "__main__":
    main()
