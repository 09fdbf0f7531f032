"""`bench checkpoint`: what a save costs training, beside torch.distributed.checkpoint (DCP).

Two workers train under `data=2,shard=parameters`; weights and both moments are saved. A round is

    steps        some steps without a save
    steps_save   the same with one save in the background, waited for at the end
    steps_again  without a save once more: what the machine alone makes of the difference
    save         our save in the foreground
    dcp          `torch.distributed.checkpoint.save` of the same tensors, fsynced as ours is
    write        the same bytes written and fsynced by both workers, nothing else
    digest       the same bytes hashed by both workers, nothing else

Two verdicts: (steps_save - steps) / dcp is the share of DCP's time that training pays, at most 0.1;
max(write, digest) / save is how near a save is to the slower of the disk and the digest, at least
0.9. Parts take turns in being first, and only parts of one round are compared.

DCP is given plain tensors under names of the rank, so that it plans nothing, copies nothing and
hashes nothing: the form in which it is fastest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from reparto.bench.contestants import SEED, Workload, batches
from reparto.bench.measure import load_of
from reparto.bench.protocol import quartiles
from reparto.bench.run import SIZES
from reparto.checkpoint.background import BackgroundSaver
from reparto.checkpoint.files import CHUNK_BYTES, write_all
from reparto.checkpoint.layout import moment_name
from reparto.checkpoint.save import Saver
from reparto.checkpoint.shards import element_bytes
from reparto.checkpoint.share import writes
from reparto.checkpoint.snapshot import Piece, Snapshot
from reparto.comm.backend import file_store, finish_process_group
from reparto.comm.mesh import Mesh, join_mesh
from reparto.config.model import num_parameters, preset
from reparto.config.plan import Plan
from reparto.config.run import Run, Synchronize
from reparto.data.loader import Microbatch
from reparto.errors import Fault
from reparto.model.transformer import Decoder
from reparto.partition.grid import Grid
from reparto.recover.supervise import Supervisor, write_error
from reparto.recover.worker import leave_with_parent
from reparto.trace import Ring
from reparto.train.state import share_model
from reparto.train.step import Trainer

PLAN = "data=2,shard=parameters"
STEPS = 10
_TIMEOUT_S = 300.0


# --- the asking side -----------------------------------------------------------------------------


def bench_checkpoint(
    model: str,
    rounds: int,
    tell: Callable[[str], None],
    *,
    steps: int = STEPS,
    folder: Path | None = None,
) -> dict[str, object]:
    """Run two workers and weigh what they measured.

    steps   optimizer steps with and without a save that are compared
    folder  where checkpoints are written: choose the disk that is meant; the temporary folder else
    """
    load = load_of(model, SIZES)
    place = Path(tempfile.mkdtemp(prefix="reparto-bench-", dir=folder))
    try:
        seconds, num_bytes = _measure(place, model, rounds, steps, tell)
    finally:
        shutil.rmtree(place, ignore_errors=True)

    def each(value: Callable[[dict[str, float]], float]) -> dict[str, float]:
        rows = [dict(zip(seconds, row, strict=True)) for row in zip(*seconds.values(), strict=True)]
        return quartiles([value(row) for row in rows])

    share = each(lambda row: (row["steps_save"] - row["steps"]) / row["dcp"])
    near = each(lambda row: max(row["write"], row["digest"]) / row["save"])
    return {
        "name": "checkpoint",
        "model": model,
        "rounds": rounds,
        "ratios": {
            "dcp": each(lambda row: row["dcp"] / row["save"]),
            "disk_or_digest": near,
        },
        "aa": each(lambda row: row["steps_again"] / row["steps"]),
        "workload": f"{num_parameters(preset(model))} parameters with both moments in float32, "
        f"{num_bytes} bytes a checkpoint, 2 workers of one thread under {PLAN}, {steps} steps of "
        f"{load.sequences} sequences of {load.sequence_length} tokens a worker",
        "figures": {
            "seconds": {name: quartiles(values)["median"] for name, values in seconds.items()},
            "paid_share_of_dcp": share,
            "paid_share_of_dcp_limit": 0.1,
            "paid_share_of_dcp_by_noise": each(
                lambda row: (row["steps_again"] - row["steps"]) / row["dcp"]
            ),
            "disk_or_digest_limit": 0.9,
            "save_bytes_per_s": num_bytes / quartiles(seconds["save"])["median"],
            "write_bytes_per_s": num_bytes / quartiles(seconds["write"])["median"],
            "digest_bytes_per_s": num_bytes / quartiles(seconds["digest"])["median"],
        },
    }


def _measure(
    folder: Path, model: str, rounds: int, steps: int, tell: Callable[[str], None]
) -> tuple[dict[str, list[float]], int]:
    """Part -> seconds in every round, as rank 0 saw them; and bytes of one checkpoint."""
    for name in ("control", "logs", "out"):
        (folder / name).mkdir(mode=0o700)
    question = {
        "model": model, "rounds": rounds, "steps": steps, "supervisor_pid": os.getpid(),
    }  # fmt: skip
    (folder / "question.json").write_text(json.dumps(question))
    supervisor = Supervisor(
        folder,
        world_size=2,
        arguments=["-m", "reparto.bench.checkpoint", str(folder)],
        environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    told = 0
    try:
        supervisor.start()
        while supervisor.alive:
            supervisor.wait(0.2)
            lines = _lines(folder / "progress")
            for line in lines[told:]:
                tell(line)
            told = len(lines)
        outcome = supervisor.outcome()
        if not outcome.ok:
            cause = outcome.failures[0]
            raise Fault(f"bench: rank {cause.rank}: {cause.message}")
    except BaseException:
        supervisor.kill()
        raise
    found = json.loads((folder / "seconds.json").read_text())
    return found["seconds"], found["bytes"]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# --- a worker ------------------------------------------------------------------------------------


class Subject:
    """A model in training, and what this rank saves of it."""

    def __init__(self, workload: Workload, mesh: Mesh, plan: Plan) -> None:
        run = Run(
            seed=SEED,
            steps=100_000,
            partition=plan,
            synchronize=Synchronize(learning_rate=1e-3, warmup_steps=0, clip_norm=1.0),
        )
        self._mesh = mesh
        self._parallel, chain = share_model(
            run, Decoder(workload.config), workload.config, mesh, {}
        )
        self._trainer: Trainer[Microbatch] = Trainer(
            self._parallel, chain=chain, synchronize=run.synchronize, steps=run.steps
        )
        self._trainer.make_optimizer()
        self._source = batches(workload, mesh.rank)
        self._count = 0

    def step(self) -> None:
        """One optimizer step."""
        self._count += 1
        self._trainer.step([next(self._source)], number=self._count, position=0)

    def snapshot(self, step: int) -> Snapshot:
        """Weights and moments that this rank writes, as they are now."""
        optimizer = self._trainer.optimizer
        assert optimizer is not None
        table = self._parallel.table
        mine = writes(table, self._mesh.grid, self._mesh.rank)
        pieces = []
        for one in self._parallel.strategy.owned():
            if one.name not in mine:
                continue
            exp_avg, exp_avg_sq = optimizer.moments(one.name)
            for name, tensor in (
                (one.name, one.weight),
                (moment_name("exp_avg", one.name), exp_avg),
                (moment_name("exp_avg_sq", one.name), exp_avg_sq),
            ):
                shape = table[one.name].shape
                pieces.append(Piece(name=name, shape=shape, rectangle=one.rectangle, tensor=tensor))
        return Snapshot(step=step, plan=PLAN, pieces=pieces, state={"updates": self._count})


class Parts:
    """The parts of a round; each is timed between barriers by the caller."""

    def __init__(self, subject: Subject, mesh: Mesh, out: Path, *, steps: int) -> None:
        self._subject, self._mesh, self._out, self._count = subject, mesh, out, steps
        key = bytes(32)
        self._saver = Saver(
            out / "ours", run="bench", key=key, rank=mesh.rank, keep=1,
            exchange=lambda row: mesh.world.exchange(row, tag="save"),
        )  # fmt: skip
        self._background = BackgroundSaver(
            Saver(
                out / "background", run="bench", key=key, rank=mesh.rank, keep=1,
                exchange=lambda row: mesh.group("save").exchange(row, tag="save"),
            )
        )  # fmt: skip
        self._background.reserve(subject.snapshot(0))
        self._saves = 0

    def all(self) -> dict[str, Callable[[], None]]:
        """Name -> work."""
        return {
            "steps": lambda: self._steps(save=False),
            "steps_save": lambda: self._steps(save=True),
            "steps_again": lambda: self._steps(save=False),
            "save": self._save,
            "dcp": self._dcp,
            "write": self._write,
            "digest": self._digest,
        }

    def _steps(self, *, save: bool) -> None:
        for number in range(self._count):
            self._subject.step()
            if save and number == 0:
                self._background.save(self._next())
        if save:
            self._background.finish()

    def _next(self) -> Snapshot:
        self._saves += 1
        return self._subject.snapshot(self._saves)

    def _save(self) -> None:
        self._saver.save(self._next())

    def _tensors(self) -> dict[str, Tensor]:
        pieces = self._subject.snapshot(0).pieces
        return {f"{self._mesh.rank}/{one.name}": one.tensor for one in pieces}

    def _dcp(self) -> None:
        folder = self._out / "dcp"
        if self._mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        dcp_save(self._tensors(), storage_writer=FileSystemWriter(folder, sync_files=True))

    def _write(self) -> None:
        path = self._out / f"plain-{self._mesh.rank}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for tensor in self._tensors().values():
                view = element_bytes(tensor)
                for at in range(0, len(view), CHUNK_BYTES):
                    write_all(descriptor, view[at : at + CHUNK_BYTES])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.unlink(path)

    def _digest(self) -> None:
        sha256 = hashlib.sha256()
        for tensor in self._tensors().values():
            sha256.update(element_bytes(tensor))
        sha256.digest()


def rounds_of(
    parts: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    tell: Callable[[str], None],
) -> dict[str, list[float]]:
    """Seconds of every part in every round; the first of a round moves on by one each time."""
    names: Sequence[str] = list(parts)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first one warms up and is not kept
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            dist.barrier()
            began = time.perf_counter()
            parts[name]()
            dist.barrier()
            if number:
                found[name].append(time.perf_counter() - began)
        tell(f"round {number} of {rounds}")
    return found


def main() -> None:
    """Run as one rank: `python -m reparto.bench.checkpoint FOLDER`."""
    folder = Path(sys.argv[1])
    control = folder / "control"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    question = json.loads((folder / "question.json").read_text())
    leave_with_parent(int(question["supervisor_pid"]))
    (control / f"rank-{rank}.pid").write_text(str(os.getpid()))

    def tell(words: str) -> None:
        if rank == 0:
            with open(folder / "progress", "a", encoding="utf-8") as file:
                file.write(words + "\n")

    try:
        torch.set_num_threads(1)
        generation = int((control / "generation").read_text())
        store = file_store(str(control / f"generation-{generation}" / "workers"), world_size)
        plan = Plan.parse(PLAN)
        ring = Ring(control / f"rank-{rank}.ring", rank=rank)
        mesh = join_mesh(
            Grid.of(plan), rank, backend="auto", store=store, ring=ring, timeout_s=_TIMEOUT_S
        )
        load = load_of(question["model"], SIZES)
        workload = Workload(
            config=preset(load.model), sequences=load.sequences,
            sequence_length=load.sequence_length,
        )  # fmt: skip
        subject = Subject(workload, mesh, plan)
        subject.step()
        parts = Parts(subject, mesh, folder / "out", steps=int(question["steps"]))
        seconds = rounds_of(parts.all(), rounds=int(question["rounds"]), tell=tell)
        if rank == 0:
            num_bytes = 3 * 4 * num_parameters(workload.config)
            text = json.dumps({"seconds": seconds, "bytes": num_bytes})
            (folder / "seconds.json").write_text(text)
        dist.barrier()
        finish_process_group()
    except BaseException as error:
        write_error(control, rank, {"kind": type(error).__name__, "message": repr(error),
                                    "exit_code": 4})  # fmt: skip
        raise


if __name__ == "__main__":
    main()
