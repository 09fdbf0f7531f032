"""Whether a plan can run on a model and a batch: decided before any process starts.

Arithmetic refuses, want of code does not. Every refusal names the field, its value, the legal
values and the nearest legal plan, which differs in that field alone. What is merely wasteful (an
uneven batch, more workers than cores) comes back as a warning with its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from reparto.config.model import ModelConfig
from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.partition.tokens import batch_slices
from reparto.schedule.rules import check_request


def check_plan(
    plan: Plan,
    *,
    model: ModelConfig | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    world_size: int | None = None,
) -> tuple[str, ...]:
    """Raise `UserError` if the plan cannot run; returns warnings about what it wastes.

    world_size  ranks that a launcher has already started; None when reparto starts its own
    """
    _folds(plan)
    if plan.pipeline > 1:
        check_request(
            plan.schedule,
            pipeline=plan.pipeline,
            chunks=plan.num_chunks,
            num_microbatches=plan.num_microbatches,
        )
    elif plan.chunks > 1:
        _refuse(plan, "chunks", "1 without a pipeline", chunks=0)
    if model is not None:
        _model(plan, model)
    if plan.context > 1 and sequence_length is not None:
        _sequence(plan, sequence_length)
    if world_size is not None and world_size != plan.world_size:
        _refuse_world(plan, world_size)
    if batch_size is None:
        return ()
    warning = batch_slices(batch_size, plan.data, plan.num_microbatches).warning()
    return (warning,) if warning else ()


def _folds(plan: Plan) -> None:
    if plan.data % plan.replicas:
        legal = _divisors(plan.data)
        _refuse(plan, "replicas", f"a divisor of data: {_listed(legal)}",
                replicas=_nearest(plan.replicas, legal))  # fmt: skip
    folded = plan.num_shards
    if folded % plan.expert:
        legal = _divisors(folded)
        _refuse(plan, "expert", f"a divisor of (data / replicas) x context: {_listed(legal)}",
                expert=_nearest(plan.expert, legal))  # fmt: skip
    if plan.sequence_parallel and plan.tensor == 1:
        _refuse(plan, "sequence_parallel", "true only with tensor > 1", sequence_parallel=False)


def _model(plan: Plan, model: ModelConfig) -> None:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    legal = [t for t in _divisors(kv_heads) if heads % t == 0]
    if plan.tensor not in legal:
        _refuse(
            plan, "tensor",
            f"a divisor of num_key_value_heads={kv_heads} and num_attention_heads={heads}: "
            f"{_listed(legal)}",
            tensor=_nearest(plan.tensor, legal),
        )  # fmt: skip
    stages = plan.pipeline * plan.num_chunks
    layers = model.num_hidden_layers
    if plan.pipeline > 1 and stages > layers:
        chunks = plan.num_chunks
        most = layers // chunks
        if most:
            legal_text = f"1 to {most} ({layers} layers, {chunks} chunks a rank)"
            _refuse(plan, "pipeline", legal_text, pipeline=most)
        legal_text = f"one with a single chunk a rank: {layers} layers are fewer than {chunks}"
        fewer = min(plan.pipeline, layers)
        _refuse(plan, "schedule", legal_text, schedule="1f1b", chunks=0, pipeline=fewer)
    if plan.context > 1 and plan.context_mode == "ulysses":
        fitting = [c for c in _divisors(kv_heads // plan.tensor) if c]
        if plan.context not in fitting:
            _refuse(plan, "context", f"with ulysses a divisor of the KV heads a tensor rank has: "
                    f"{_listed(fitting)}", context=_nearest(plan.context, fitting))  # fmt: skip


def _sequence(plan: Plan, sequence_length: int) -> None:
    twice = 2 * plan.context if plan.context_mode == "ring" else plan.context
    if sequence_length % twice:
        legal = [c for c in _divisors(sequence_length // 2) if c <= sequence_length // 2]
        _refuse(plan, "context", f"twice the degree must divide sequence_length={sequence_length}: "
                f"{_listed(legal)}", context=_nearest(plan.context, legal))  # fmt: skip


def _refuse_world(plan: Plan, world_size: int) -> None:
    needed = plan.pipeline * plan.context * plan.tensor
    legal = f"{plan.world_size} ranks (pipeline x data x context x tensor)"
    if world_size % needed == 0:
        data = world_size // needed
        replicas = plan.replicas if data % plan.replicas == 0 else 1
        nearest = plan.model_copy(update={"data": data, "replicas": replicas}).text
    else:
        nearest = f"start {plan.world_size} ranks"
    raise UserError(
        f"the plan `{plan.text}` needs {plan.world_size} ranks, but {world_size} were started",
        where="partition",
        legal=legal,
        nearest=nearest,
    )


def _refuse(plan: Plan, field: str, legal: str, **change: object) -> None:
    raise UserError(
        f"{field}={getattr(plan, field)} cannot run".replace("=True", "=true"),
        where=f"partition.{field}",
        legal=legal,
        nearest=plan.model_copy(update=change).text,
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(value: int, legal: Iterable[int]) -> int:
    distance: Callable[[int], tuple[int, int]] = lambda one: (abs(one - value), one)  # noqa: E731
    return min(legal, key=distance)


def _listed(values: Iterable[int]) -> str:
    shown = list(values)
    return ", ".join(map(str, shown[:12])) + (", ..." if len(shown) > 12 else "")
