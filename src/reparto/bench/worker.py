"""One worker of a benchmark: `python -m reparto.bench.worker FOLDER`.

FOLDER/question.json says what to compare; rank 0 leaves FOLDER/seconds.json. With `memory` the only
contestant makes a few steps, and what is kept is the peak of resident memory in steady state:
VmHWM, reset after the first step, so that building the model does not count.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from reparto.bench import contestants, pipeline_peers, tensor_peers
from reparto.bench.protocol import Contestant, run_rounds
from reparto.comm.backend import file_store, finish_process_group
from reparto.comm.mesh import Mesh, join_mesh
from reparto.config.model import preset
from reparto.config.plan import Plan
from reparto.partition.grid import Grid
from reparto.recover.supervise import write_error
from reparto.recover.worker import leave_with_parent
from reparto.trace import Ring

_TIMEOUT_S = 300.0


def main() -> None:
    """Run as one rank; rank 0 writes the result."""
    folder = Path(sys.argv[1])
    control = folder / "control"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    question = json.loads((folder / "question.json").read_text())
    leave_with_parent(int(question["supervisor_pid"]))
    (control / f"rank-{rank}.pid").write_text(str(os.getpid()))
    try:
        torch.set_num_threads(1)
        generation = int((control / "generation").read_text())
        store = file_store(str(control / f"generation-{generation}" / "workers"), world_size)
        plan = Plan.parse(question["plan"])
        ring = Ring(control / f"rank-{rank}.ring", rank=rank)
        mesh = join_mesh(
            Grid.of(plan), rank, backend="auto", store=store, ring=ring, timeout_s=_TIMEOUT_S
        )
        workload = contestants.Workload(
            config=preset(question["model"]),
            sequences=question["sequences"],
            sequence_length=question["sequence_length"],
            num_microbatches=question["num_microbatches"],
        )
        entries = [_one(name, workload, mesh, plan) for name in question["contestants"]]
        if question["memory"]:
            found: object = _steady_peak_bytes(entries[0], question["steps"])
        else:
            found = run_rounds(
                entries,
                rounds=question["rounds"],
                steps=question["steps"],
                barrier=dist.barrier,
                rank=rank,
                tell=_tell(folder, rank),
            )
        dist.barrier()
        if rank == 0:
            (folder / "seconds.json").write_text(json.dumps(found))
        finish_process_group()
    except BaseException as error:
        write_error(control, rank, {"kind": type(error).__name__, "message": repr(error),
                                    "exit_code": 4})  # fmt: skip
        raise


def _one(name: str, workload: contestants.Workload, mesh: Mesh, plan: Plan) -> Contestant:
    """`ours`, `ours:SCHEDULE`, or a peer of the tables."""
    kind, _, schedule = name.partition(":")
    if kind == "ours":
        if schedule:
            plan = Plan.parse(f"{plan.text},schedule={schedule}")
        return contestants.ours(workload, mesh, plan, name)
    peers = {**contestants.PEERS, **tensor_peers.PEERS, **pipeline_peers.PEERS}
    return peers[name](workload, mesh, plan)


def _tell(folder: Path, rank: int) -> Callable[[str], None]:
    def tell(words: str) -> None:
        if rank == 0:
            with open(folder / "progress", "a", encoding="utf-8") as file:
                file.write(words + "\n")

    return tell


def _steady_peak_bytes(one: Contestant, steps: int) -> int:
    one.step()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(steps):
        one.step()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell VmHWM")


if __name__ == "__main__":
    main()
