"""One rank of `reparto verify`: as a thread of the command, or as a process of its own.

    python -m reparto.cli.verify_rank FOLDER ROLE

FOLDER holds question.json. The rank 0 of role `reference` writes step-N.safetensors; all ranks of
role `tested` read them, and its rank 0 writes result.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from reparto.comm.backend import file_store, finish_process_group
from reparto.comm.fake import FakeWorld, run_threads
from reparto.comm.mesh import Mesh, fake_mesh, join_mesh, single_mesh
from reparto.config.model import ModelConfig
from reparto.config.plan import Plan
from reparto.config.run import Synchronize
from reparto.data.prepare import open_prepared
from reparto.partition.grid import Grid
from reparto.trace import Ring
from reparto.train.compare import Question, StepRecord, SyntheticText, run_steps
from reparto.train.routes import Routes

#: seconds a collective may take in `verify`
_TIMEOUT_S = 120.0
_ROUTES = ("numbers_T", "experts_TK", "margins_T")
_PARTS = ("gradients", "weights", "exp_avg", "exp_avg_sq")


def read_question(folder: Path) -> Question:
    """question.json as values."""
    raw = json.loads((folder / "question.json").read_text())
    model = ModelConfig.model_validate(raw["model"])
    length, batch, steps = raw["sequence_length"], raw["batch_size"], raw["steps"]
    if raw["prepared"] is None:
        dataset = SyntheticText(
            vocab_size=model.vocab_size,
            sequence_length=length,
            samples=batch * (steps + 1),
            seed=raw["seed"],
        )
    else:
        dataset = open_prepared(Path(raw["prepared"])).train_dataset()  # type: ignore[assignment]
    return Question(
        model=model,
        source=raw["source"],
        dataset=dataset,
        sequence_length=length,
        batch_size=batch,
        steps=steps,
        seed=raw["seed"],
        precision=raw["precision"],
        synchronize=Synchronize.model_validate(raw["synchronize"]),
    )


def run_rank(folder: Path, plan: Plan, role: str, mesh: Mesh) -> None:
    """This rank's part of either role."""
    question = read_question(folder)
    if role == "reference":

        def keep(step: int, record: StepRecord) -> None:
            if mesh.rank == 0:
                _write(folder, step, record)

        run_steps(question, plan, mesh, reference=None, keep=keep)
        return
    records: dict[int, StepRecord] = {}

    def reference(step: int) -> StepRecord:
        if step not in records:
            records.clear()
            records[step] = _read(folder, step)
        return records[step]

    found = run_steps(question, plan, mesh, reference=reference, keep=None)
    if mesh.rank == 0:
        body: Mapping[str, object] = {
            "loss_rel": found.loss_rel,
            "grad_rel": found.grad_rel,
            "weight_rel": found.weight_rel,
            "bitwise": found.bitwise,
            "route_flips": found.route_flips,
            "first_departure": found.first,
        }
        (folder / "result.json").write_text(json.dumps(body))


def _write(folder: Path, step: int, record: StepRecord) -> None:
    tensors = {"loss": torch.tensor(record.loss, dtype=torch.float64)}
    for part in _PARTS:
        for name, tensor in getattr(record, part).items():
            tensors[f"{part}/{name}"] = tensor.contiguous()
    for layer, routes in record.routes.items():
        for what in _ROUTES:
            tensors[f"routes/{layer}/{what}"] = getattr(routes, what).contiguous()
    save_file(tensors, str(folder / f"step-{step}.safetensors"))


def _read(folder: Path, step: int) -> StepRecord:
    tensors = load_file(str(folder / f"step-{step}.safetensors"))
    parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in _PARTS}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        if part in parts:
            parts[part][name] = tensor
    layers = sorted(int(key.split("/")[1]) for key in tensors if key.endswith("/numbers_T"))
    routes = {layer: Routes(**{what: tensors[f"routes/{layer}/{what}"] for what in _ROUTES})
              for layer in layers}  # fmt: skip
    return StepRecord(loss=float(tensors["loss"]), routes=routes, **parts)


def run_here(folder: Path, plan: Plan, role: str) -> None:
    """All ranks as threads of this process; one rank runs in the calling thread."""
    torch.set_num_threads(1)
    grid = Grid.of(plan)
    if plan.world_size == 1:
        run_rank(folder, plan, role, single_mesh())
        return

    def rank_thread(rank: int, world: FakeWorld) -> None:
        ring = Ring(None, rank=rank, capacity=8192)
        run_rank(folder, plan, role, fake_mesh(grid, rank, world=world, ring=ring))

    run_threads(plan.world_size, rank_thread)


def main() -> None:
    """Run as a process of its own."""
    from reparto.cli.worker import last_words
    from reparto.recover.worker import leave_with_parent

    folder, role = Path(sys.argv[1]), sys.argv[2]
    control = folder / role / "control"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = json.loads((control / "start.json").read_text())
    leave_with_parent(int(start["supervisor_pid"]))
    (control / f"rank-{rank}.pid").write_text(str(os.getpid()))
    try:
        torch.set_num_threads(int(start["threads"]))
        plan = Plan.parse(start["plan"])
        ring = Ring(control / f"rank-{rank}.ring", rank=rank)
        store = file_store(str(control / "generation-1" / "workers"), world_size)
        mesh = join_mesh(
            Grid.of(plan), rank, backend="auto", store=store, ring=ring, timeout_s=_TIMEOUT_S
        )
        run_rank(folder, plan, role, mesh)
        mesh.world.barrier(tag="end").wait()
        finish_process_group()
    except BaseException as error:
        last_words(control, rank, error)
        os._exit(4)


if __name__ == "__main__":
    main()
