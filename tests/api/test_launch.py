"""`launch` with real processes: results, resume under another plan, faults, stops, launchers.

Every script is started as a user would start it. Starting two workers takes some seconds, so all
but the first test are slow.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from reparto import UserError
from reparto.api.launch import launch
from reparto.api.rank import as_json

PRELUDE = """
import json, os, signal, sys, time
import torch
from torch import nn
from reparto import Fault, Session, UserError, launch

class Rows:
    def __init__(self):
        self.x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], self.x[index, :1].sin()

def build():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), batch[1].numel()

def trainer_of(session, **options):
    return session.trainer(build, loss, Rows(), **{"steps": 6, "batch_size": 7, **options})
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(PRELUDE + textwrap.dedent(body), encoding="utf-8")
    return path


def run(command: list[str], *, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )


def python(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, path.name, *arguments], cwd=path.parent)


def test_two_workers_train_and_one_process_goes_on(tmp_path: Path) -> None:
    """Rank 0's value and prints come back, rank 1's prints do not; the plan changes at a resume."""
    path = script(
        tmp_path,
        """
        def main(session):
            print(f"hello from rank {session.rank}")
            trainer = trainer_of(session, save_every=2)
            losses = []
            for result in trainer:
                losses.append(result.loss)
                if session.world_size == 2 and trainer.step == 4:
                    break
            return {"losses": losses, "ranks": session.world_size}

        if __name__ == "__main__":
            whole = launch(main, plan="data=1", run_dir="whole")
            first = launch(main, plan="data=2,shard=parameters", run_dir="run")
            then = launch(main, plan="data=1", run_dir="run", resume=True)
            assert "REPARTO_API_CONTROL" not in os.environ
            print("value", json.dumps([whole, first, then]))
        """,
    )
    done = python(path)
    assert done.returncode == 0, done.stderr
    value = next(line for line in done.stdout.splitlines() if line.startswith("value "))
    whole, first, then = json.loads(value.removeprefix("value "))
    assert (first["ranks"], then["ranks"]) == (2, 1)
    # float32: the same sums in another order
    assert first["losses"] + then["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert done.stdout.count("hello from rank 0") == 3 and "rank 1" not in done.stdout
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    log = next((tmp_path / "run" / "logs").glob("*/attempt_0/1/stdout.log"))
    assert "hello from rank 1" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("raise RuntimeError('broken on purpose')", "rank 1, step 3, after"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1, step 3, "),
        ("raise UserError('is not right', where='here')", "UserError: here: is not right"),
        ("sys.exit(7)", "SystemExit: 7"),
    ],
)
def test_a_worker_that_fails_is_named(tmp_path: Path, what: str, expected: str) -> None:
    path = script(
        tmp_path,
        f"""
        def main(session):
            trainer = trainer_of(session)
            for result in trainer:
                if session.rank == 1 and trainer.step == 3:
                    {what}

        if __name__ == "__main__":
            launch(main, plan="data=2,shard=gradients")
        """,
    )
    done = python(path)
    assert done.returncode == 1
    assert expected in done.stderr, done.stderr
    if "UserError" not in expected:
        assert "followed by rank 0" in done.stderr
        logs = Path(done.stderr.rpartition("logs: ")[2].strip())
        assert logs.is_dir()
        shutil.rmtree(logs.parent)


@pytest.mark.slow
def test_a_stop_ends_the_step_saves_and_returns(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        def main(session):
            trainer = trainer_of(session, steps=5000, save_every=5000)
            for result in trainer:
                time.sleep(0.05)
                if session.rank == 0 and trainer.step == 5:
                    print("five")
            return [trainer.step, sorted(trainer.stopped_by)]

        if __name__ == "__main__":
            print("value", json.dumps(launch(main, plan="data=2", run_dir="run")))
        """,
    )
    process = subprocess.Popen(
        [sys.executable, "-u", path.name], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "five\n"
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=120)
    step, stopped_by = json.loads(rest.strip().removeprefix("value "))
    assert process.returncode == 0 and 5 <= step < 5000 and stopped_by
    assert [one.name for one in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{step}"]


@pytest.mark.slow
def test_workers_leave_with_the_process_that_started_them(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        def main(session):
            for result in trainer_of(session, steps=5000):
                time.sleep(0.05)

        if __name__ == "__main__":
            launch(main, plan="data=2", run_dir="run")
        """,
    )
    process = subprocess.Popen([sys.executable, path.name], cwd=tmp_path)
    control = tmp_path / "run" / "control"
    end = time.monotonic() + 120
    while len(list(control.glob("rank-*.ring"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    pids = [int(one.read_text()) for one in control.glob("rank-*.pid")]
    assert len(pids) == 2
    process.kill()
    process.wait()
    end = time.monotonic() + 5
    while any(_runs(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


JOINED = """
def main(session):
    trainer = trainer_of(session)
    return [result.loss for result in trainer]

if __name__ == "__main__":
    print("value", json.dumps(launch(main, plan=sys.argv[1], run_dir=sys.argv[2])))
"""


def _losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "value [" in line]
    assert len(lines) == 1, done.stdout
    losses: list[float] = json.loads(lines[0].partition("value ")[2])
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_a_launcher_s_processes_join(tmp_path: Path, launcher: str) -> None:
    """The same losses as from workers of our own, and the wrong number of ranks is refused."""
    tool = Path(sys.executable).parent / launcher
    if not tool.exists():
        pytest.skip(f"no {launcher} beside this Python")
    path = script(tmp_path, JOINED)
    expected = _losses(python(path, "data=2,shard=parameters", "ours"))
    command = {
        "torchrun": [str(tool), "--nproc-per-node", "2"],
        "mpirun": [str(tool), "-n", "2", "--oversubscribe", "--allow-run-as-root", sys.executable],
    }[launcher]
    found = run([*command, path.name, "data=2,shard=parameters", "theirs"], cwd=tmp_path)
    assert _losses(found) == expected
    refused = run([*command, path.name, "data=3", "wrong"], cwd=tmp_path)
    assert refused.returncode != 0 and "needs 3 ranks, but 2 were started" in refused.stderr
    assert not (tmp_path / "wrong").exists()


@pytest.mark.slow
def test_a_script_launches_one_function(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        def one(session):
            return 1

        def other(session):
            return 2

        if __name__ == "__main__":
            launch(one, plan="data=1" if len(sys.argv) > 1 else "data=2")
            launch(other, plan="data=2")
        """,
    )
    done = python(path)
    assert done.returncode == 1 and "launches `one` before `other`" in done.stderr


def test_what_launch_refuses_before_anything_starts(tmp_path: Path) -> None:
    def main(session: object) -> int:
        raise AssertionError("nothing may start")

    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(UserError, match="exists already"):
        launch(main, run_dir=taken)
    with pytest.raises(UserError, match="holds no run to resume"):
        launch(main, run_dir=taken, resume=True)
    with pytest.raises(UserError, match="needs the folder"):
        launch(main, resume=True)
    with pytest.raises(UserError, match="tensor=2"):
        launch(main, plan="data=2,tensor=2")
    with pytest.raises(UserError, match="replicas"):
        launch(main, plan="data=3,replicas=2", run_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_values_come_back_as_they_went() -> None:
    for value in (None, 1, 0.5, "text", [1, [2.5]], {"a": {"b": None}}, [float("nan")]):
        assert as_json(value) is value
    for value in ({1: "a"}, (1, 2), {1, 2}, object()):
        with pytest.raises(UserError, match="cannot cross processes"):
            as_json(value)
