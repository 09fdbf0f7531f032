"""One rank of a `launch`: a worker of our own, or a process that a launcher has started.

Both join the others, make a session, call `main` and leave rank 0's value. They differ in who tells
them their rank, where they meet, and who hears of a fault.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from reparto.api.session import Session
from reparto.comm.backend import (
    Store,
    client_store,
    file_store,
    finish_process_group,
)
from reparto.comm.mesh import join_mesh
from reparto.config.plan import Plan
from reparto.errors import Fault, PeerLost, RepartoError, UserError
from reparto.partition.grid import Grid
from reparto.partition.legal import check_plan
from reparto.recover.launcher import Joined
from reparto.recover.supervise import write_error
from reparto.recover.worker import StopRequest, leave_with_parent
from reparto.trace import Ring

Value = TypeVar("Value")
Main = Callable[[Session], Value]


def work(control: Path, main: Main[Value]) -> NoReturn:
    """A worker of our own: what it must know stands in `control`; its value and last words too."""
    start = json.loads((control / "start.json").read_text(encoding="utf-8"))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    leave_with_parent(int(start["supervisor_pid"]))
    os.umask(0o077)
    (control / f"rank-{rank}.pid").write_text(str(os.getpid()))
    stop = StopRequest()
    try:
        if start["main"] != name_of(main):
            raise UserError(
                f"this script launches `{name_of(main)}` before `{start['main']}`, and a worker "
                "would have to run through the first to get to the second",
                where="launch",
                legal="one function to launch in a script, as often as you like",
            )
        generation = int((control / "generation").read_text())
        value = _run(
            main,
            Plan.parse(start["plan"]),
            rank,
            store=file_store(str(control / f"generation-{generation}" / "workers"), world_size),
            ring=Ring(control / f"rank-{rank}.ring", rank=rank),
            threads=int(start["threads"]),
            timeout_s=float(start["timeout_s"]),
            run_dir=Path(start["run_dir"]) if start["run_dir"] else None,
            resume=bool(start["resume"]),
            stop=stop,
        )
        if rank == 0:
            write_json(control / "result.json", value)
    except BaseException as error:
        _last_words(control, rank, error)
        # other threads may wait for peers that are gone: leave without them
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(error.exit_code if isinstance(error, RepartoError) else 4)
    raise SystemExit(0)


def join(
    launcher: Joined,
    main: Main[Value],
    plan: Plan,
    *,
    make_folder: Callable[[], Path | None],
    run_dir: Path | None,
    resume: bool,
    threads: int,
    timeout_s: float,
) -> Value:
    """A rank that torchrun, mpirun or srun has started. Rank 0 gets the value, the others end.

    make_folder  makes the run folder, on rank 0; the others wait for it
    """
    check_plan(plan, world_size=launcher.world_size)
    leave_with_parent(os.getppid())
    if launcher.store is not None:
        host, port = launcher.store
        store = client_store(host, port, prefix=f"reparto-api/{launcher.job}", timeout_s=timeout_s)
        if launcher.rank == 0:
            make_folder()
            store.set("folder", b"made")
        else:
            store.get("folder")
    else:
        if run_dir is None:
            raise UserError(
                f"{launcher.launcher} gives no place to meet",
                where="run_dir",
                legal="a folder that all ranks see",
                nearest='run_dir="runs/mine"',
            )
        meeting = run_dir / "control" / f"meet-{launcher.job}"
        if launcher.rank == 0:
            make_folder()
            meeting.mkdir(mode=0o700)
        else:
            _wait_for(meeting, launcher, timeout_s)
        store = file_store(str(meeting / "ranks"), launcher.world_size)
    ring = None if run_dir is None else run_dir / "control" / f"rank-{launcher.rank}.ring"
    value = _run(
        main,
        plan,
        launcher.rank,
        store=store,
        ring=Ring(ring, rank=launcher.rank),
        threads=threads,
        timeout_s=timeout_s,
        run_dir=run_dir,
        resume=resume,
        stop=StopRequest(),
    )
    if launcher.rank != 0:
        raise SystemExit(0)
    return value


def _wait_for(folder: Path, launcher: Joined, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not folder.is_dir():
        if time.monotonic() > end:
            raise Fault(
                f"rank {launcher.rank}: rank 0 did not make {folder} within {timeout_s:.0f} s; "
                "all ranks must see the same run_dir"
            )
        time.sleep(0.05)


def _run(
    main: Main[Value],
    plan: Plan,
    rank: int,
    *,
    store: Store,
    ring: Ring,
    threads: int,
    timeout_s: float,
    run_dir: Path | None,
    resume: bool,
    stop: StopRequest,
) -> Value:
    """Everything between joining and leaving."""
    torch.set_num_threads(threads)
    mesh = join_mesh(
        Grid.of(plan), rank, backend="auto", store=store, ring=ring, timeout_s=timeout_s
    )
    session = Session(plan, mesh=mesh, run_dir=run_dir, resume=resume, asked_to_stop=stop)
    value = as_json(main(session))
    mesh.world.barrier(tag="end").wait()
    ring.close()
    finish_process_group()
    return value


def _last_words(control: Path, rank: int, error: BaseException) -> None:
    known = isinstance(error, RepartoError)
    if not known:
        traceback.print_exc()
    write_error(
        control,
        rank,
        {
            "kind": type(error).__name__,
            "message": str(error) if known else f"{type(error).__name__}: {error}",
            "exit_code": error.exit_code if isinstance(error, RepartoError) else 4,
            "secondary": isinstance(error, PeerLost),
            "where": error.as_dict() if isinstance(error, UserError) else {},
        },
    )


def name_of(main: Main[Value]) -> str:
    """By which a worker knows that it has come to the right `launch`."""
    return getattr(main, "__qualname__", type(main).__name__)


def as_json(value: Value) -> Value:
    """The value itself, if it comes out of JSON as it went in. Raises `UserError` if not."""
    try:
        back = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise _not_json(f"{error}") from error
    if back != value and repr(back) != repr(value):  # what is no number differs from itself
        raise _not_json(f"{value!r} would come out as {back!r}"[:200])
    return value


def _not_json(why: str) -> UserError:
    return UserError(
        f"returns what cannot cross processes: {why}",
        where="main",
        legal="None, numbers, text, lists of them and dictionaries with text for keys",
    )


def write_json(path: Path, value: object) -> None:
    """A file of mode 0600, replaced in one step."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(fresh, path)
