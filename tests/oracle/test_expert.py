"""Expert parallelism where everything goes to one rank, or to opposite ones; right values by hand.

The layer has 2 experts and its router looks at the sign of the first element: rows that begin with
+8 go to expert 0, rows that begin with -8 to expert 1, with scores of nearly 1 and 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from harness import Outcome, Toy, departures, train_toy
from torch import Tensor, nn

from reparto.config.model import ModelConfig, model_config_of
from reparto.config.run import Synchronize
from reparto.model.moe import MixtureOfExperts
from reparto.parallel.expert import exchange_naively

D = 4
CONFIG = model_config_of(
    {"vocab_size": 2, "hidden_size": D, "intermediate_size": 6, "num_hidden_layers": 1,
     "num_attention_heads": 2, "num_experts": 2, "num_experts_per_tok": 1,
     "norm_topk_prob": False, "router_aux_loss_coef": 0.0}
)  # fmt: skip


class _Plain:
    counted_BS: Tensor | None = None
    token_numbers_BS: Tensor | None = None


class Layer(nn.Module):
    """A mixture on its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mlp = MixtureOfExperts(config)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = x_BSD + self.mlp(x_BSD, _Plain())
        return out


def _initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    found = {}
    for name, parameter in Layer(CONFIG).named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        found[f"0.{name}"] = drawn
    gate = torch.zeros(2, D, dtype=torch.float64)
    gate[0, 0], gate[1, 0] = 4.0, -4.0
    found["0.mlp.gate.weight"] = gate
    return found


TOY = Toy(
    make=lambda: nn.Sequential(Layer(CONFIG)),
    initial=_initial(),
    blocks=lambda model: list(model.children()),
    loss=None,
    losses=lambda output, batch, token_loss: (
        output.square().sum(-1), torch.ones(output.shape[:2], dtype=torch.bool)
    ),
    hidden_shape=lambda batch, block: tuple(batch.shape),
    rules={
        "0.mlp": "enter_leave",
        "0.mlp.gate": "partial",
        "0.mlp.experts": "experts",
        "0.mlp.experts.*.gate_proj": "column",
        "0.mlp.experts.*.up_proj": "column",
        "0.mlp.experts.*.down_proj": "row_partial",
    },
)  # fmt: skip


def _rows(signs: Sequence[int]) -> Tensor:
    """One sequence of a token for each sign."""
    generator = torch.Generator().manual_seed(len(signs))
    x_BSD = torch.randn(len(signs), 1, D, generator=generator, dtype=torch.float64)
    x_BSD[:, 0, 0] = 8.0 * torch.tensor(signs, dtype=torch.float64)
    return x_BSD


def _train(plan: str, signs: Sequence[int], *, clip: float = 0.0) -> list[Outcome]:
    """Rows in order: contiguous parts for ranks, then for microbatches."""
    whole = _rows(signs)
    ranks = next((int(p[5:]) for p in plan.split(",") if p.startswith("data=")), 1)
    parts = next((int(p[17:]) for p in plan.split(",") if p.startswith("num_micro")), 1)

    def batches(index: int, step: int) -> list[object]:
        return list(whole.chunk(ranks)[index].chunk(parts))

    synchronize = Synchronize(learning_rate=1e-2, warmup_steps=0, clip_norm=clip)
    return train_toy(TOY, plan, batches, synchronize=synchronize)


@pytest.mark.parametrize(
    ("plan", "signs"),
    [
        ("num_microbatches=2", [1, 1, -1, -1]),
        ("data=2", [1, 1, -1, -1]),
        ("data=2,expert=2", [1, 1, -1, -1]),
        ("data=2,expert=2,num_microbatches=2", [1, 1, -1, -1]),
    ],
)
def test_L60_the_balancing_loss_is_that_of_the_whole_batch(plan: str, signs: list[int]) -> None:
    for outcome in _train(plan, signs):
        load = outcome.results[0].load
        assert load is not None and load.counts == ((2, 2),)
        assert load.balance_loss == pytest.approx(1.0, abs=1e-9)  # a part alone would say 2.0


def test_L60_everything_at_one_expert_is_as_uneven_as_two_can_be() -> None:
    for outcome in _train("data=2,expert=2", [1, 1, 1, 1]):
        load = outcome.results[0].load
        assert load is not None and load.worst == 2.0 and load.idle == 1
        assert load.balance_loss == pytest.approx(2.0, abs=1e-9)


@pytest.mark.parametrize("signs", [[1, -1, 1, -1], [1, 1, -1, -1], [1, 1, 1, 1], [-1, -1, -1, -1]])
@pytest.mark.parametrize(
    "plan",
    ["data=2,expert=2", "data=2,expert=2,num_microbatches=2", "data=2,expert=2,shard=parameters",
     "data=4,expert=2,shard=gradients", "data=2,expert=2,recompute=full"],
)  # fmt: skip
def test_L62_router_and_expert_gradients_are_those_of_whole_experts(
    plan: str, signs: list[int]
) -> None:
    found = departures(_train(plan, signs), _train("data=1", signs)[0])
    assert max(found.loss, found.norm, found.gradient, found.weight) < 1e-12


@pytest.mark.parametrize("plan", ["data=2,expert=2", "data=2", "data=2,expert=2,shard=optimizer"])
def test_L22_the_norm_counts_every_expert_once_also_an_idle_one(plan: str) -> None:
    for signs in ([1, -1, 1, -1], [1, 1, 1, 1]):
        outcomes = _train(plan, signs, clip=0.5)
        gradients = outcomes[0].gradients[0].values()
        squares = sum(float(one.square().sum()) for one in gradients)
        for outcome in outcomes:
            assert outcome.results[0].norm == pytest.approx(squares**0.5, rel=1e-12)
    idle = outcomes[0].gradients[0]["0.mlp.experts.1.up_proj.weight"]
    assert float(idle.abs().sum()) == 0.0


def test_an_exchange_is_a_transpose() -> None:
    rows = [[torch.tensor([10 * r + s]) for s in range(3)] for r in range(3)]
    swapped = exchange_naively(rows)
    assert [[int(one) for one in row] for row in swapped] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
