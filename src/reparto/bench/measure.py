"""Workers measure what they are asked: the asking side of `worker.py`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reparto.config.model import num_parameters, preset
from reparto.errors import Fault, UserError

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step computes, and how many steps one timing has."""

    model: str
    "name of a preset"
    sequences: int
    "sequences a batch: of each worker where they have batches of their own, else of both"
    sequence_length: int
    "tokens a sequence"
    num_microbatches: int = 1
    "equal parts that the batch is cut into"
    steps: int
    "steps of one timing: two to three seconds on a core of 70 GFLOP/s evens out short noise"
    shared: bool
    "whether both workers compute one batch together"

    @property
    def words(self) -> str:
        """The load as a sentence."""
        whose = "of both workers" if self.shared else "a worker"
        cut = f" in {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        return (
            f"{num_parameters(preset(self.model))} parameters, 2 workers of one thread, "
            f"{self.sequences} sequences of {self.sequence_length} tokens {whose} and step{cut}, "
            "AdamW fused, clipping 1.0"
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step of both workers."""
        return (1 if self.shared else 2) * self.sequences * self.sequence_length


def load_of(model: str, sizes: dict[str, Load]) -> Load:
    """The load of a preset; raises `UserError` where none was chosen for it."""
    if model not in sizes:
        raise UserError(f"`{model}` has no workload", where="--model", legal=", ".join(sizes))
    return sizes[model]


def measure(
    load: Load,
    plan: str,
    contestants: Sequence[str],
    rounds: int,
    tell: Tell,
    *,
    memory: bool = False,
) -> dict[str, list[float]]:
    """Run two workers; returns what rank 0 measured: seconds a step of everyone in every round.

    memory  the steady peak of resident bytes of the only contestant instead
    """
    question = {
        "kind": "memory" if memory else "race", "model": load.model, "plan": plan,
        "contestants": list(contestants), "rounds": rounds,
        "steps": 2 if memory else load.steps, "sequences": load.sequences,
        "sequence_length": load.sequence_length, "num_microbatches": load.num_microbatches,
    }  # fmt: skip
    found: dict[str, list[float]] = ask(question, 2, tell)[0]
    return found


def ask(question: Mapping[str, object], world_size: int, tell: Tell) -> list[Any]:
    """Start workers of one thread, give them `question`, and return every rank's answer.

    Raises `Fault` with the first failure of a worker.
    """
    from reparto.recover.supervise import Supervisor

    folder = Path(tempfile.mkdtemp(prefix="reparto-bench-"))
    for name in ("control", "logs"):
        (folder / name).mkdir(mode=0o700)
    (folder / "question.json").write_text(json.dumps({**question, "supervisor_pid": os.getpid()}))
    supervisor = Supervisor(
        folder,
        world_size=world_size,
        arguments=["-m", "reparto.bench.worker", str(folder)],
        environment={
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
        },
    )
    told = 0
    try:
        supervisor.start()
        while supervisor.alive:
            supervisor.wait(0.2)
            progress = folder / "progress"
            if progress.exists():
                lines = progress.read_text().splitlines()
                for line in lines[told:]:
                    tell(line)
                told = len(lines)
        outcome = supervisor.outcome()
        if not outcome.ok:
            cause = outcome.failures[0]
            raise Fault(f"bench: rank {cause.rank}: {cause.message}")
        return [json.loads((folder / f"answer-{rank}.json").read_text())
                for rank in range(world_size)]  # fmt: skip
    except BaseException:
        supervisor.kill()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
