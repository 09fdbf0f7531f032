"""Data parallelism against one device, its naive twin, and the faults that were reported of it."""

from __future__ import annotations

import math

import pytest
import torch
from harness import (
    Case,
    Outcome,
    Toy,
    assert_bytes,
    assert_equal_to_one_device,
    one_device,
    train_decoder,
    train_toy,
)
from torch import Tensor, nn

from reparto.comm.fake import FakeWorld, run_threads
from reparto.comm.mesh import fake_mesh
from reparto.config.plan import Plan
from reparto.config.run import Synchronize
from reparto.parallel.data import reduce_naively
from reparto.partition.grid import Grid
from reparto.trace import Collective, Ring
from reparto.train.optim import clip_coefficient

PLANS = [
    "data=2",
    "data=4",
    "data=3",
    "num_microbatches=4",
    "data=2,num_microbatches=3",
    "data=2,num_microbatches=4",
    "data=2,num_microbatches=3,gradient_sync=microbatch",
    "data=2,bucket_bytes=10000",
    "data=4,num_microbatches=3,bucket_bytes=20000,gradient_sync=microbatch",
    "data=2,recompute=full",
    "data=2,num_microbatches=3,recompute=selective",
]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_one_device(plan: str) -> None:
    assert_bytes(assert_equal_to_one_device(Case(), plan))


def test_untied_head_and_biases() -> None:
    assert_bytes(assert_equal_to_one_device(Case(tied=False, bias=True), "data=2"))


def test_dropout_drops_the_same_elements_under_every_plan() -> None:
    """L27, data-parallel side: masks follow the sample, not the rank that holds it."""
    case = Case(dropout=0.3)
    assert one_device(case).results[0].loss != one_device(Case()).results[0].loss
    assert_equal_to_one_device(case, "data=4")
    assert_equal_to_one_device(case, "data=2,num_microbatches=3,recompute=full")


def test_more_ranks_than_some_rank_has_tokens_for() -> None:
    """One sequence a rank, and one of them asks nothing at all: it is a term like any other."""
    assert_equal_to_one_device(Case(sequences=6, steps=2), "data=6")


def test_frozen_parameters_stay_and_are_not_waited_for() -> None:
    outcomes = assert_equal_to_one_device(Case(frozen="model.layers.1"), "data=2")
    assert all(not result.untouched for result in outcomes[0].results)


