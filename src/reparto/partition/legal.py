"""Whether a plan can run on a model and a batch: decided before any process starts.

Arithmetic refuses, want of code does not. Every refusal names the field, its value, the legal
values and the nearest legal plan. That plan differs in the refused field alone unless its other
fields cannot run either; then those are repaired by the same rules, so that what is offered always
runs. What is merely wasteful (an uneven batch) comes back as a warning with its cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from reparto.config.model import ModelConfig
from reparto.config.plan import Plan
from reparto.errors import UserError
from reparto.partition.tokens import batch_slices
from reparto.schedule.rules import legal_chunks


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    """One field that cannot run."""

    field: str
    legal: str
    "legal values, in words"
    repaired: Plan
    "the plan with the nearest legal value of this field"


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
    if model is not None and sequence_length is not None:
        _refuse_to_drop_everything(model, sequence_length)
    refusal = _first(plan, model, sequence_length)
    if refusal is not None:
        raise UserError(
            f"{refusal.field}={_word(getattr(plan, refusal.field))} cannot run",
            where=f"partition.{refusal.field}",
            legal=refusal.legal,
            nearest=_repair(refusal.repaired, model, sequence_length).text,
        )
    if world_size is not None and world_size != plan.world_size:
        _refuse_world(plan, world_size, model, sequence_length)
    if batch_size is None:
        return ()
    warning = batch_slices(batch_size, plan.data, plan.num_microbatches).warning()
    return (warning,) if warning else ()


def _refuse_to_drop_everything(model: ModelConfig, sequence_length: int) -> None:
    """A capacity of less than one token a sequence leaves experts nothing to do."""
    if not model.num_experts or not model.capacity_factor:
        return
    if model.expert_capacity(sequence_length) < 1:
        even = sequence_length * model.num_experts_per_tok / model.num_experts
        raise UserError(
            f"{model.capacity_factor} x {even:g} tokens of a sequence an expert is less than one, "
            "so every token would be dropped",
            where="model.capacity_factor",
            legal=f"0 (no limit), or at least {1 / even:g}",
            nearest=f"{max(1.0, math.ceil(10 / even) / 10):g}",
        )


def _first(plan: Plan, model: ModelConfig | None, sequence_length: int | None) -> _Refusal | None:
    return next(_refusals(plan, model, sequence_length), None)


def _repair(plan: Plan, model: ModelConfig | None, sequence_length: int | None) -> Plan:
    """The plan with every field legal."""
    refusal = _first(plan, model, sequence_length)
    while refusal is not None:
        assert refusal.repaired != plan, "a repair must change the plan"
        plan = refusal.repaired
        refusal = _first(plan, model, sequence_length)
    return plan


def _refusals(
    plan: Plan, model: ModelConfig | None, sequence_length: int | None
) -> Iterator[_Refusal]:
    # what a field's legal values depend on comes before it, so repairs never go in circles
    if model is not None:
        yield from _tensor(plan, model)
    yield from _context(plan, model, sequence_length)
    yield from _folds(plan)
    if model is not None:
        yield from _experts(plan, model)
    yield from _chunks(plan)
    if model is not None:
        yield from _layers(plan, model)


def _folds(plan: Plan) -> Iterator[_Refusal]:
    if plan.data % plan.replicas:
        legal = _divisors(plan.data)
        yield _nearest_of(plan, "replicas", legal, "a divisor of data")
    elif plan.num_shards % plan.expert:
        legal = _divisors(plan.num_shards)
        yield _nearest_of(plan, "expert", legal, "a divisor of (data / replicas) x context")
    if plan.sequence_parallel and plan.tensor == 1:
        yield _changed(plan, "sequence_parallel", "true only with tensor > 1",
                       sequence_parallel=False)  # fmt: skip


def _experts(plan: Plan, model: ModelConfig) -> Iterator[_Refusal]:
    if plan.expert == 1:
        return
    if not model.num_experts:
        yield _changed(plan, "expert", "1, because this model has no experts", expert=1)
        return
    folds = _divisors(plan.num_shards)
    legal = [n for n in _divisors(model.num_experts) if n in folds]
    if plan.expert not in legal:
        what = f"a divisor of num_experts={model.num_experts} and of (data / replicas) x context"
        yield _nearest_of(plan, "expert", legal, what)


def _chunks(plan: Plan) -> Iterator[_Refusal]:
    if plan.pipeline == 1:
        if plan.chunks > 1:
            yield _changed(plan, "chunks", "1 without a pipeline", chunks=0)
        return
    rule = legal_chunks(plan.schedule)
    if plan.num_chunks not in rule:
        more = "; schedule=interleaved takes 2 or more" if rule.most == 1 else ""
        yield _changed(plan, "chunks", f"{rule} with schedule={plan.schedule}{more}",
                       chunks=rule.nearest(plan.num_chunks))  # fmt: skip


def _tensor(plan: Plan, model: ModelConfig) -> Iterator[_Refusal]:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    legal = [t for t in _divisors(kv_heads) if heads % t == 0]
    if plan.tensor not in legal:
        what = f"a divisor of num_key_value_heads={kv_heads} and num_attention_heads={heads}"
        yield _nearest_of(plan, "tensor", legal, what)


def _layers(plan: Plan, model: ModelConfig) -> Iterator[_Refusal]:
    chunks, layers = plan.num_chunks, model.num_hidden_layers
    if plan.pipeline == 1 or plan.pipeline * chunks <= layers:
        return
    most = layers // chunks
    if most:
        legal = f"1 to {most} ({layers} layers, {chunks} chunks a rank)"
        yield _changed(plan, "pipeline", legal, pipeline=most)
    else:
        legal = f"one with a single chunk a rank: {layers} layers are fewer than {chunks}"
        fewer = min(plan.pipeline, layers)
        yield _changed(plan, "schedule", legal, schedule="1f1b", chunks=0, pipeline=fewer)


def _context(
    plan: Plan, model: ModelConfig | None, sequence_length: int | None
) -> Iterator[_Refusal]:
    """`ring` cuts a sequence in two parts a rank; `ulysses` in one, and the heads as well."""
    if plan.context == 1:
        return
    ulysses = plan.context_mode == "ulysses"
    needs: list[str] = []
    legal: Iterable[int] = ()
    if sequence_length is not None:
        parts = 1 if ulysses else 2
        needs.append(f"{'twice ' * (not ulysses)}the degree divides {sequence_length=}")
        legal = [
            c for c in _divisors(sequence_length) if c == 1 or sequence_length % (parts * c) == 0
        ]
    if model is not None and ulysses:
        heads = model.num_key_value_heads // plan.tensor
        needs.append(f"the degree divides the {heads} KV heads of a tensor rank")
        legal = [c for c in _divisors(heads) if not sequence_length or c in legal]
    if needs and plan.context not in legal:
        yield _nearest_of(plan, "context", list(legal), " and ".join(needs))


def _refuse_world(
    plan: Plan, world_size: int, model: ModelConfig | None, sequence_length: int | None
) -> None:
    nearest = f"start {plan.world_size} ranks"
    needed = plan.pipeline * plan.context * plan.tensor
    if world_size % needed == 0:
        wider = plan.model_copy(update={"data": world_size // needed})
        nearest = _repair(wider, model, sequence_length).text
    raise UserError(
        f"the plan `{plan.text}` needs {plan.world_size} ranks, but {world_size} were started",
        where="partition",
        legal=f"{plan.world_size} ranks (pipeline x data x context x tensor)",
        nearest=nearest,
    )


def _changed(plan: Plan, field: str, legal: str, **change: object) -> _Refusal:
    return _Refusal(field=field, legal=legal, repaired=plan.model_copy(update=change))


def _nearest_of(plan: Plan, field: str, legal: list[int], what: str) -> _Refusal:
    nearest = _nearest(getattr(plan, field), legal)
    return _changed(plan, field, f"{what}: {_listed(legal)}", **{field: nearest})


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(value: int, legal: Iterable[int]) -> int:
    distance: Callable[[int], tuple[int, int]] = lambda one: (abs(one - value), one)  # noqa: E731
    return min(legal, key=distance)


def _listed(values: Iterable[int]) -> str:
    shown = list(values)
    return ", ".join(map(str, shown[:12])) + (", ..." if len(shown) > 12 else "")
