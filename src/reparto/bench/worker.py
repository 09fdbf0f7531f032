"""One worker of a benchmark: `python -m reparto.bench.worker FOLDER`.

FOLDER/question.json says what to do, FOLDER/answer-RANK.json what came out. Its `kind`:

    race      contestants in interleaved rounds: seconds a step
    memory    the only contestant makes a few steps: the peak of resident memory in steady state
              (VmHWM, reset after the first step, so that building the model does not count)
    sleep     pipelines whose stages sleep: when each action began and ended
    training  the same of a real model
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from reparto.bench import contestants, pipeline_peers, synthetic, tensor_peers
from reparto.bench.protocol import Contestant, run_rounds
from reparto.comm.backend import file_store, finish_process_group
from reparto.comm.mesh import Mesh, join_mesh
from reparto.config.model import preset
from reparto.config.plan import Plan
from reparto.parallel.compose import schedule_of
from reparto.partition.grid import Grid
from reparto.recover.supervise import write_error
from reparto.recover.worker import leave_with_parent
from reparto.trace import Ring

_TIMEOUT_S = 300.0


def main() -> None:
    """Run as one rank."""
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
        answer = _ANSWERS[question["kind"]](question, mesh, plan, _tell(folder, rank))
        dist.barrier()
        (folder / f"answer-{rank}.json").write_text(json.dumps(answer))
        finish_process_group()
    except BaseException as error:
        write_error(control, rank, {"kind": type(error).__name__, "message": repr(error),
                                    "exit_code": 4})  # fmt: skip
        raise


Question = Mapping[str, Any]
Tell = Callable[[str], None]


def _workload(question: Question) -> contestants.Workload:
    return contestants.Workload(
        config=preset(question["model"]),
        sequences=question["sequences"],
        sequence_length=question["sequence_length"],
        num_microbatches=question["num_microbatches"],
    )


def _race(question: Question, mesh: Mesh, plan: Plan, tell: Tell) -> object:
    workload = _workload(question)
    return run_rounds(
        [_one(name, workload, mesh, plan) for name in question["contestants"]],
        rounds=question["rounds"],
        steps=question["steps"],
        barrier=dist.barrier,
        rank=mesh.rank,
        tell=tell,
    )


def _memory(question: Question, mesh: Mesh, plan: Plan, tell: Tell) -> object:
    one = _one(question["contestants"][0], _workload(question), mesh, plan)
    return _steady_peak_bytes(one, question["steps"])


def _sleep(question: Question, mesh: Mesh, plan: Plan, tell: Tell) -> object:
    naps = synthetic.Naps(**question["naps"])
    found = {}
    for name in question["schedules"]:
        schedule = schedule_of(plan.model_copy(update={"schedule": name}))
        found[name] = _spans(synthetic.spans_of_sleep(schedule, mesh, naps, question["rounds"]))
        tell(f"pipeline={plan.pipeline},schedule={name} asleep")
    return found


def _training(question: Question, mesh: Mesh, plan: Plan, tell: Tell) -> object:
    workload = _workload(question)
    found = {}
    for name in question["schedules"]:
        named = plan.model_copy(update={"schedule": name})
        found[name] = _spans(synthetic.spans_of_training(workload, mesh, named, question["rounds"]))
        tell(f"{named.text} with {question['model']}")
    return found


def _spans(found: tuple[list[synthetic.Spans], int]) -> object:
    return {"steps": [asdict(one) for one in found[0]], "peak_live": found[1]}


_ANSWERS: Mapping[str, Callable[[Question, Mesh, Plan, Tell], object]] = MappingProxyType(
    {"race": _race, "memory": _memory, "sleep": _sleep, "training": _training}
)


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
