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
where a debugger reaches it. Under torchrun, mpirun or srun no process is started: those that are
there join.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO, cast

from pydantic import JsonValue

from reparto.api.rank import Main, Value, as_json, join, name_of, work, write_json
from reparto.api.session import Session, read_plan
from reparto.checkpoint.files import make_private_folder
from reparto.config.plan import Plan
from reparto.errors import Fault, UserError
from reparto.evidence.ledger import create_key
from reparto.recover.detect import Failure
from reparto.recover.launcher import joined
from reparto.recover.supervise import Supervisor

#: set for workers only: the folder that holds start.json
_MARK = "REPARTO_API_CONTROL"
#: seconds that workers get to end their step after a stop was asked for
_STOP_GRACE_S = 120.0


def launch(
    main: Main[Value],
    *,
    plan: Plan | str = "data=1",
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    timeout_s: float = 60.0,
) -> Value:
    """Run `main(session)` on every rank of a plan and return what rank 0 returned.

    main       called once in each worker; returns what comes out of JSON as it went in, or None
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
        work(Path(mark), main)
    parsed, folder = read_plan(plan), None if run_dir is None else Path(run_dir).absolute()
    if resume and folder is None:
        raise UserError("needs the folder of the run", where="resume", legal="run_dir=...")
    cores = len(os.sched_getaffinity(0))
    launcher = joined()
    if launcher is not None:
        return join(
            launcher,
            main,
            parsed,
            make_folder=lambda: folder and _furnished(folder, resume=resume),
            run_dir=folder,
            resume=resume,
            threads=threads or max(1, cores // launcher.local_world_size),
            timeout_s=timeout_s,
        )
    if parsed.world_size > 1:
        _again()
    if folder is not None:
        _furnished(folder, resume=resume)
    if parsed.world_size == 1:
        return as_json(main(Session(parsed, run_dir=folder, resume=resume)))
    start: dict[str, JsonValue] = {
        "main": name_of(main),
        "plan": parsed.text,
        "run_dir": None if folder is None else str(folder),
        "resume": resume,
        "threads": threads or max(1, cores // parsed.world_size),
        "timeout_s": timeout_s,
        "supervisor_pid": os.getpid(),
    }
    if folder is not None:
        return cast("Value", _supervise(folder, parsed, start))
    passing = Path(tempfile.mkdtemp(prefix="reparto-"))
    _furnish(passing)
    try:
        value = _supervise(passing, parsed, start)
    except UserError:  # a fault leaves its logs
        shutil.rmtree(passing, ignore_errors=True)
        raise
    shutil.rmtree(passing, ignore_errors=True)
    return cast("Value", value)


# --- the process that was started -----------------------------------------------------------------


def _furnished(folder: Path, *, resume: bool) -> Path:
    """The run's folder, mode 0700: a new one, or that of an earlier launch to go on in."""
    control = folder / "control"
    if resume:
        if not (folder / "key").is_file():
            raise UserError(
                f"{folder} holds no run to resume",
                where="run_dir",
                legal="a folder made by an earlier launch",
            )
        for old in (*control.glob("error-*"), *control.glob("*.pid"), control / "result.json"):
            old.unlink(missing_ok=True)
        return folder
    if os.path.lexists(folder):
        raise UserError(
            f"{folder} exists already",
            where="run_dir",
            legal="a folder that does not exist yet",
            nearest="resume=True" if (folder / "key").is_file() else f"{folder}-2",
        )
    make_private_folder(folder)
    _furnish(folder)
    return folder


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


def _supervise(folder: Path, plan: Plan, start: Mapping[str, JsonValue]) -> object:
    """Start workers, show what rank 0 prints, pass a stop on; the value that rank 0 returned."""
    control = folder / "control"
    write_json(control / "start.json", start)
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
    value: object = json.loads((control / "result.json").read_text(encoding="utf-8"))
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
