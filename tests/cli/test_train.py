"""`reparto train` as a user meets it: stop, resume, faults, signals, sockets, files."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from reparto.cli.rundir import FOLDERS
from reparto.evidence.ledger import load_key, verify_ledger
from reparto.evidence.record import STAGES
from tests.cli.runs import RUN, answer, losses, reparto, rows, start


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture(scope="module")
def whole(cache: Path, run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted, made under umask 0."""
    run_dir = tmp_path_factory.mktemp("whole") / "A"
    old = os.umask(0)
    try:
        done = reparto("train", str(run_file), "--run-dir", str(run_dir), "--json", cache=cache)
    finally:
        os.umask(old)
    found = answer(done)
    assert found["steps"] == 12 and found["world_size"] == 2
    assert found["plan"] == "data=2,shard=parameters"
    assert "exposed" in done.stderr and "resume" not in done.stderr
    (run_dir / "answer.json").write_text(json.dumps(found))
    return run_dir


def test_the_answer_and_the_rows_agree(whole: Path) -> None:
    found = json.loads((whole / "answer.json").read_text())
    made = rows(whole)
    assert [row["step"] for row in made] == list(range(1, 13))
    assert found["loss"] == made[-1]["loss"]
    assert 0 < found["validation_loss"] < 7
    assert made[-1]["position"] == 12 * 6  # L40: samples seen = steps x batch
    assert {"tokens_per_s", "step_s", "exposed_comm_s", "grad_norm", "learning_rate"} <= made[
        0
    ].keys()


def test_the_run_folder_is_whole_and_private(whole: Path) -> None:
    names = {one.name for one in whole.iterdir()}
    assert {"run.toml", "plan.toml", "provenance.json", "metrics.jsonl", "ledger.jsonl", "key",
            "tokenizer.json", *FOLDERS} <= names  # fmt: skip
    for path in [whole, *whole.rglob("*")]:
        if path.name == "answer.json" or "logs" in path.parts:
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, f"{path} has mode {mode:o}"
    for rank in (0, 1):
        trace = json.loads((whole / "trace" / f"rank-{rank}.json").read_text())
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"0F0", "adamw", "word"} <= names
    provenance = json.loads((whole / "provenance.json").read_text())
    assert {"corpus", "tokenizer", "tokens", "config", "code", "initial_weights"} <= provenance[
        "digests"
    ].keys()


def test_the_ledger_holds_one_record_a_stage(whole: Path) -> None:
    report = verify_ledger(whole / "ledger.jsonl", load_key(whole / "key"))
    assert report.passed
    lines = [json.loads(line) for line in (whole / "ledger.jsonl").read_text().splitlines()]
    stages = [line["body"]["stage"] for line in lines if line["kind"] == "stage"]
    assert stages == list(STAGES)
    kinds = [line["kind"] for line in lines]
    assert kinds.count("checkpoint") == 3 and kinds[-1] == "end"


def test_resume_is_bitwise_equal(cache: Path, run_file: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "B")
    first = reparto("train", str(run_file), "--run-dir", run_dir, "--stop-after", "6", "--json",
                    cache=cache)  # fmt: skip
    assert answer(first)["steps"] == 6
    second = reparto("train", "--run-dir", run_dir, "--resume", "--json", cache=cache)
    assert answer(second)["steps"] == 12
    assert losses(Path(run_dir)) == losses(whole)


def test_resume_under_another_plan_goes_on(
    cache: Path, run_file: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "B")
    reparto("train", str(run_file), "--run-dir", run_dir, "--stop-after", "8", cache=cache)
    done = reparto("train", "--run-dir", run_dir, "--resume", "--plan", "data=1", "--json",
                   cache=cache)  # fmt: skip
    assert answer(done)["plan"] == "data=1"
    assert losses(Path(run_dir)) == pytest.approx(losses(whole), rel=1e-5)


def _wait_for_rows(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} rows in time; {process.poll()=}")


def _worker(run_dir: Path, rank: int) -> int:
    return int((run_dir / "control" / f"rank-{rank}.pid").read_text())


