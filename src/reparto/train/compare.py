"""The promise that no plan changes the result, as a computation: same steps under two plans.

The reference writes down, for each step, the loss, every gradient and every updated weight with its
moments. The plan under test starts each step from the reference's weights and moments, because Adam
turns a rounding of a gradient near zero into a whole step, and compares what it gets.

With experts, routes are compared first (`train/routes.py`). Departures are measured by tensor:
|a - b| / |b| (Frobenius), |a| where b is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from reparto.comm.mesh import Mesh
from reparto.config.model import ModelConfig, decays
from reparto.config.plan import Plan
from reparto.config.run import Synchronize
from reparto.data.dataset import IGNORED, MapDataset, TokenSample
from reparto.data.loader import Loader, Microbatch, TokenCollate
from reparto.model.transformer import Decoder, initial_tensor
from reparto.parallel.compose import Parallel, apply
from reparto.partition.tensors import Rectangle
from reparto.train.agree import Agreed
from reparto.train.routes import Routes, compare_routes, gather_routes
from reparto.train.state import DTYPES, chain_of, model_of
from reparto.train.step import Trainer

#: precision -> (loss, gradient, weight), relative
TOLERANCES: Mapping[str, tuple[float, float, float]] = {
    "float64": (1e-12, 1e-10, 1e-10),
    "float32": (1e-6, 1e-5, 1e-5),
}

#: the model of `verify` without a run file
DEFAULT_MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is run under both plans."""

    model: ModelConfig
    source: str = "reparto"
    "who computes it: `model.source` of a run"
    dataset: MapDataset[TokenSample]
    sequence_length: int
    batch_size: int
    steps: int
    seed: int
    precision: str
    synchronize: Synchronize


@dataclass(kw_only=True)
class StepRecord:
    """What one step came to, whole tensors by global name."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    routes: dict[int, Routes] = field(default_factory=dict)
    "of experts, by layer"


@dataclass(kw_only=True)
class Departure:
    """The largest differences so far, and the first one beyond tolerance."""

    loss_rel: float = 0.0
    grad_rel: float = 0.0
    weight_rel: float = 0.0
    bitwise: bool = True
    route_flips: int = 0
    "tokens and layers that went to other experts than in the reference"
    first: dict[str, object] | None = field(default=None)


class SyntheticText:
    """Random tokens with uneven numbers of valid labels: sample i is a function of (seed, i)."""

    def __init__(self, *, vocab_size: int, sequence_length: int, samples: int, seed: int) -> None:
        self._vocab_size, self._length = vocab_size, sequence_length
        self._samples, self._seed = samples, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> TokenSample:
        generator = np.random.default_rng([self._seed, index])
        tokens = generator.integers(0, self._vocab_size, self._length + 1, dtype=np.int64)
        labels = tokens[1:].copy()
        share = (index % 5) / 5  # between none and four fifths of the labels are ignored
        labels[generator.random(self._length) < share] = IGNORED
        return TokenSample(sample_id=index, input_ids_S=tokens[:-1], labels_S=labels)


def run_steps(
    question: Question,
    plan: Plan,
    mesh: Mesh,
    *,
    reference: Callable[[int], StepRecord] | None,
    keep: Callable[[int, StepRecord], None] | None,
) -> Departure:
    """Run the question on this rank of `plan`.

    reference  step -> what the reference got; each step starts from the one before
    keep       called on every rank with each step's record (for the reference itself)
    """
    parallel, trainer = _build(question, plan, mesh)
    loader: Loader[TokenSample, Microbatch] = Loader(
        question.dataset,
        TokenCollate(sequence_length=question.sequence_length, pad_id=0),
        seed=question.seed,
        batch_size=question.batch_size,
        data_degree=plan.data,
        data_rank=mesh.grid.batch_index(mesh.rank),
        num_microbatches=plan.num_microbatches,
        workers=0,
    )
    names = [name for name, one in parallel.table.items() if one.tied_to is None]
    departure = Departure()
    if parallel.balance:
        parallel.balance.watch_routes()
    for step in range(1, question.steps + 1):
        if reference is not None and step > 1:
            _start_from(trainer, reference(step - 1), step - 1)
        found: dict[str, Tensor] = {}

        def look(agreed: Agreed, found: dict[str, Tensor] = found) -> None:
            for name in names:
                gradient = parallel.strategy.full_gradient(name)
                found[name] = gradient / max(1, agreed.tokens)

        if isinstance(parallel.model, Decoder):
            parallel.model.set_step(question.seed, step)
        position = loader.position
        result = trainer.step(next(loader), number=step, position=position, before_update=look)
        weights = {name: parallel.strategy.full_weight(name).clone() for name in names}
        routes = gather_routes(parallel.balance, mesh) if parallel.balance else {}
        if keep is not None:
            averages, squares = _moments(trainer, names)
            keep(step, StepRecord(loss=result.loss, gradients=found, weights=weights,
                                  exp_avg=averages, exp_avg_sq=squares,
                                  routes=routes))  # fmt: skip
        if reference is not None and _same_routes(
            departure, question, step, routes, reference(step).routes
        ):
            _measure(departure, question, parallel, step, result.loss, found, weights,
                     reference(step))  # fmt: skip
    loader.close()
    return departure


def _build(question: Question, plan: Plan, mesh: Mesh) -> tuple[Parallel, Trainer[Microbatch]]:
    model = model_of(question.source, question.model)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    dtype = DTYPES[question.precision]
    chain = chain_of(
        model,
        question.model,
        dtype=dtype,
        sequence_length=question.sequence_length,
        label_smoothing=question.synchronize.label_smoothing,
    )
    parallel = apply(
        model,
        mesh=mesh,
        plan=plan,
        blocks=chain.blocks,
        rules=chain.rules,
        costs=chain.costs,
        initial=lambda name: initial_tensor(
            name, shapes[name], seed=question.seed, config=question.model, dtype=dtype
        ),
        decays=decays,
        compute=dtype,
        master=dtype,
    )
    trainer: Trainer[Microbatch] = Trainer(
        parallel,
        chain=chain,
        synchronize=question.synchronize,
        steps=max(question.steps, 2),
    )
    trainer.make_optimizer()
    return parallel, trainer


def _cut(whole: Tensor, box: Rectangle) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def _start_from(trainer: Trainer[Microbatch], before: StepRecord, updates: int) -> None:
    strategy, optimizer = trainer.parallel.strategy, trainer.optimizer
    assert optimizer is not None
    with torch.no_grad():
        for one in strategy.owned():
            one.weight.copy_(_cut(before.weights[one.name], one.rectangle))
            optimizer.load(
                one.name,
                _cut(before.exp_avg[one.name], one.rectangle),
                _cut(before.exp_avg_sq[one.name], one.rectangle),
                updates,
            )
    strategy.publish()


def _moments(
    trainer: Trainer[Microbatch], names: list[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole moments; summed over ranks, each rank giving what it speaks for."""
    optimizer, parallel = trainer.optimizer, trainer.parallel
    assert optimizer is not None
    owned = {one.name: one for one in parallel.strategy.owned()}
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name in names:
        for which in (0, 1):
            whole = torch.zeros(parallel.table[name].shape, dtype=parallel.master)
            one = owned.get(name)
            if one is not None and one.counts:
                _cut(whole, one.rectangle).copy_(optimizer.moments(name)[which])
            parallel.mesh.world.all_reduce(whole, tag="inspect moment").wait()
            found[which][name] = whole
    return found


