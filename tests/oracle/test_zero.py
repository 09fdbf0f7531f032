"""Sharding (ZeRO 1 to 3) against one device, and the faults that were reported of it."""

from __future__ import annotations

import hashlib
from itertools import product

import pytest
import torch
from harness import (
    Case,
    Toy,
    assert_bytes,
    assert_equal_to_one_device,
    one_device,
    train_decoder,
    train_toy,
)
from torch import Tensor, nn

from reparto.comm.mesh import single_mesh
from reparto.config.plan import Plan
from reparto.config.run import Synchronize
from reparto.parallel.compose import apply
from reparto.partition.tensors import Placement, uncovered

MODES = ["optimizer", "gradients", "parameters"]

PLANS = [
    f"data={data},shard={mode}{rest}"
    for data, mode, rest in product(
        (1, 2, 4),
        MODES,
        ("", ",num_microbatches=3", ",num_microbatches=2,gradient_sync=microbatch"),
    )
] + [
    "data=3,shard=parameters",
    "data=4,replicas=2,shard=optimizer",
    "data=4,replicas=2,shard=parameters",
    "data=4,replicas=2,shard=gradients,num_microbatches=3,gradient_sync=microbatch",
    "data=2,replicas=2,shard=gradients",
    "data=2,shard=parameters,recompute=full",
    "data=2,shard=gradients,recompute=selective",
    "data=2,shard=gradients,bucket_bytes=10000",
    "data=2,shard=optimizer,bucket_bytes=10000,num_microbatches=3",
]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_one_device(plan: str) -> None:
    assert_bytes(assert_equal_to_one_device(Case(), plan))


