"""A plan under a stated memory limit of one worker: refused by arithmetic, with one that fits.

What is counted is the training state of the fullest rank (weights, gradients at their peak,
optimizer), by the same function as `plan --show`. It is a lower bound: activations, message buffers
and the process itself (about 180 MiB with torch) come on top. So a plan refused here cannot run,
while one let through may still meet the limit, which the kernel then enforces in the worker. An
estimate of the rest was rejected as a reason to refuse: it would turn away plans that do run.

The plan proposed as nearest keeps its state below half of the limit, to leave room for that rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from reparto.config.model import ModelConfig
from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.partition.legal import check_plan
from reparto.partition.show import decoder_map, view_rank
from reparto.units import human_bytes

#: share of the limit that the state of a proposed plan may take
_ROOM = 0.5
#: times more workers than asked for that a proposal may use
_MOST_WORKERS = 64


def fullest_state_bytes(
    plan: Plan, model: ModelConfig, *, compute: str = "float32", master: str = "float32"
) -> int:
    """Bytes of training state on the rank that holds most.

    The first rank of every pipeline position is asked: uneven cuts give the first ones more.
    """
    ranks = range(0, plan.world_size, plan.data * plan.context * plan.tensor)
    mapped = decoder_map(model)
    return max(
        view_rank(mapped, plan, rank, compute_dtype=compute, master_dtype=master).state.total
        for rank in ranks
    )


def refuse_above(
    limit_bytes: int,
    plan: Plan,
    model: ModelConfig,
    *,
    batch_size: int,
    sequence_length: int,
    compute: str = "float32",
    master: str = "float32",
) -> None:
    """Raise `UserError` if the state of a rank is larger than the limit: how much it needs, how
    much there is, and the plan with the fewest workers whose state leaves room."""
    needed = fullest_state_bytes(plan, model, compute=compute, master=master)
    if needed <= limit_bytes:
        return
    nearest = ""
    for other in _larger(plan):
        try:
            check_plan(other, model=model, batch_size=batch_size, sequence_length=sequence_length)
        except UserError:
            continue
        held = fullest_state_bytes(other, model, compute=compute, master=master)
        if held <= _ROOM * limit_bytes:
            nearest = f"--plan {other.text} ({human_bytes(held)} a worker)"
            break
    raise UserError(
        f"plan `{plan.text}` needs {human_bytes(needed)} a worker for weights, gradients and "
        f"optimizer alone; a worker may have {human_bytes(limit_bytes)}",
        where="compute.memory_gb",
        legal=f"more than {needed / (1 << 30):.2f} GiB, or a plan that shares the state out",
        nearest=nearest
        or "a smaller model: no plan of up to "
        f"{_MOST_WORKERS * plan.world_size} workers leaves room",
    )


def _larger(plan: Plan) -> Iterator[Plan]:
    """Plans that hold less a worker, fewest workers first; among equals sharding before cutting
    layers before cutting matrices, which is the order of growing communication."""
    times = 1
    while times <= _MOST_WORKERS:
        for tensor in _powers(times):
            for pipeline in _powers(times // tensor):
                data = plan.data * (times // tensor // pipeline)
                stages = plan.pipeline * pipeline
                yield plan.model_copy(
                    update={
                        "data": data,
                        "shard": "parameters" if data * plan.context > 1 else plan.shard,
                        "tensor": plan.tensor * tensor,
                        "pipeline": stages,
                        # a pipeline without microbatches leaves all its ranks but one idle
                        "num_microbatches": max(plan.num_microbatches, stages),
                    }
                )
        times *= 2


def _powers(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length()) if limit % (1 << n) == 0]