def _same_routes(
    departure: Departure,
    question: Question,
    step: int,
    found: Mapping[int, Routes],
    expected: Mapping[int, Routes],
) -> bool:
    """Note flips. False where all flips were ties: then numbers differ and nothing is wrong."""
    flips = compare_routes(found, expected, precision=question.precision)
    departure.route_flips += flips.total
    departure.bitwise &= not flips.total
    if flips.first_layer is not None:
        layer = question.model.expert_layers[flips.first_layer]
        _first(departure, tensor=f"model.layers.{layer}.mlp.gate.weight", step=step,
               stage="compute", collective="route")  # fmt: skip
    return not (flips.total and not flips.untied)


def _measure(
    departure: Departure,
    question: Question,
    parallel: Parallel,
    step: int,
    loss: float,
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    expected: StepRecord,
) -> None:
    limits = TOLERANCES[question.precision]
    off = abs(loss - expected.loss) / max(abs(expected.loss), 1e-300)
    departure.loss_rel = max(departure.loss_rel, off)
    departure.bitwise &= loss == expected.loss
    if not off <= limits[0]:
        _first(departure, tensor="loss", step=step, stage="compute", collective="word")
    for name in reversed(list(gradients)):
        off = relative(gradients[name], expected.gradients[name])
        departure.grad_rel = max(departure.grad_rel, off)
        departure.bitwise &= torch.equal(gradients[name], expected.gradients[name])
        if not off <= limits[1]:
            _first(departure, tensor=name, step=step, stage="synchronize",
                   collective=_carrier(parallel, name, "gradient"))  # fmt: skip
    for name, weight in weights.items():
        off = relative(weight, expected.weights[name])
        departure.weight_rel = max(departure.weight_rel, off)
        departure.bitwise &= torch.equal(weight, expected.weights[name])
        if not off <= limits[2]:
            _first(departure, tensor=name, step=step, stage="synchronize",
                   collective=_carrier(parallel, name, "weight"))  # fmt: skip


def relative(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; the numerator alone where expected is zero; nan counts."""
    scale = float(torch.linalg.vector_norm(expected))
    off = float(torch.linalg.vector_norm(found - expected))
    return off / scale if scale else off


def _first(departure: Departure, **where: object) -> None:
    if departure.first is None:
        departure.first = dict(where)


def _carrier(parallel: Parallel, name: str, what: str) -> str:
    """The tag of the collective that carries this tensor."""
    for index, layout in enumerate(parallel.layouts):
        if any(slot.name == name for slot in layout.slots):
            if parallel.plan.shard == "none":
                return f"gradient {len(parallel.layouts) - 1 - index}"
            return f"{what} unit {index}"
    return ""
