"""Eight workers in two racks with a slow link between: which axis crosses it decides the pace.

    sudo python examples/two_racks/run.py
    sudo python examples/two_racks/run.py --rate-mbit 1000 --steps 40 --json

    good         pipeline=2,data=2,tensor=2, a rack for each pipeline stage: activations cross
    naive place  the same plan, ranks dealt out rack by rack: both ranks of a tensor pair are apart
    naive data   data=8: every gradient crosses

What crossed is read twice: from the recorder of the workers (payload of the groups that have
members in both racks) and from the kernel's counter of the link (bytes on it, headers included).

Exit status: 0 done; 3 a tensor-parallel byte crossed the link under the good placement; 5 no racks
can be made here (it takes root and iproute2); 4 a training failed; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from racks import Racks, two_racks, why_not

EXIT_CHECK, EXIT_FAILED, EXIT_NO_RACKS = 3, 4, 5
PLAN = "data=2,tensor=2,pipeline=2,num_microbatches=4"
#: (label, plan, communicate.placement)
CASES = (
    ("good placement", PLAN, "block"),
    ("naive placement", PLAN, "cyclic"),
    ("naive data parallel", "data=8", "block"),
)
SETTINGS = (
    "model.preset=10m",
    "data.source=python-stdlib", "data.tokenizer=bytes", "data.max_bytes=100000",
    "data.sequence_length=64", "data.batch_size=8",
    "compute.threads=1",
    "recover.checkpoint_every=0", "recover.background=false", "recover.max_restarts=0",
)  # fmt: skip
#: steps at the start that are not timed: connections and first allocations
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training over both racks."""

    label: str
    plan: str
    placement: str
    step_s: tuple[float, float, float]
    "quartiles of the time of a step"
    tensor_bytes: float
    "payload a step of tensor-parallel groups with ranks in both racks, over all ranks"
    group_bytes: dict[str, float]
    "payload a step by group, of groups with ranks in both racks"
    link_bytes: float
    "bytes a step on the link, start and end of the run included"
    loss: float
    "of the last step"


def train(racks: Racks, folder: Path, case: tuple[str, str, str], steps: int, port: int) -> Case:
    """Both racks' commands, side by side. Raises `SystemExit` with what a rack said."""
    label, plan, placement = case
    command = [
        sys.executable, "-m", "reparto", "train", "--plan", plan, "--steps", str(steps),
        "--run-dir", str(folder), "--nodes", "2", "--rendezvous", f"{racks.address}:{port}",
        "--json",
    ]  # fmt: skip
    for one in (*SETTINGS, f"communicate.placement={placement}"):
        command += ["--set", one]
    before = racks.bytes_sent()
    started = [
        subprocess.Popen(
            racks.inside(rack, [*command, "--node-rank", str(rack)]),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for rack in (0, 1)
    ]  # fmt: skip
    try:
        told = [one.communicate() for one in started]
    finally:
        for one in started:  # on Ctrl-C: workers leave with their supervisor
            if one.poll() is None:
                one.kill()
                one.wait()
    for one, (_, errors) in zip(started, told, strict=True):
        if one.returncode:
            print(errors, file=sys.stderr)
            raise SystemExit(EXIT_FAILED)
    sent = racks.bytes_sent() - before
    found = json.loads(told[0][0].splitlines()[-1])
    crossed = {
        row["group"]: row["payload_bytes"] for row in found["traffic"] if row["link"] == "network"
    }
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [row["step_s"] for row in rows[WARM_UP:]]
    q1, median, q3 = statistics.quantiles(timed, n=4)
    return Case(
        label=label, plan=plan, placement=placement, step_s=(q1, median, q3),
        tensor_bytes=crossed.get("tensor", 0.0), group_bytes=crossed, link_bytes=sent / steps,
        loss=found["loss"],
    )  # fmt: skip


def table(cases: Sequence[Case], rate_mbit: float) -> str:
    lines = [
        f"link between the racks: {rate_mbit:g} Mbit/s each way; bytes are MB a step",
        f"{'':20} {'step s (q1, q3)':>22} {'slower':>7} {'tensor':>8} {'groups':>8} {'link':>8}"
        "  crossing groups",
    ]
    for one in cases:
        q1, median, q3 = one.step_s
        spread = f"{median:.3f} ({q1:.3f}, {q3:.3f})"
        groups = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in one.group_bytes.items())
        lines.append(
            f"{one.label:20} {spread:>22} {median / cases[0].step_s[1]:6.2f}x "
            f"{one.tensor_bytes / 1e6:8.2f} {sum(one.group_bytes.values()) / 1e6:8.2f} "
            f"{one.link_bytes / 1e6:8.2f}  {groups}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="speed of the link")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    asked = parser.parse_args()
    if asked.steps < WARM_UP + 3:
        parser.error(f"--steps: {asked.steps}; at least {WARM_UP + 3}, of which {WARM_UP} warm up")
    missing = why_not()
    if missing:
        print(f"no racks here: {missing}", file=sys.stderr)
        raise SystemExit(EXIT_NO_RACKS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as scratch, two_racks(rate_mbit=asked.rate_mbit) as racks:
        folder = asked.folder or Path(scratch)
        for number, case in enumerate(CASES):
            print(f"-- {case[0]}: {case[1]}", file=sys.stderr)
            run_dir = folder / f"case-{number}"
            cases.append(train(racks, run_dir, case, asked.steps, 29600 + number))
    print(table(cases, asked.rate_mbit))
    if asked.json:
        body = {"rate_mbit": asked.rate_mbit, "cases": [vars(one) for one in cases]}
        print(json.dumps(body))
    if cases[0].tensor_bytes:
        raise SystemExit(EXIT_CHECK)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the racks are gone by now
        sys.exit(128 + signal.SIGINT)
