"""Joining a launcher: torchrun, Open MPI's mpirun, Slurm's srun have started us as one of N ranks.

Rank 0 does what the launching process would have done (data, run folder) and says when it is done;
the others wait for that word, in torchrun's store or in a file of the run folder. Then each is a
worker like any other. A rank that fails leaves its reason in the run folder and its exit status to
the launcher.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from reparto.cli import rundir
from reparto.cli.console import console
from reparto.config.run import Run
from reparto.errors import Fault, UserError
from reparto.partition.legal import check_plan
from reparto.recover.launcher import Joined
from reparto.recover.worker import StopRequest, leave_with_parent

#: seconds that ranks wait for rank 0 to prepare the data and make the run folder
_WAIT_S = 600.0


def join(
    run: Run, path: Path, launcher: Joined, *, stop_after: int | None, resume: bool, out: Console
) -> Mapping[str, object] | None:
    """Train as one rank; returns the result on rank 0, None elsewhere."""
    from reparto.cli.train import check_run, set_up
    from reparto.cli.worker import last_words, work
    from reparto.comm.backend import Store, client_store

    check_plan(run.partition, world_size=launcher.world_size)
    check_run(run)
    if run.communicate.placement != "block":
        raise UserError(
            f"{launcher.launcher} says which rank runs where, so this would be ignored",
            where="communicate.placement",
            legal="block here; cyclic with --nodes",
            nearest="block",
        )
    leave_with_parent(os.getppid())
    stop = StopRequest()
    store: Store | None = None
    if launcher.store is not None:
        host, port = launcher.store
        store = client_store(host, port, prefix=f"reparto/{launcher.job}", timeout_s=_WAIT_S)
    quiet = out if launcher.rank == 0 else Console(quiet=True)
    if launcher.rank == 0:
        set_up(
            run, path, stop_after=stop_after, resume=resume, out=out,
            local_world_size=launcher.local_world_size,
        )  # fmt: skip
        generation = _next_generation(path / "control")
        _say(path, launcher, store, generation)
    else:
        generation = _heard(path, launcher, store)
    start = json.loads((path / "control" / "start.json").read_text(encoding="utf-8"))
    quiet.print(f"joined {launcher.launcher}: {launcher.world_size} ranks")
    try:
        work(path, start, launcher.rank, launcher.world_size, stop, store=store)
    except BaseException as error:
        last_words(path / "control", launcher.rank, error)
        raise
    if launcher.rank != 0:
        return None
    found: Mapping[str, object] = json.loads((path / "control" / "result.json").read_text())
    return found


def _next_generation(control: Path) -> int:
    earlier = [int(one.name.split("-")[1]) for one in control.glob("generation-*")]
    generation = max(earlier, default=0) + 1
    (control / f"generation-{generation}").mkdir(mode=0o700)
    rundir.write_private(control / "generation", str(generation))
    return generation


def _say(path: Path, launcher: Joined, store: object, generation: int) -> None:
    """Rank 0: everything is there."""
    if store is not None:
        store.set("started", str(generation).encode())  # type: ignore[attr-defined]
    else:
        rundir.write_private(path / "control" / f"started-{launcher.job}", str(generation))


def _heard(path: Path, launcher: Joined, store: object) -> int:
    """The other ranks: wait for rank 0's word."""
    if store is not None:
        return int(store.get("started").decode())  # type: ignore[attr-defined]
    word = path / "control" / f"started-{launcher.job}"
    end = time.monotonic() + _WAIT_S
    next_told = time.monotonic() + 10
    while not word.exists():
        if time.monotonic() > end:
            raise Fault(
                f"rank {launcher.rank}: rank 0 did not make {path} within {_WAIT_S:.0f} s; all "
                "ranks must see the same run folder (--run-dir on a shared file system)"
            )
        if time.monotonic() > next_told:
            console().print(f"rank {launcher.rank} waits for rank 0 to make {path}")
            next_told += 30
        time.sleep(0.05)
    return int(word.read_text())
