"""`compute.memory_gb`: refused by arithmetic before the start, enforced by the kernel after it."""

from __future__ import annotations

from pathlib import Path

from tests.cli.runs import RUN, answer, reparto


def _run_file(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(RUN + "max_restarts = 0\n\n[compute]\nthreads = 1\n")
    return path


def test_more_state_than_a_worker_may_have_is_refused_before_it_starts(tmp_path: Path) -> None:
    done = reparto(
        "train", str(_run_file(tmp_path)), "--plan", "data=1", "--run-dir", str(tmp_path / "run"),
        "--set", "model.hidden_size=256", "--set", "compute.memory_gb=0.006", cache=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "MiB a worker for weights, gradients and optimizer" in done.stderr
    assert "may have 6.1 MiB" in done.stderr and "nearest: --plan " in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_less_than_an_empty_worker_takes_is_refused(tmp_path: Path) -> None:
    """The state of the tiny model fits in 64 MiB, python and torch do not."""
    done = reparto(
        "train", str(_run_file(tmp_path)), "--run-dir", str(tmp_path / "run"),
        "--set", "compute.memory_gb=0.0625", cache=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "python and torch alone take" in done.stderr and "64.0 MiB" in done.stderr


def test_the_kernel_holds_a_worker_to_the_limit(tmp_path: Path) -> None:
    """About 220 MiB of state pass the arithmetic, but not beside python and torch."""
    sizes = ("model.hidden_size=768", "model.intermediate_size=2560", "compute.memory_gb=0.3")
    done = reparto(
        "train", str(_run_file(tmp_path)), "--run-dir", str(tmp_path / "run"), "--plan", "data=1",
        *(word for one in sizes for word in ("--set", one)), cache=tmp_path,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    limit = "the memory limit of this worker (307.2 MiB, compute.memory_gb) is reached"
    assert limit in done.stderr


def test_within_the_limit_every_worker_tells_its_peak(tmp_path: Path) -> None:
    done = reparto(
        "train", str(_run_file(tmp_path)), "--run-dir", str(tmp_path / "run"), "--steps", "2",
        "--set", "compute.memory_gb=1", "--json", cache=tmp_path,
    )  # fmt: skip
    found = answer(done)
    peaks = found["peak_memory_bytes"]
    assert isinstance(peaks, list) and len(peaks) == 2
    assert all(20 << 20 < peak < 1 << 30 for peak in peaks)
    sent = found["traffic"]
    assert isinstance(sent, list)
    assert {row["link"] for row in sent} == {"memory"}  # one host