def test_the_same_plan_gives_the_same_bits() -> None:
    first, second = (train_decoder(Case(), "data=4,num_microbatches=3") for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for name, weight in one.weights[-1].items():
            assert torch.equal(weight, other.weights[-1][name]), name


def test_ranks_hold_the_same_bits_after_every_step() -> None:
    outcomes = train_decoder(Case(), "data=4")
    for outcome in outcomes[1:]:
        for step, weights in enumerate(outcome.weights):
            for name, weight in weights.items():
                assert torch.equal(weight, outcomes[0].weights[step][name]), (step, name)


def test_the_naive_twin_reduces_to_the_same_sums() -> None:
    """One all_reduce a parameter after backward, against buckets during it: bit for bit."""
    gradients: dict[int, list[Tensor]] = {}

    def naive(rank: int, world: FakeWorld) -> None:
        ring = Ring(None, rank=rank, capacity=256)
        mesh = fake_mesh(Grid.of(Plan(data=3)), rank, world=world, ring=ring)
        layer = nn.Linear(5, 7, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(35.0).view(7, 5) / 35)
            layer.bias.zero_()
        _toy_loss(layer, _toy_input(rank))[0].backward()
        reduce_naively(list(layer.parameters()), mesh.group("reduce"))
        gradients[rank] = [p.grad for p in layer.parameters() if p.grad is not None]

    run_threads(3, naive)
    toy = Toy(
        make=lambda: nn.Linear(5, 7, device="meta"),
        initial={"weight": torch.arange(35.0).view(7, 5) / 35, "bias": torch.zeros(7)},
        blocks=lambda model: [model],
        loss=lambda model, batch: _toy_loss(model, batch),
    )
    outcomes = train_toy(toy, "data=3", lambda index, step: [_toy_input(index)])
    for rank, outcome in enumerate(outcomes):
        tokens = outcome.results[0].num_tokens
        assert torch.equal(outcome.gradients[0]["weight"], gradients[rank][0] / tokens)
        assert torch.equal(outcome.gradients[0]["bias"], gradients[rank][1] / tokens)


def _toy_input(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 5, dtype=torch.float64, generator=generator)


def _toy_loss(model: nn.Module, x_BD: Tensor) -> tuple[Tensor, Tensor]:
    return model(x_BD).square().sum(), torch.tensor(x_BD.shape[0])


# --- reported faults -----------------------------------------------------------------------------


class Scalars(nn.Module):
    """Named scalar weights; a microbatch is `{name: gradient}` and a number of tokens."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(1, device="meta")))

    def forward(self, slopes: dict[str, float]) -> Tensor:
        return torch.stack([getattr(self, n).sum() * slope for n, slope in slopes.items()]).sum()


def scalars(*names: str, start: float = 1.0) -> Toy:
    """The loss of a microbatch is sum of gradient * weight, so gradients are what it says.

    Nothing decays, so a weight without a gradient stays."""

    def loss(model: nn.Module, batch: tuple[dict[str, float], int]) -> tuple[Tensor, Tensor]:
        return model(batch[0]), torch.tensor(batch[1])

    return Toy(
        make=lambda: Scalars(*names),
        initial={name: torch.full((1,), start) for name in names},
        blocks=lambda model: [model],
        loss=loss,
        decays=lambda name: False,
    )


def gradient(outcome: Outcome, name: str, step: int = 0) -> float:
    """The sum over ranks and microbatches, not divided by tokens."""
    return float(outcome.gradients[step][name]) * outcome.results[step].num_tokens


@pytest.mark.parametrize(
    ("plan", "split"),
    [
        ("data=1", lambda index: [({"w": 12.0}, 8)]),
        ("num_microbatches=2", lambda index: [({"w": 6.0}, 6), ({"w": 6.0}, 2)]),
        (
            "num_microbatches=2,gradient_sync=microbatch",
            lambda index: [({"w": 6.0}, 6), ({"w": 6.0}, 2)],
        ),
    ],
)
def test_L01_loss_does_not_depend_on_accumulation(plan: str, split: object) -> None:
    """6 tokens at loss 1 and 2 tokens at loss 3 are 12 / 8 = 1.5, not the mean of means 2.0."""
    outcome = train_toy(scalars("w"), plan, lambda index, step: split(index))[0]  # type: ignore[operator]
    assert outcome.results[0].loss == 1.5
    assert float(outcome.gradients[0]["w"]) == 1.5


@pytest.mark.parametrize("accumulation", [1, 2, 3, 4, 6])
def test_L01_one_gradient_for_every_accumulation(accumulation: int) -> None:
    assert_equal_to_one_device(Case(), f"num_microbatches={accumulation}")


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_L02_a_rank_with_few_tokens_has_little_weight(shard: str) -> None:
    """5 tokens at loss 1.0 and 1 token at loss 7.0: (5 + 7) / 6 = 2.0, not 4.0."""
    batches = {0: ({"w": 5.0}, 5), 1: ({"w": 7.0}, 1)}
    outcomes = train_toy(
        scalars("w"), f"data=2,shard={shard}", lambda index, step: [batches[index]]
    )
    for outcome in outcomes:
        assert outcome.results[0].loss == 2.0
        assert outcome.results[0].num_tokens == 6
        assert float(outcome.gradients[0]["w"]) == 2.0


@pytest.mark.parametrize("plan", ["num_microbatches=4", "data=2,num_microbatches=2", "data=4"])
def test_L03_the_smoothed_loss_counts_tokens_too(plan: str) -> None:
    case = Case(sequences=8, label_smoothing=0.1, steps=2)
    assert_equal_to_one_device(case, plan)
    ratio = train_decoder(case, plan)[0].results[0].norm / one_device(case).results[0].norm
    assert math.isclose(ratio, 1.0, rel_tol=1e-12)


def test_L09_no_microbatch_leaks_into_the_next_update() -> None:
    """126 microbatches of gradient 1, eight an update: each update sees its own eight."""
    toy, whole = scalars("w"), 126 // 8
    outcome = train_toy(
        toy, "num_microbatches=8", lambda index, step: [({"w": 1.0}, 1)] * 8, steps=whole
    )[0]
    assert [gradient(outcome, "w", step) for step in range(whole)] == [8.0] * whole
    assert sum(result.num_tokens for result in outcome.results) == 8 * whole
    rest = train_toy(toy, "num_microbatches=6", lambda index, step: [({"w": 1.0}, 1)] * 6)[0]
    assert 8 * whole + rest.results[0].num_tokens == 126


def test_L09_a_step_takes_exactly_its_microbatches() -> None:
    with pytest.raises(AssertionError):
        train_toy(scalars("w"), "num_microbatches=8", lambda index, step: [({"w": 1.0}, 1)] * 7)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_L10_every_microbatch_is_reduced(shard: str, sync: str) -> None:
    """Rank totals 4 and 7 over 2 tokens: both ranks hold 5.5 (bug 4.0 and 7.0)."""
    batches = {0: [({"w": 1.0}, 1), ({"w": 3.0}, 0)], 1: [({"w": 5.0}, 1), ({"w": 2.0}, 0)]}
    plan = f"data=2,shard={shard},num_microbatches=2,gradient_sync={sync}"
    outcomes = train_toy(scalars("w"), plan, lambda index, step: list(batches[index]))
    assert [float(outcome.gradients[0]["w"]) for outcome in outcomes] == [5.5, 5.5]


@pytest.mark.parametrize(("sync", "expected"), [("step", 1), ("microbatch", 4)])
def test_L11_one_reduction_a_bucket_and_step(sync: str, expected: int) -> None:
    plan = f"data=2,num_microbatches=4,bucket_bytes=20000,gradient_sync={sync}"
    outcomes = train_decoder(Case(steps=2), plan)
    reductions: dict[str, int] = {}
    for record in outcomes[0].records:
        if record.step == 2 and record.op == Collective.ALL_REDUCE:
            reductions[record.tag] = reductions.get(record.tag, 0) + 1
    assert len(reductions) > 2  # several buckets, or the test shows nothing
    assert set(reductions.values()) == {expected}


class Tied(nn.Module):
    """Two modules over one weight, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scalars("w")
        self.second = Scalars("w")
        self.second.w = self.first.w
        self.other = Scalars("w")

    def forward(self) -> Tensor:
        return self.first({"w": 1.0}) + self.second({"w": 2.0}) + self.other({"w": 4.0})


@pytest.mark.parametrize(
    "plan", ["data=1", "data=2", "data=2,shard=optimizer", "data=2,shard=parameters"]
)
def test_L19_a_tied_weight_counts_once_in_the_norm(plan: str) -> None:
    """Tied gradient 1 + 2 = 3, the other 4: norm 5."""

    toy = Toy(
        make=Tied,
        initial={"first.w": torch.ones(1), "other.w": torch.ones(1)},
        blocks=lambda model: list(model.children()),
        loss=lambda model, tokens: (model(), torch.tensor(tokens)),
    )
    batches = {0: [1], 1: [0]}
    outcomes = train_toy(toy, plan, lambda index, step: list(batches[index]))
    for outcome in outcomes:
        assert outcome.results[0].norm == 5.0 * len(outcomes)  # every rank adds the same gradient


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_L23_the_small_term_is_added_once(shards: int) -> None:
    """Norm 1, clip 1: the coefficient is 1 / (1 + 1e-6), whatever the number of shards."""
    names = [f"w{i}" for i in range(8)]
    slope = 1 / math.sqrt(8)
    synchronize = Synchronize(learning_rate=1e-2, warmup_steps=0, clip_norm=1.0)
    outcomes = train_toy(
        scalars(*names),
        f"data={shards},shard=optimizer",
        lambda index, step: [(dict.fromkeys(names, slope / shards), 1 if index == 0 else 0)],
        synchronize=synchronize,
    )
    for outcome in outcomes:
        assert math.isclose(outcome.results[0].norm, 1.0, rel_tol=1e-12)
        coefficient = clip_coefficient(outcome.results[0].norm, 1.0)
        assert math.isclose(coefficient, 1 / (1 + 1e-6), rel_tol=1e-12)


@pytest.mark.parametrize("plan", ["data=4", "data=4,num_microbatches=4", "num_microbatches=4"])
def test_L41_L42_the_rate_follows_updates_alone(plan: str) -> None:
    """Cosine over 10 updates: half the base after five, zero after ten, on any number of ranks and
    microbatches."""
    many = Plan.parse(plan).num_microbatches
    synchronize = Synchronize(
        learning_rate=0.5, warmup_steps=0, learning_rate_schedule="warmup-cosine", final_share=0.0
    )
    outcomes = train_toy(
        scalars("w"),
        plan,
        lambda index, step: [({"w": 1.0}, 1)] * many,
        steps=10,
        synchronize=synchronize,
    )
    for outcome in outcomes:
        rates = [result.learning_rate for result in outcome.results]
        assert math.isclose(rates[4], 0.25, rel_tol=1e-12)
        assert rates[9] == 0.0
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_L53_small_terms_survive_bf16(shard: str, sync: str) -> None:
    """1 + 256 terms of 2^-9 is 1.5; summed in bf16 it stays 1.0."""
    slopes = [1.0] + [2.0**-9] * 256
    outcomes = train_toy(
        scalars("w"),
        f"data=1,shard={shard},num_microbatches=257,gradient_sync={sync}",
        lambda index, step: [({"w": slope}, 1 if i == 0 else 0) for i, slope in enumerate(slopes)],
        compute=torch.bfloat16,
        master=torch.float32,
    )
    assert float(outcomes[0].gradients[0]["w"]) == 1.5


def test_L53_between_ranks_too() -> None:
    outcomes = train_toy(
        scalars("w"),
        "data=4,num_microbatches=64",
        lambda index, step: [
            ({"w": 2.0**-9 if index or i else 1.0}, 0 if index or i else 1) for i in range(64)
        ],
        compute=torch.bfloat16,
        master=torch.float32,
    )
    for outcome in outcomes:
        assert float(outcome.gradients[0]["w"]) == 1.0 + 255 * 2.0**-9


@pytest.mark.parametrize("plan", ["data=2", "data=2,shard=parameters", "data=2,num_microbatches=3"])
def test_bf16_compute_keeps_float32_sums_updates_and_moments(plan: str) -> None:
    """Weights move by less than bf16 can show and still move: the master is float32."""
    case = Case(compute=torch.bfloat16, master=torch.float32)
    outcomes, reference = train_decoder(case, plan), one_device(case)
    assert_bytes(outcomes)
    for outcome in outcomes:
        assert abs(outcome.results[0].loss - reference.results[0].loss) < 1e-2
        for name, weight in outcome.weights[-1].items():
            assert weight.dtype == torch.float32
            assert (weight - reference.weights[-1][name]).abs().max() < 0.02, name
    changed = (
        outcomes[0].weights[1]["model.norm.weight"] - outcomes[0].weights[0]["model.norm.weight"]
    )
    assert changed.abs().max() > 0


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_L56_unused_parameters_are_named_and_never_hung_on(shard: str) -> None:
    """Two branches, one in the loss; rank 0 takes the other one in step 4. Six clean steps."""

    def batch(index: int, step: int) -> list[object]:
        name = "b" if step == 4 and index == 0 else "a"
        return [({name: 1.0}, 1), ({"a": 1.0}, 1)]

    outcomes = train_toy(
        scalars("a", "b", "c"), f"data=2,shard={shard},num_microbatches=2", batch, steps=6
    )
    for rank, outcome in enumerate(outcomes):
        assert len(outcome.results) == 6
        for step, result in enumerate(outcome.results, start=1):
            took_other = step == 4 and rank == 0
            assert result.untouched == (("c",) if took_other else ("b", "c"))
        assert gradient(outcome, "b", 0) == 0.0
        assert gradient(outcome, "b", 3) == 1.0
        assert torch.equal(outcome.weights[-1]["c"], outcome.weights[0]["c"])


@pytest.mark.parametrize("plan", ["data=2", "data=4,num_microbatches=2"])
def test_L29_L30_every_rank_starts_from_the_same_weights(plan: str) -> None:
    """A first step with learning rate about 0 leaves the initial weights: equal bits everywhere."""
    case = Case(steps=1)
    reference = one_device(case)
    outcomes = train_decoder(case, plan)
    assert abs(reference.results[0].loss - math.log(case.vocabulary)) < 0.1
    for outcome in outcomes:
        assert math.isclose(outcome.results[0].loss, reference.results[0].loss, rel_tol=1e-12)