def test_a_killed_worker_is_named_and_the_run_goes_on_bitwise(
    cache: Path, run_file: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "K"
    steps = ("--steps", "60")
    process = start("train", str(run_file), *steps, "--run-dir", str(run_dir), cache=cache)
    _wait_for_rows(run_dir, 9, process)
    os.kill(_worker(run_dir, 1), signal.SIGKILL)
    _, told = process.communicate(timeout=180)
    assert process.returncode == 0, told
    assert "rank 1, step" in told and "killed (signal 9" in told and "restart 1 of 3" in told
    unbroken = tmp_path / "U"
    reparto("train", str(run_file), *steps, "--run-dir", str(unbroken), cache=cache)
    assert losses(run_dir) == losses(unbroken)


def test_ctrl_c_ends_all_ranks_with_a_checkpoint(
    cache: Path, run_file: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "C"
    process = start("train", str(run_file), "--steps", "5000", "--run-dir", str(run_dir),
                    cache=cache)  # fmt: skip
    _wait_for_rows(run_dir, 3, process)
    workers = [_worker(run_dir, rank) for rank in (0, 1)]
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    last = len(rows(run_dir))
    assert (run_dir / "checkpoints" / f"step-{last}" / "manifest.json").exists()
    assert f"resume: reparto train --run-dir {run_dir} --resume" in told
    assert not any(psutil.pid_exists(pid) for pid in workers)


def test_a_signal_to_one_worker_stops_all_after_the_same_step(
    cache: Path, run_file: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "S"
    process = start("train", str(run_file), "--steps", "5000", "--run-dir", str(run_dir), "--json",
                    cache=cache)  # fmt: skip
    _wait_for_rows(run_dir, 3, process)
    os.kill(_worker(run_dir, 1), signal.SIGTERM)
    out, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert json.loads(out.splitlines()[-1])["stopped_by"] == [1]
    assert "stopped by a signal to rank 1" in told


def test_a_killed_launcher_leaves_no_worker_and_nothing_listens(
    cache: Path, run_file: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "L"
    process = start("train", str(run_file), "--steps", "5000", "--run-dir", str(run_dir),
                    cache=cache)  # fmt: skip
    _wait_for_rows(run_dir, 2, process)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in family:
        for connection in one.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), (one.cmdline(), connection)
    workers = [_worker(run_dir, rank) for rank in (0, 1)]
    process.kill()
    process.communicate(timeout=30)
    end = time.monotonic() + 5
    while time.monotonic() < end and any(map(psutil.pid_exists, workers)):
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, workers))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "recover.checkpoint_evry=10"], ["checkpoint_evry", "nearest: checkpoint_every"]),
        (["--set", "sinchronize.learning_rate=1"], ["nearest: synchronize"]),
        (["--set", "steps=many"], ["steps", "whole number"]),
        (["--set", "steps=2.5"], ["steps"]),
        (["--plan", "data=2,shrad=parameters"], ["shrad", "nearest: shard"]),
        (["--plan", "data=64"], ["batch_size", "64"]),
        (["--plan", "data=2,num_microbatches=8"], ["batch_size", "at least 16"]),
        (["--plan", "data=4,replicas=3"], ["replicas", "nearest"]),
        (["--set", "data.paths=[\"/nowhere/at/all\"]"], ["/nowhere/at/all"]),
        (["--set", "data.sequence_length=1000000"], ["sequence_length"]),
        (["--stop-after", "99"], ["--stop-after", "1 to 12"]),
        (["--resume"], ["--run-dir"]),
        (["--accept-change", "seed"], ["--resume"]),
        (["--set", "guard=[{signal=\"exposed_share\",above=0.4}]"], ["guard", "not built yet"]),
        (["--set", "model.source=huggingface", "--set", "model.dropout=0.1"],
         ["model.dropout", "nearest: model.dropout=0.0"]),
        (["--set", "model.source=huggingface", "--set", "model.preset=moe-tiny"],
         ["model.source", "no experts", "nearest: reparto"]),
        (["--plan", "data=2,expert=2"], ["partition.expert", "no experts", "nearest: data=2"]),
        (["--plan", "data=2,expert=2", "--set", "model.num_experts=3"],
         ["partition.expert", "num_experts=3", "nearest: data=2"]),
        (["--set", "model.preset=moe-tiny", "--set", "model.capacity_factor=0.001"],
         ["model.capacity_factor", "every token would be dropped"]),
        (["--set", "synchronize.warmup_steps=50"], ["warmup_steps", "0 to 12"]),
        (["--set", "model.weights=\"/nowhere\""], ["model.weights"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_starts(
    cache: Path, run_file: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    run_dir = tmp_path / "never"
    where = [] if arguments == ["--resume"] else ["--run-dir", str(run_dir)]
    done = reparto("train", str(run_file), *where, *arguments, cache=cache)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_bad_text_is_named_with_its_place(cache: Path, run_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good text " * 50 + b"\xff\xfe")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for path, words in ((bad, ["bad.txt", "500"]), (empty, ["empty"])):
        done = reparto("train", str(run_file), "--set", f'data.paths=["{path}"]',
                       "--run-dir", str(tmp_path / "never"), cache=cache)  # fmt: skip
        assert done.returncode == 2 and "Traceback" not in done.stderr
        for word in words:
            assert word in done.stderr, done.stderr


def test_resume_refuses_what_would_change_the_run(cache: Path, whole: Path, tmp_path: Path) -> None:
    done = reparto("train", "--run-dir", str(whole), "--resume", "--set", "seed=4",
                   "--set", "data.batch_size=8", cache=cache)  # fmt: skip
    assert done.returncode == 2
    assert "seed: 3 -> 4" in done.stderr and "data.batch_size: 6 -> 8" in done.stderr
    done = reparto("train", "--run-dir", str(whole), cache=cache)
    assert done.returncode == 2 and "exists already" in done.stderr
    done = reparto("train", "--run-dir", str(tmp_path / "none"), "--resume", cache=cache)
    assert done.returncode == 2 and "no run to resume" in done.stderr


def test_verbs_that_are_not_built_say_so(cache: Path) -> None:
    for verb in ("report", "drill", "diagnose"):
        done = reparto(verb, "anything", cache=cache)
        assert done.returncode == 2 and "not built yet" in done.stderr


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['reparto', '--help']\n"
        "from reparto.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules), 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_generate_and_checkpoint_verbs(cache: Path, whole: Path, tmp_path: Path) -> None:
    greedy = [
        answer(reparto("generate", str(whole), "def ", "--tokens", "8", "--json", cache=cache))
        for _ in range(2)
    ]
    assert greedy[0] == greedy[1] and len(str(greedy[0]["tokens"])) > 2
    listed = answer(reparto("checkpoint", "list", str(whole), "--json", cache=cache))
    assert [one["step"] for one in listed["checkpoints"]] == [4, 8, 12]  # type: ignore[attr-defined]
    assert answer(reparto("checkpoint", "check", str(whole), "--json", cache=cache))["passed"]
    exported = tmp_path / "hf"
    answer(reparto("checkpoint", "export", str(whole), str(exported), "--json", cache=cache))
    assert (exported / "config.json").exists()
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(whole), str(copy)], check=True)
    file = copy / "checkpoints" / "step-8" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))
    done = reparto("checkpoint", "check", str(copy), cache=cache)
    assert done.returncode == 3 and "step-8" in done.stderr and "rank-00001" in done.stderr


