"""`launch`: a script starts itself again as the workers of a plan.

    def main(session):                        # runs in every worker
        trainer = session.trainer(build, loss, dataset, steps=100, batch_size=64)
        for result in trainer: ...
        return {"loss": result.loss}          # rank 0's comes back, as JSON

    if __name__ == "__main__":
        print(launch(main, plan="data=2,shard=parameters"))

A function cannot be sent to another process without pickle, which would run whatever it is given.
So each worker is the same command line once more: it comes to the same `launch`, finds in its
environment that it is a worker, joins the others, calls `main` and ends there. What stands above
`launch` runs in every worker too; what stands below runs once, in the process that was started.

Workers are watched as those of `reparto train` (`recover/supervise.py`): one that dies ends the
others, and the cause is raised here. Nothing listens. A plan of one rank runs in this process,
where a debugger reaches it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

import torch
from pydantic import JsonValue

from reparto.api.session import Session, read_plan
from reparto.checkpoint.files import make_private_folder
from reparto.comm.backend import file_store, finish_process_group, start_process_group
from reparto.comm.mesh import torch_mesh
from reparto.config.plan import Plan
from reparto.errors import Fault, PeerLost, RepartoError, UserError
from reparto.evidence.ledger import create_key
from reparto.partition.grid import Grid
from reparto.recover.detect import Failure
from reparto.recover.supervise import Supervisor, write_error
from reparto.recover.worker import StopRequest, leave_with_parent
from reparto.trace import Ring

#: set for workers only: the folder that holds start.json
_MARK = "REPARTO_API_CONTROL"
#: seconds that workers get to end their step after a stop was asked for
_STOP_GRACE_S = 120.0

Main = Callable[[Session], JsonValue]


def launch(
    main: Main,
    *,
    plan: Plan | str = "data=1",
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    timeout_s: float = 60.0,
) -> JsonValue:
    """Run `main(session)` on every rank of a plan and return what rank 0 returned.

    main       called once in each worker; returns something that JSON can say, or None
    plan       text form, TOML file or `Plan`; its world size is the number of processes
    run_dir    folder for checkpoints, logs and records, new unless `resume`; None takes a temporary
               one, which is removed at the end, or left for its logs after a fault
    resume     go on from the newest whole checkpoint in `run_dir`; the plan may be another one
    threads    of torch in each worker; None shares the cores out
    timeout_s  that a collective may take before a peer counts as lost

    SIGINT and SIGTERM end the step under way on all ranks alike, save it where `save_every` asks
    for saves, and return; a second one ends everything at once.

    Raises `UserError` before anything starts or as a worker raised it, and `Fault` naming rank,
    step and cause when a worker failed.
    """
    mark = os.environ.pop(_MARK, None)  # not handed on to what `main` may start
    if mark is not None:
        _work(Path(mark), main)
    parsed = read_plan(plan)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UserError(
            "another launcher has started this process already (RANK and WORLD_SIZE are set)",
            where="launch",
            legal="a script that is started once, by python",
            nearest=f"python {Path(sys.argv[0]).name}",
        )
    if parsed.world_size == 1 and run_dir is None:
        return _json(main(Session(parsed, resume=resume)))
    with _folder(None if run_dir is None else Path(run_dir), resume=resume) as folder:
        kept = folder if run_dir is not None else None
        if parsed.world_size == 1:
            return _json(main(Session(parsed, run_dir=kept, resume=resume)))
        _again()
        cores = len(os.sched_getaffinity(0))
        start: dict[str, JsonValue] = {
            "main": _name(main),
            "plan": parsed.text,
            "run_dir": None if kept is None else str(kept),
            "resume": resume,
            "threads": threads or max(1, cores // parsed.world_size),
            "timeout_s": timeout_s,
            "supervisor_pid": os.getpid(),
        }
        return _supervise(folder, parsed, start)


# --- the process that was started -----------------------------------------------------------------


@contextlib.contextmanager
def _folder(run_dir: Path | None, *, resume: bool) -> Iterator[Path]:
    """The run's folder, mode 0700, with control, logs and a key; a temporary one is removed."""
    if run_dir is None:
        if resume:
            raise UserError("needs the folder of the run", where="resume", legal="run_dir=...")
        folder = Path(tempfile.mkdtemp(prefix="reparto-"))
        _furnish(folder)
        try:
            yield folder
        except UserError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return
    folder = run_dir.absolute()
    if resume:
        if not (folder / "key").is_file():
            raise UserError(f"{run_dir} holds no run to resume", where="run_dir",
                            legal="a folder made by an earlier launch")  # fmt: skip
        for old in [*(folder / "control").glob("error-*"), *(folder / "control").glob("*.pid"),
                    folder / "control" / "result.json"]:  # fmt: skip
            old.unlink(missing_ok=True)
    else:
        if os.path.lexists(folder):
            raise UserError(
                f"{run_dir} exists already",
                where="run_dir",
                legal="a folder that does not exist yet",
                nearest="resume=True" if (folder / "key").is_file() else f"{run_dir}-2",
            )
        make_private_folder(folder)
        _furnish(folder)
    yield folder


def _furnish(folder: Path) -> None:
    for name in ("control", "logs"):
        make_private_folder(folder / name)
    create_key(folder / "key")


def _again() -> list[str]:
    """Arguments that make Python run this same program once more."""
    arguments = sys.orig_argv[1:]
    if not arguments or arguments[-1] == "-" or not hasattr(sys.modules["__main__"], "__file__"):
        raise UserError(
            "workers are this program started again, and there is no file to start",
            where="launch",
            legal="a script or module run by python",
            nearest="write it to a file; or use Session() for a single process",
        )
    return arguments


def _name(main: Main) -> str:
    return getattr(main, "__qualname__", type(main).__name__)


