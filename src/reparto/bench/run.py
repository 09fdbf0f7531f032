"""`bench data | zero | tensor | overhead`: starts workers, gathers ratios, says what it did."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reparto.bench.protocol import ratios
from reparto.config.model import num_parameters, preset
from reparto.errors import Fault, UserError
from reparto.trace import Collective, Kind, Ring

#: sequences a rank and tokens a sequence, by model
SIZES = {"1m": (8, 128), "10m": (4, 128), "50m": (4, 128)}
#: steps in one timing: two to three seconds on a core of 70 GFLOP/s, so that short noise evens out
STEPS = {"1m": 10, "10m": 3, "50m": 1}


def bench_data(model: str, rounds: int, tell: Callable[[str], None]) -> dict[str, object]:
    """`data=2` against DDP, the naive twin, and one process alone."""
    peers = ["ddp", "naive", "ideal", "apart"]
    seconds = _measure(model, "data=2", ["ours", *peers], rounds, tell)
    # one process does half of the batch: the ideal does twice its work in the same time
    found, aa = ratios(seconds, scale={"ideal": 1.0})
    return _answer("data", model, rounds, found, aa, seconds, {})


def bench_zero(model: str, rounds: int, tell: Callable[[str], None]) -> dict[str, object]:
    """`data=2,shard=parameters` against FSDP2: speed, and steady peak memory of a worker."""
    plan = "data=2,shard=parameters"
    seconds = _measure(model, plan, ["ours", "fsdp2"], rounds, tell)
    found, aa = ratios(seconds, scale={})
    memory = {}
    for name in ("ours", "fsdp2"):
        tell(f"memory of {name}")
        memory[f"{name}_steady_peak_bytes"] = _measure(model, plan, [name], 1, tell, memory=True)
    return _answer("zero", model, rounds, found, aa, seconds, memory)


def bench_tensor(model: str, rounds: int, tell: Callable[[str], None]) -> dict[str, object]:
    """`tensor=2` against torch's DTensor, both on the same batch."""
    seconds = _measure(model, "tensor=2", ["ours", "dtensor"], rounds, tell)
    found, aa = ratios(seconds, scale={})
    return _answer("tensor", model, rounds, found, aa, seconds, {}, shared=True)


def bench_overhead(tell: Callable[[str], None]) -> dict[str, object]:
    """What recording one collective costs, in a tight loop."""
    ring = Ring(None, rank=0, capacity=4096)
    count = 20_000
    costs = []
    for number in range(9):
        began = time.perf_counter()
        for _ in range(count):
            record = ring.start(
                Kind.COLLECTIVE, "gradient unit 3", op=Collective.ALL_REDUCE, group=2,
                payload_bytes=1 << 20, digest=77,
            )  # fmt: skip
            ring.end(record, waited_since_ns=1)
        costs.append((time.perf_counter() - began) / count)
        tell(f"round {number + 1} of 9")
    costs.sort()
    return {
        "name": "overhead",
        "model": "",
        "rounds": 9,
        "ratios": {},
        "aa": {"median": costs[4] / costs[4], "q1": costs[2] / costs[4], "q3": costs[6] / costs[4]},
        "workload": f"{count} records started and ended, one after another",
        "figures": {"record_s": costs[4], "limit_s": 20e-6},
    }


def _answer(
    name: str,
    model: str,
    rounds: int,
    found: Mapping[str, object],
    aa: Mapping[str, float],
    seconds: Mapping[str, Sequence[float]],
    more: Mapping[str, object],
    *,
    shared: bool = False,
) -> dict[str, object]:
    sequences, length = SIZES[model]
    medians = {key: sorted(values)[len(values) // 2] for key, values in seconds.items()}
    tokens = (1 if shared else 2) * sequences * length
    whose = "of both workers" if shared else "a worker"
    return {
        "name": name,
        "model": model,
        "rounds": rounds,
        "ratios": dict(found),
        "aa": dict(aa),
        "workload": f"{num_parameters(preset(model))} parameters, 2 workers of one thread, "
        f"{sequences} sequences of {length} tokens {whose} and step, AdamW fused, clipping 1.0"
        + (
            "; `ideal` is one single-thread process on one worker's part, so its ratio is the "
            "share of twice its speed"
            if "ideal" in found
            else ""
        ),
        "figures": {
            "seconds_a_step": medians,
            "tokens_per_s": tokens / medians["ours"],
            **more,
        },
    }


def _measure(
    model: str,
    plan: str,
    contestants: Sequence[str],
    rounds: int,
    tell: Callable[[str], None],
    *,
    memory: bool = False,
) -> dict[str, list[float]]:
    """Run two workers; returns what rank 0 measured."""
    from reparto.recover.supervise import Supervisor

    if model not in SIZES:
        raise UserError(f"`{model}` has no workload", where="--model", legal=", ".join(SIZES))
    folder = Path(tempfile.mkdtemp(prefix="reparto-bench-"))
    sequences, length = SIZES[model]
    for name in ("control", "logs"):
        (folder / name).mkdir(mode=0o700)
    question = {
        "model": model, "plan": plan, "contestants": list(contestants), "rounds": rounds,
        "steps": 2 if memory else STEPS[model], "sequences": sequences, "sequence_length": length,
        "memory": memory, "supervisor_pid": os.getpid(),
    }  # fmt: skip
    (folder / "question.json").write_text(json.dumps(question))
    supervisor = Supervisor(
        folder,
        world_size=2,
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
        found: dict[str, list[float]] = json.loads((folder / "seconds.json").read_text())
        return found
    except BaseException:
        supervisor.kill()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