def test_tensorboard_gets_every_row_and_any_folder_name_will_do(
    cache: Path, run_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "data=2,board"
    answer(reparto("train", str(run_file), "--set", "tensorboard=true", "--stop-after", "3",
                   "--run-dir", str(run_dir), "--json", cache=cache))  # fmt: skip
    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    seen = [(one.step, one.value) for one in board.Scalars("train/loss")]
    assert [step for step, _ in seen] == [1, 2, 3]
    assert [value for _, value in seen] == pytest.approx(losses(run_dir))
    assert (run_dir / "checkpoints" / "step-3").is_dir()
    assert stat.S_IMODE((run_dir / "tensorboard").stat().st_mode) == 0o700


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    ["data=2,shard=parameters,recompute=full", "pipeline=2,schedule=zb-h1,num_microbatches=2"],
)
def test_compiled_blocks_give_the_same_losses(
    cache: Path, run_file: Path, tmp_path: Path, plan: str
) -> None:
    found = []
    for number, choice in enumerate(("true", "false")):
        run_dir = tmp_path / str(number)
        answer(reparto("train", str(run_file), "--plan", plan, "--stop-after", "3", "--set",
                       f"compute.compile={choice}", "--run-dir", str(run_dir), "--json",
                       cache=cache, timeout_s=500))  # fmt: skip
        found.append(losses(run_dir))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_compiling_a_tensor_plan_is_refused(cache: Path, run_file: Path, tmp_path: Path) -> None:
    done = reparto("train", str(run_file), "--plan", "tensor=2", "--set", "compute.compile=true",
                   "--run-dir", str(tmp_path / "x"), cache=cache)  # fmt: skip
    assert done.returncode == 2 and "compute.compile" in done.stderr, done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_launchers_give_the_same_losses(
    cache: Path, run_file: Path, whole: Path, tmp_path: Path, launcher: str
) -> None:
    program = Path(sys.executable).parent / launcher
    if not program.exists():
        pytest.skip(f"{launcher} is not installed (extra mpi)")
    count = ["--nproc-per-node", "2"] if launcher == "torchrun" else ["--oversubscribe", "-n", "2"]
    command = ["-m", "reparto"] if launcher == "torchrun" else [sys.executable, "-m", "reparto"]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(
        [str(program), *count, *command, "train", str(run_file), "--run-dir", str(tmp_path / "J")],
        capture_output=True, text=True, timeout=240, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "J") == losses(whole)