def _supervise(folder: Path, plan: Plan, start: Mapping[str, JsonValue]) -> JsonValue:
    """Start workers, show what rank 0 prints, pass a stop on; the value that rank 0 returned."""
    control = folder / "control"
    _write(control / "start.json", start)
    environment = {
        _MARK: str(control),
        "OMP_NUM_THREADS": str(start["threads"]),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",  # what rank 0 prints is shown when it is printed
    }
    with _restored(environment):
        supervisor = Supervisor(
            folder, world_size=plan.world_size, arguments=_again(), environment=environment
        )
        with _stopping(supervisor) as asked, _Shown(folder / "logs") as shown:
            supervisor.start()
            try:
                while supervisor.alive:
                    supervisor.wait(0.1)
                    shown.poll()
                    if asked and time.monotonic() - asked[0] > _STOP_GRACE_S:
                        supervisor.kill()
            except BaseException:
                supervisor.kill()
                raise
    outcome = supervisor.outcome()
    if not outcome.ok:
        raise _error(folder, outcome.failures)
    value: JsonValue = json.loads((control / "result.json").read_text(encoding="utf-8"))
    return value


@contextlib.contextmanager
def _restored(names: Iterable[str]) -> Iterator[None]:
    """The supervisor hands its own environment on, so it writes there; put it back afterwards."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _stopping(supervisor: Supervisor) -> Iterator[list[float]]:
    """SIGINT and SIGTERM are passed on; yields the times at which they came."""
    asked: list[float] = []

    def stop(number: int, frame: object) -> None:
        asked.append(time.monotonic())
        if len(asked) == 1:
            supervisor.ask_to_stop()
        else:
            supervisor.kill()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    handlers = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


class _Shown:
    """What rank 0 prints, on the terminal of the process that was started."""

    def __init__(self, logs: Path) -> None:
        self._old = set(logs.glob("*/attempt_*/0/*.log"))
        self._logs = logs
        self._files: dict[Path, TextIO] = {}

    def __enter__(self) -> _Shown:
        return self

    def poll(self) -> None:
        """Show what has come since the last call."""
        for name, out in (("stdout.log", sys.stdout), ("stderr.log", sys.stderr)):
            for path in self._logs.glob(f"*/attempt_*/0/{name}"):
                if path in self._old:
                    continue
                if path not in self._files:
                    self._files[path] = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115
                text = self._files[path].read()
                if text:
                    out.write(text)
                    out.flush()

    def __exit__(self, *_: object) -> None:
        self.poll()
        for file in self._files.values():
            file.close()


def _error(folder: Path, failures: Sequence[Failure]) -> Fault | UserError:
    """The one error of workers that failed: the cause, its consequences folded under it."""
    cause, others = failures[0], failures[1:]
    if cause.exit_code == 2 and cause.where:
        return UserError(**{key: cause.where.get(key, "") for key in
                            ("what", "where", "legal", "nearest")})  # fmt: skip
    lines = [f"rank {cause.rank}, step {cause.step}, {cause.doing}: {cause.message}"]
    if others:
        lines.append("  followed by " + ", ".join(f"rank {one.rank}" for one in others))
    saved = [one.name for one in (folder / "checkpoints").glob("step-*") if one.name[5:].isdigit()]
    if saved:
        newest = max(saved, key=lambda name: int(name[5:]))
        lines.append(f"  last checkpoint: {newest}; next: launch with resume=True")
    lines.append(f"  logs: {folder / 'logs'}")
    return Fault("\n".join(lines))


# --- a worker -------------------------------------------------------------------------------------


def _work(control: Path, main: Main) -> NoReturn:
    """Join, run `main`, leave its value, end."""
    start = json.loads((control / "start.json").read_text(encoding="utf-8"))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    leave_with_parent(int(start["supervisor_pid"]))
    os.umask(0o077)
    (control / f"rank-{rank}.pid").write_text(str(os.getpid()))
    stop = StopRequest()
    try:
        if start["main"] != _name(main):
            raise UserError(
                f"this script launches `{_name(main)}` before `{start['main']}`, and a worker "
                "would have to run through the first to get to the second",
                where="launch",
                legal="one function to launch in a script, as often as you like",
            )
        torch.set_num_threads(int(start["threads"]))
        generation = int((control / "generation").read_text())
        ring = Ring(control / f"rank-{rank}.ring", rank=rank)
        plan = Plan.parse(start["plan"])
        start_process_group(
            backend="gloo",
            rank=rank,
            world_size=world_size,
            store=file_store(str(control / f"generation-{generation}" / "workers"), world_size),
            timeout_s=float(start["timeout_s"]),
        )
        mesh = torch_mesh(Grid.of(plan), rank, ring=ring, timeout_s=float(start["timeout_s"]))
        session = Session(
            plan,
            mesh=mesh,
            run_dir=Path(start["run_dir"]) if start["run_dir"] else None,
            resume=bool(start["resume"]),
            asked_to_stop=stop,
        )
        value = _json(main(session))
        if rank == 0:
            _write(control / "result.json", value)
        mesh.world.barrier(tag="end").wait()
        finish_process_group()
    except BaseException as error:
        _last_words(control, rank, error)
        # other threads may wait for peers that are gone: leave without them
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(error.exit_code if isinstance(error, RepartoError) else 4)
    raise SystemExit(0)


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


def _json(value: JsonValue) -> JsonValue:
    """The value itself, if JSON can say it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"returned a {type(value).__name__}, which cannot cross processes: {error}",
            where="main",
            legal="None, numbers, text, lists and dictionaries of them",
        ) from error
    return value


def _write(path: Path, value: JsonValue | Mapping[str, JsonValue]) -> None:
    """A file of mode 0600, replaced in one step."""
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(fresh, path)
