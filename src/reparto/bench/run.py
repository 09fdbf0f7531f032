"""`bench data | zero | tensor | pipeline | schedule | checkpoint | overhead`: what each answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from reparto.bench.measure import Load, Tell, load_of, measure
from reparto.bench.protocol import AGAIN, ratios
from reparto.bench.tensor_peers import CUTS
from reparto.schedule.rules import NAMES
from reparto.trace import Collective, Kind, Ring

#: each worker's own batch
SIZES = {
    name: Load(
        model=name, sequences=sequences, sequence_length=128, steps=steps, shared=False
    )
    for name, sequences, steps in (("1m", 8, 10), ("10m", 4, 3), ("50m", 4, 1))
}  # fmt: skip
#: one batch for a tensor group
TENSOR_SIZES = {
    name: Load(model=name, sequences=load.sequences, sequence_length=128, steps=load.steps,
               shared=True)
    for name, load in SIZES.items()
}  # fmt: skip
#: one batch in eight microbatches for a pipeline
PIPELINE_SIZES = {
    name: Load(model=name, sequences=sequences, sequence_length=128, num_microbatches=8,
               steps=steps, shared=True)
    for name, sequences, steps in (("1m", 32, 3), ("10m", 16, 2), ("50m", 8, 1))
}  # fmt: skip
#: rounds that choose among orders before the race
TRIAL_ROUNDS = 3


def bench_data(model: str, rounds: int, tell: Tell) -> dict[str, object]:
    """`data=2` against DDP, the naive twin, and one process alone."""
    load = load_of(model, SIZES)
    peers = ["ddp", "naive", "ideal", "apart"]
    seconds = measure(load, "data=2", ["ours", *peers], rounds, tell)
    # one process does half of the batch: the ideal does twice its work in the same time
    found, aa = ratios(seconds, scale={"ideal": 1.0})
    return _answer("data", load, rounds, found, aa, seconds, {})


def bench_zero(model: str, rounds: int, tell: Tell) -> dict[str, object]:
    """`data=2,shard=parameters` against FSDP2: speed, and steady peak memory of a worker."""
    load = load_of(model, SIZES)
    plan = "data=2,shard=parameters"
    seconds = measure(load, plan, ["ours", "fsdp2"], rounds, tell)
    found, aa = ratios(seconds, scale={})
    memory = {}
    for name in ("ours", "fsdp2"):
        tell(f"memory of {name}")
        memory[f"{name}_steady_peak_bytes"] = measure(load, plan, [name], 1, tell, memory=True)
    return _answer("zero", load, rounds, found, aa, seconds, memory)


def bench_tensor(model: str, rounds: int, tell: Tell) -> dict[str, object]:
    """`tensor=2` against torch's DTensor on the same batch; `dtensor` is its fastest plan."""
    load = load_of(model, TENSOR_SIZES)
    peers = [f"dtensor:{cut}" for cut in CUTS]
    seconds = measure(load, "tensor=2", ["ours", *peers], rounds, tell)
    found, aa = ratios(seconds, scale={})
    best = _fastest(seconds, "dtensor:")[0]
    more = {"dtensor": best.partition(":")[2]}
    return _answer("tensor", load, rounds, {"dtensor": found[best], **found}, aa, seconds, more)


def bench_pipeline(model: str, rounds: int, tell: Tell) -> dict[str, object]:
    """`pipeline=2` with the best of our orders against every order of torch.

    A few rounds first say which orders are fastest, of ours and of torch's with an even cut; on a
    noisy machine they cannot tell the first from the second, so two of each run the race, against
    all of torch's on our cut. `ratios` are those of the fastest, chosen by its median in the race.
    """
    load = load_of(model, PIPELINE_SIZES)
    orders = ["gpipe", "1f1b", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v"]
    tell("trial of our orders")
    plan = "pipeline=2"
    trial = measure(load, plan, [f"ours:{name}" for name in NAMES], TRIAL_ROUNDS, tell)
    tell("trial of torch's orders on an even cut")
    even = measure(load, plan, [f"torch_even:{name}" for name in orders], TRIAL_ROUNDS, tell)
    mine, evens = _fastest(trial, "ours:", 2), _fastest(even, "torch_even:", 2)
    peers = [f"torch:{name}" for name in orders]
    seconds = measure(load, plan, [*mine, *peers, *evens], rounds, tell)
    best, best_even = _fastest(seconds, "ours:")[0], _fastest(seconds, "torch_even:")[0]
    best_torch = _fastest(seconds, "torch:")[0]
    # the first is timed twice in every round, whichever of the two wins
    _, aa = ratios({"ours": seconds[mine[0]], AGAIN: seconds[AGAIN]}, scale={})
    found, _ = ratios({"ours": seconds[best], **seconds}, scale={})
    named = {"torch_best": found[best_torch], "torch_even": found[best_even],
             **{name: found[name] for name in peers}}  # fmt: skip
    more = {
        "ours": best.partition(":")[2],
        "torch_best": best_torch.partition(":")[2],
        "torch_even": best_even.partition(":")[2],
        "trial_seconds_a_step": {name: _median(values) for name, values in (trial | even).items()},
    }
    return _answer("pipeline", load, rounds, named, aa, {"ours": seconds[best], **seconds}, more)


def bench_overhead(model: str, rounds: int, tell: Tell) -> dict[str, object]:
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


def bench_checkpoint(model: str, rounds: int, tell: Tell) -> dict[str, object]:
    """What a save costs training, beside torch.distributed.checkpoint."""
    from reparto.bench.checkpoint import bench_checkpoint as found

    return found(model, rounds, tell)


def bench_schedule(model: str, rounds: int, tell: Tell) -> dict[str, object]:
    """Steps and bubbles of every schedule beside what `schedule/timing.py` says of them."""
    from reparto.bench.schedules import bench_schedule as found

    return found(model, rounds, tell)


#: name -> (model, rounds, what hears of progress) -> the object of `--json`
BENCHES: Mapping[str, Callable[[str, int, Tell], dict[str, object]]] = MappingProxyType(
    {
        "data": bench_data,
        "zero": bench_zero,
        "tensor": bench_tensor,
        "pipeline": bench_pipeline,
        "schedule": bench_schedule,
        "checkpoint": bench_checkpoint,
        "overhead": bench_overhead,
    }
)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _fastest(seconds: Mapping[str, Sequence[float]], prefix: str, count: int = 1) -> list[str]:
    """The `count` names with `prefix` whose median step is shortest, fastest first."""
    names = [name for name in seconds if name.startswith(prefix)]
    return sorted(names, key=lambda name: _median(seconds[name]))[:count]


def _answer(
    name: str,
    load: Load,
    rounds: int,
    found: Mapping[str, object],
    aa: Mapping[str, float],
    seconds: Mapping[str, Sequence[float]],
    more: Mapping[str, object],
) -> dict[str, object]:
    medians = {key: _median(values) for key, values in seconds.items()}
    return {
        "name": name,
        "model": load.model,
        "rounds": rounds,
        "ratios": dict(found),
        "aa": dict(aa),
        "workload": load.words
        + (
            "; `ideal` is one single-thread process on one worker's part, so its ratio is the "
            "share of twice its speed"
            if "ideal" in found
            else ""
        ),
        "figures": {
            "seconds_a_step": medians,
            "tokens_per_s": load.tokens / medians["ours"],
            **more,
        },
    }