@pytest.mark.parametrize("mode", MODES)
def test_untied_head_and_biases(mode: str) -> None:
    case = Case(tied=False, bias=True)
    assert_bytes(assert_equal_to_one_device(case, f"data=4,shard={mode}"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["model.layers.1", "model.layers", "model.embed"])
def test_frozen_parameters_stay_and_are_not_waited_for(mode: str, frozen: str) -> None:
    case = Case(frozen=frozen, tied=False, steps=2)
    outcomes = assert_equal_to_one_device(case, f"data=2,shard={mode}")
    assert all(not result.untouched for result in outcomes[0].results)


@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_the_same_under_recompute_and_sharding(mode: str) -> None:
    assert_equal_to_one_device(Case(dropout=0.3), f"data=2,shard={mode},recompute=full")


@pytest.mark.parametrize("plan", ["data=4,shard=parameters", "data=4,replicas=2,shard=gradients"])
def test_the_pieces_of_all_ranks_are_the_tensor(plan: str) -> None:
    """Every element of every tensor is owned by exactly one shard of each replica."""
    outcomes = train_decoder(Case(steps=1), plan)
    copies = 2 if "replicas" in plan else 1
    for name, one in outcomes[0].table.items():
        if one.tied_to is not None:
            continue
        boxes = [box for outcome in outcomes for box in outcome.table[name].held]
        assert sum(box.numel for box in boxes) == copies * one.numel, name
        assert uncovered(one.shape, boxes[: len(boxes) // copies]) == 0, name


@pytest.mark.parametrize("mode", MODES)
def test_fewer_rows_than_ranks(mode: str) -> None:
    """Shards that keep nothing of a tensor take part all the same."""
    toy = Toy(
        make=lambda: nn.Linear(3, 2, device="meta"),
        initial={"weight": torch.ones(2, 3), "bias": torch.zeros(2)},
        blocks=lambda model: [model],
        loss=lambda model, x_BD: (model(x_BD).square().sum(), torch.tensor(len(x_BD))),
    )
    plan = f"data=4,shard={mode}"
    outcomes = train_toy(toy, plan, lambda index, step: [_rows(index)], steps=3)
    alone = train_toy(toy, "data=1", lambda index, step: [torch.cat(list(map(_rows, range(4))))],
                      steps=3)[0]  # fmt: skip
    for outcome in outcomes:
        for name, weight in outcome.weights[-1].items():
            torch.testing.assert_close(weight, alone.weights[-1][name], rtol=1e-12, atol=1e-14)


def _rows(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(2, 3, dtype=torch.float64, generator=generator)


# --- reported faults -----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data=2,shard=parameters", "data=4,replicas=2,shard=parameters"])
def test_L30_replicas_start_from_the_same_weights(plan: str) -> None:
    """Whole weights after a step of rate 0 hash alike on every rank and for 1, 2 and 4 ranks."""
    toy = Toy(
        make=lambda: nn.Linear(6, 10, device="meta"),
        initial={"weight": torch.arange(1.0, 61.0).view(10, 6), "bias": torch.ones(10)},
        blocks=lambda model: [model],
        loss=lambda model, x: (model(x).sum(), torch.tensor(1)),
    )
    still = Synchronize(learning_rate=1e-30, warmup_steps=0, weight_decay=0.0)
    hashes = {
        _digest(outcome.weights[0])
        for text in ("data=1", plan)
        for outcome in train_toy(
            toy, text, lambda index, step: [torch.ones(1, 6, dtype=torch.float64)],
            synchronize=still,
        )
    }  # fmt: skip
    assert hashes == {_digest({name: one.double() for name, one in toy.initial.items()})}


def _digest(weights: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return found.hexdigest()


class MatrixBiasNorm(nn.Module):
    """One parameter of each kind, and none of them in the loss's way."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.proj = nn.Linear(3, 5)
            self.norm = nn.LayerNorm(5)

    def forward(self, x_BD: Tensor) -> Tensor:
        out: Tensor = self.norm(self.proj(x_BD)) * 0.0
        return out


@pytest.mark.parametrize("mode", ["none", *MODES])
@pytest.mark.parametrize("data", [1, 2, 4])
def test_L54_matrices_decay_and_nothing_else_does(mode: str, data: int) -> None:
    """Zero gradients, rate 0.1, decay 0.1: matrices x 0.99, bias and norm x 1, for every cut."""
    toy = Toy(
        make=MatrixBiasNorm,
        initial={
            "proj.weight": torch.arange(1.0, 16.0).view(5, 3),
            "proj.bias": torch.full((5,), 2.0),
            "norm.weight": torch.full((5,), 3.0),
            "norm.bias": torch.full((5,), 4.0),
        },
        blocks=lambda model: list(model.children()),
        loss=lambda model, x_BD: (model(x_BD).sum(), torch.tensor(1)),
        decays=lambda name: name == "proj.weight",
    )
    outcomes = train_toy(
        toy,
        f"data={data},shard={mode}",
        lambda index, step: [torch.ones(1, 3, dtype=torch.float64)],
        synchronize=Synchronize(
            learning_rate=0.1, weight_decay=0.1, warmup_steps=0, learning_rate_schedule="constant"
        ),
    )
    for outcome in outcomes:
        for name, start in toy.initial.items():
            factor = 0.99 if name == "proj.weight" else 1.0
            expected = start.double() * factor
            torch.testing.assert_close(outcome.weights[0][name], expected, rtol=1e-14, atol=0)


class Outside(nn.Module):
    """A weight outside every block, a scalar, and a block of one element."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.scale = nn.Parameter(torch.empty(()))
            self.body = nn.Linear(4, 3)
            self.one = nn.Linear(3, 1, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        out: Tensor = self.one(self.body(x_BD)) * self.scale
        return out


@pytest.mark.parametrize("mode", ["none", *MODES])
@pytest.mark.parametrize("data", [2, 4])
def test_L57_parameters_outside_blocks_are_reduced_too(mode: str, data: int) -> None:
    """Different data on every rank; gradients hash alike on all and are the whole batch's."""
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    toy = Toy(
        make=Outside,
        initial={
            "scale": torch.tensor(1.5),
            "body.weight": torch.linspace(-1, 1, 12).view(3, 4),
            "body.bias": torch.zeros(3),
            "one.weight": torch.ones(1, 3),
        },
        blocks=lambda model: [model.body, model.one],
        loss=lambda model, x_BD: (model(x_BD).square().sum(), torch.tensor(len(x_BD))),
    )
    plan = f"data={data},shard={mode}"
    outcomes = train_toy(toy, plan, lambda index, step: [batch[index::data]], steps=2)
    alone = train_toy(toy, "data=1", lambda index, step: [batch], steps=2)[0]
    assert len({_digest(outcome.gradients[1]) for outcome in outcomes}) == 1
    for name, expected in alone.gradients[1].items():
        torch.testing.assert_close(outcomes[0].gradients[1][name], expected, rtol=1e-12, atol=1e-13)


def test_a_shard_of_one_rank_is_plain_training() -> None:
    """Degree 1 leaves no collective but the word behind, and one-device numbers."""
    for mode in MODES:
        outcome = assert_equal_to_one_device(Case(), f"data=1,shard={mode}")[0]
        assert outcome.seen == {}
        weights = outcome.weights[-1]["model.embed_tokens.weight"]
        assert torch.equal(weights, one_device(Case()).weights[-1]["model.embed_tokens.weight"])


def test_the_table_says_what_is_summed_and_what_is_copied() -> None:
    outcomes = train_decoder(Case(steps=1), "data=4,replicas=2,shard=parameters")
    one: Placement = outcomes[0].table["model.norm.weight"]
    assert set(one.partial_over) == {"replicas", "data", "context"}
    assert set(one.replicated_over) == {"pipeline", "replicas", "tensor"}
    assert not one.decays
    assert outcomes[0].table["lm_head.weight"].tied_to == "model.embed_tokens.weight"


def test_weights_outside_all_blocks_live_through_evaluation() -> None:
    """A head that is no block is used after the last block, with and without a graph."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)  # type: ignore[no-any-return]

    plain, model = Net(), Net()
    weights = {name: one.detach().clone() for name, one in plain.named_parameters()}
    parallel = apply(
        model, mesh=single_mesh(), plan=Plan(shard="parameters"), blocks=list(model.layers),
        initial=lambda name: weights[name], decays=lambda name: True,
    )  # fmt: skip
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
    strategy = parallel.parts[0]
    strategy.begin_step()
    strategy.begin_window(1)
    model(x).sum().backward()
    strategy.end_microbatch()
    strategy.close_window()
    strategy.finish_window()
    plain(x).sum().backward()
    for name, one in plain.named_parameters():
        assert torch.equal(parallel.strategy.full_gradient(name), one.grad)
