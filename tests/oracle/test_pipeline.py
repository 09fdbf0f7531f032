"""Pipelines against one device, and the faults that were reported of them.

B batch   S sequence   D hidden
"""

from __future__ import annotations

import math
from itertools import pairwise, product

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
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from reparto.config.plan import Plan
from reparto.config.run import Synchronize
from reparto.errors import UserError
from reparto.parallel.compose import schedule_of
from reparto.parallel.gradients import Readiness, WeightGradients
from reparto.schedule.live import peaks_by_rank
from reparto.trace import Kind
from reparto.train.optim import clip_coefficient

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
SPLIT = ["zb-h1", "zb-v", "dualpipe-v"]


def slowly(*values: object) -> object:
    """A combination that `make test-all` runs; its neighbours stand for it in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


PLANS = [
    f"pipeline={p},schedule={schedule},num_microbatches={m}"
    for schedule, (p, m) in product(SCHEDULES, [(2, 1), (2, 4), (2, 3), (4, 2), (4, 6)])
]


@pytest.mark.parametrize("plan", PLANS)
def test_every_schedule_is_one_device(plan: str) -> None:
    """Microbatch counts below, equal to, above and not divisible by the number of stages."""
    case = Case(layers=6 if "pipeline=4" in plan else 3, steps=2)
    assert_bytes(assert_equal_to_one_device(case, plan))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [True, slowly(False)])
def test_biases_dropout_recompute_and_ties(schedule: str, tied: bool) -> None:
    case = Case(layers=4, bias=True, dropout=0.2, label_smoothing=0.1, tied=tied, steps=2)
    plan = f"pipeline=2,num_microbatches=3,schedule={schedule}"
    assert_bytes(assert_equal_to_one_device(case, plan + ",recompute=full"))
    assert_bytes(assert_equal_to_one_device(case, plan + ",recompute=selective"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "rest",
    [
        slowly("data=2"),
        "data=2,gradient_sync=microbatch",
        slowly("data=2,shard=optimizer"),
        slowly("data=2,shard=gradients,gradient_sync=microbatch"),
        "data=2,shard=parameters",
        slowly("data=2,shard=parameters,gradient_sync=microbatch"),
        slowly("data=4,replicas=2,shard=parameters"),
    ],
)
def test_with_data_and_sharding(schedule: str, rest: str) -> None:
    plan = f"pipeline=2,num_microbatches=3,schedule={schedule},{rest}"
    assert_bytes(assert_equal_to_one_device(Case(steps=2), plan))


def test_interleaving_with_more_chunks() -> None:
    case = Case(layers=7, steps=2)
    for plan in ("pipeline=2,chunks=3", "pipeline=3,chunks=3", "pipeline=2,chunks=4"):
        assert_equal_to_one_device(case, f"{plan},schedule=interleaved,num_microbatches=4")


@pytest.mark.parametrize("frozen", ["model.embed", "model.layers.0", "model.layers"])
@pytest.mark.parametrize("plan", ["pipeline=2,schedule=1f1b", "pipeline=2,schedule=zb-v"])
def test_frozen_stages(frozen: str, plan: str) -> None:
    case = Case(frozen=frozen, tied=False, steps=2)
    outcomes = assert_equal_to_one_device(case, plan + ",num_microbatches=3")
    assert_bytes(outcomes)
    assert all(not outcome.results[0].untouched for outcome in outcomes)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_plan_gives_the_same_bits(schedule: str) -> None:
    plan = f"pipeline=2,num_microbatches=3,schedule={schedule}"
    first, second = (train_decoder(Case(steps=2), plan) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for name, weight in one.weights[-1].items():
            assert torch.equal(weight, other.weights[-1][name]), name


def test_all_schedules_sum_in_one_order() -> None:
    """Backwards run in ascending microbatches everywhere, so gradients are the same bits."""
    plans = [f"pipeline=2,num_microbatches=4,schedule={one}" for one in ("gpipe", "1f1b")]
    first, second = (train_decoder(Case(steps=1), plan)[0] for plan in plans)
    for name, gradient in first.gradients[0].items():
        assert torch.equal(gradient, second.gradients[0][name]), name


@pytest.mark.parametrize("schedule", SPLIT)
def test_bf16_compute(schedule: str) -> None:
    case = Case(layers=4, compute=torch.bfloat16, master=torch.float32)
    plan = f"pipeline=2,num_microbatches=3,schedule={schedule}"
    outcomes, reference = train_decoder(case, plan), one_device(case)
    assert_bytes(outcomes)
    for outcome in outcomes:
        assert abs(outcome.results[0].loss - reference.results[0].loss) < 1e-2
        for name, gradient in outcome.gradients[0].items():
            expected = reference.gradients[0][name]
            assert (gradient - expected).norm() < 0.05 * expected.norm(), name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [1, 3, 8])
def test_live_activations_are_what_the_checker_counts(schedule: str, m: int) -> None:
    plan = f"pipeline=4,num_microbatches={m},schedule={schedule}"
    case = Case(layers=6, sequences=8, length=4, steps=1)
    expected = peaks_by_rank(schedule_of(Plan.parse(plan)))
    outcomes = train_decoder(case, plan)
    assert [outcome.peak_live for outcome in outcomes] == [one.live for one in expected]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_was_run_is_the_schedule(schedule: str) -> None:
    """F, B and W in the recorder's order are the list, less each W that is part of a full B."""
    plan = f"pipeline=2,num_microbatches=3,schedule={schedule}"
    lowered = schedule_of(Plan.parse(plan))
    for rank, outcome in enumerate(train_decoder(Case(steps=1), plan)):
        ran = [record.tag for record in outcome.records if record.kind == Kind.ACTION]
        row = [str(action) for action in lowered.ranks[rank]]
        computed = []
        for position, text in enumerate(row):
            fused = position and row[position - 1] == text.replace("W", "B")
            if text.strip("0123456789") in ("F", "B") or ("W" in text and not fused):
                computed.append(text)
        assert ran == computed


# --- any list of blocks --------------------------------------------------------------------------


class Widths(nn.Sequential):
    """Blocks between which the hidden state has other widths."""

    def __init__(self) -> None:
        widths = [3, 8, 5, 6, 2]
        with torch.device("meta"):
            super().__init__(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def widths() -> Toy:
    generator = torch.Generator().manual_seed(8)
    shapes = {name: one.shape for name, one in Widths().named_parameters()}
    initial = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in shapes.items()
    }

    def losses(output: Tensor, batch: Tensor, token_loss: object) -> tuple[Tensor, Tensor]:
        return output.square().sum(-1), torch.ones(len(batch), dtype=torch.bool)

    return Toy(
        make=Widths,
        initial=initial,
        blocks=lambda model: list(model.children()),
        loss=None,
        losses=losses,
        hidden_shape=lambda batch, block: (len(batch), [8, 5, 6, 2][block]),
    )


def rows(index: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * index + step)
    x_BD = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    return [x_BD[:1], x_BD[1:6], x_BD[6:]]  # uneven microbatches


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_any_module_given_as_blocks(schedule: str, shard: str) -> None:
    toy = widths()
    plan = f"pipeline=2,data=2,shard={shard},num_microbatches=3,schedule={schedule}"
    outcomes = train_toy(toy, plan, rows, steps=3)

    def whole(index: int, step: int) -> list[object]:
        return [torch.cat([torch.cat(rows(i, step)) for i in (0, 1)])]

    alone = train_toy(toy, "data=1", whole, steps=3)[0]
    for outcome in outcomes:
        for name, expected in alone.weights[-1].items():
            torch.testing.assert_close(outcome.weights[-1][name], expected, rtol=1e-11, atol=1e-13)


def test_fewer_blocks_than_stages_is_refused() -> None:
    toy = widths()
    with pytest.raises(UserError, match="4 layers cannot be cut in 6"):
        train_toy(toy, "pipeline=3,schedule=zb-v,num_microbatches=3", rows)


def test_a_weight_outside_every_block_is_refused() -> None:
    toy = widths()
    partial = Toy(
        make=toy.make,
        initial=toy.initial,
        blocks=lambda model: list(model.children())[1:],
        loss=None,
        losses=toy.losses,
        hidden_shape=toy.hidden_shape,
    )
    with pytest.raises(UserError, match=r"outside every block.*0\.weight"):
        train_toy(partial, "pipeline=2,num_microbatches=3", rows)


def test_a_model_without_blocks_is_refused() -> None:
    toy = widths()
    whole = Toy(
        make=toy.make,
        initial=toy.initial,
        blocks=lambda model: list(model.children()),
        loss=lambda model, batch: (model(batch).sum(), torch.tensor(1)),
    )
    with pytest.raises(UserError, match="needs the model as a list of blocks"):
        train_toy(whole, "pipeline=2,num_microbatches=3", rows)


# --- the queue between B and W -------------------------------------------------------------------


class Recorder:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def contributed(self, name: str, parameter: Tensor) -> None:
        self.events.append(f"+{name}")

    def place(self, name: str) -> None:
        return None

    def ready(self, name: str) -> None:
        self.events.append(f"!{name}")


class Two(nn.Module):
    """Two matmuls over one norm-like scale; the second weight is used as a table too."""

    def __init__(self, queue: WeightGradients) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(4, dtype=torch.float64))
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.queue = queue

    def forward(self, x_BD: Tensor) -> Tensor:
        inner_BD = self.queue.linear(x_BD * self.scale, self.first.weight, self.first.bias)
        table_BD = functional.embedding(torch.tensor([1, 2]), self.second.weight)
        return self.queue.linear(torch.tanh(inner_BD), self.second.weight, None) + table_BD


@pytest.mark.parametrize("again", [False, True])
def test_W_makes_what_B_put_off(again: bool) -> None:
    """Same gradients as one backward; contributions of matmuls fire in W, of the rest in B."""
    x_BD = torch.rand(2, 4, dtype=torch.float64)
    plain = Two(WeightGradients(enabled=False))
    plain(x_BD).square().sum().backward()

    queue = WeightGradients(enabled=True)
    model, sink = Two(queue), Recorder()
    readiness = Readiness(dict(model.named_parameters()), sink, deferred=queue)
    readiness.begin_window(1)
    forward = (lambda x: checkpoint(model, x, use_reentrant=False)) if again else model
    output = forward(x_BD.clone().requires_grad_()).square().sum()
    queue.put_off = True
    output.backward()
    queue.put_off = False
    assert set(sink.events) == {"+second.weight", "+scale", "!scale"}
    assert model.first.weight.grad is None and model.first.bias.grad is None
    waiting = queue.take()
    assert len(waiting) == 2
    queue.make(waiting)
    assert {one for one in sink.events if one[0] == "!"} == {
        "!scale", "!first.weight", "!first.bias", "!second.weight",
    }  # fmt: skip
    assert readiness.end_window() == ()
    for (name, one), (_, other) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=1e-15, msg=name)


def test_a_queued_weight_of_a_frozen_layer_is_not_made() -> None:
    queue = WeightGradients(enabled=True)
    model = Two(queue)
    model.first.weight.requires_grad_(False)
    model.second.weight.requires_grad_(False)
    queue.put_off = True
    model(torch.rand(2, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
    waiting = queue.take()
    queue.make(waiting)
    assert model.first.weight.grad is None and model.second.weight.grad is None
    assert model.first.bias.grad is not None


# --- reported faults -----------------------------------------------------------------------------


def test_L13_the_gradient_does_not_depend_on_the_pipeline() -> None:
    """16 valid tokens: ratio 1 between pipeline and none, not 16."""
    case = Case(sequences=2, length=16, steps=1)
    for plan in ("pipeline=2", "pipeline=2,num_microbatches=2,schedule=zb-v"):
        outcomes = assert_equal_to_one_device(case, plan)
        ratio = outcomes[0].results[0].norm / one_device(case).results[0].norm
        assert math.isclose(ratio, 1.0, rel_tol=1e-12)


def unit_gradients() -> Toy:
    """Two blocks with one weight each; every microbatch gives the first a gradient of 1."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(1, device="meta"))

        def forward(self, x: Tensor, context: object = None) -> Tensor:
            return x + self.w

    return Toy(
        make=lambda: nn.Sequential(Block(), Block()),
        initial={"0.w": torch.ones(1), "1.w": torch.ones(1)},
        blocks=lambda model: list(model.children()),
        loss=None,
        losses=lambda out, batch, loss: (out * batch, torch.ones(1, dtype=torch.bool)),
        hidden_shape=lambda batch, block: (1,),
        decays=lambda name: False,
    )


@pytest.mark.parametrize("schedule", [*SCHEDULES[:2], "zb-h1"])
@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_L14_accumulated_gradients_are_not_divided_again(schedule: str, sync: str) -> None:
    """Six micro-gradients of 1 sum to 6 and average 1 (bug: a moving average, 1.75)."""
    plan = f"pipeline=2,num_microbatches=6,schedule={schedule},gradient_sync={sync}"
    one = torch.ones(1, dtype=torch.float64)
    outcomes = train_toy(unit_gradients(), plan, lambda index, step: [one] * 6, steps=3)
    for outcome in outcomes:
        for step in range(3):
            assert float(outcome.gradients[step]["0.w"]) == 1.0
            assert float(outcome.gradients[step]["1.w"]) == 1.0
            assert outcome.results[step].num_tokens == 6


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [1, 2])
def test_L15_fewer_microbatches_than_stages(schedule: str, m: int) -> None:
    """Same loss as without a pipeline, and no hang: a fake rank waits at most a minute."""
    case = Case(layers=6, steps=1)
    plan = f"pipeline=4,num_microbatches={m},schedule={schedule}"
    assert_equal_to_one_device(case, plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rest", ["", slowly(",data=2,shard=parameters"), slowly(",tensor=2")])
def test_L18_tied_copies_stay_equal(schedule: str, rest: str) -> None:
    """Embedding and head on two ranks: equal bits after each of five steps, gradient of both uses.

    What the embedding's rank updates is compared with what the head's rank computes with.
    """
    case = Case(steps=5)
    plan = f"pipeline=2,num_microbatches=3,schedule={schedule}{rest}"
    outcomes = assert_equal_to_one_device(case, plan)
    for outcome in outcomes:
        for step, copies in enumerate(outcome.copies):
            for name, (position, copy) in copies.items():
                owner = next(
                    other.copies[step][name][1]
                    for other in outcomes
                    if name in other.copies[step]
                    and other.copies[step][name][0] != position
                    and other.place == outcome.place
                )
                assert torch.equal(copy, owner), (step, name)
    two_places = schedule not in ("zb-v", "dualpipe-v")
    assert all(bool(outcome.copies[0]) == two_places for outcome in outcomes)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_L19_a_tied_weight_counts_once_in_the_norm(schedule: str) -> None:
    """Tied gradient 1 + 2 = 3 over two stages, the rest 4: norm 5 (bug 5.83)."""

    class Scaled(nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(1, device="meta"))
            self.slope = slope

        def forward(self, x: Tensor, context: object = None) -> Tensor:
            return x + self.slope * self.w

    def make() -> nn.Module:
        model = nn.Sequential(Scaled(1.0), Scaled(4.0), Scaled(0.0), Scaled(2.0))
        model[3].w = model[0].w
        return model

    toy = Toy(
        make=make,
        initial={f"{i}.w": torch.ones(1) for i in range(3)},
        blocks=lambda model: list(model.children()),
        loss=None,
        losses=lambda out, batch, loss: (out + batch, torch.ones(1, dtype=torch.bool)),
        hidden_shape=lambda batch, block: (1,),
    )
    plan = f"pipeline=2,schedule={schedule}"
    outcomes = train_toy(toy, plan, lambda index, step: [torch.zeros(1, dtype=torch.float64)])
    for outcome in outcomes:
        assert float(outcome.gradients[0]["0.w"]) == 3.0
        assert outcome.results[0].norm == 5.0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_L20_stages_clip_by_one_norm(schedule: str) -> None:
    """Stage norms 3 and 4, limit 1: total 5, both scaled by 0.2 (bug: 1/3 and 1/4)."""

    class Scaled(nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(1, device="meta"))
            self.slope = slope

        def forward(self, x: Tensor, context: object = None) -> Tensor:
            return x + self.slope * self.w

    toy = Toy(
        make=lambda: nn.Sequential(Scaled(3.0), Scaled(4.0)),
        initial={"0.w": torch.ones(1), "1.w": torch.ones(1)},
        blocks=lambda model: list(model.children()),
        loss=None,
        losses=lambda out, batch, loss: (out + batch, torch.ones(1, dtype=torch.bool)),
        hidden_shape=lambda batch, block: (1,),
    )
    outcomes = train_toy(
        toy,
        f"pipeline=2,schedule={schedule}",
        lambda index, step: [torch.zeros(1, dtype=torch.float64)],
        synchronize=Synchronize(learning_rate=1e-2, warmup_steps=0, clip_norm=1.0),
    )
    for outcome in outcomes:
        assert outcome.results[0].norm == 5.0
        assert math.isclose(clip_coefficient(outcome.results[0].norm, 1.0), 0.2, rel_tol=1e-6)
        # both moments saw the scaled gradients: the squares of 0.6 and 0.8, times 1 - beta2
        for name, slope in (("0.w", 3.0), ("1.w", 4.0)):
            if name in outcome.moments:
                found = float(outcome.moments[name])
                assert math.isclose(found, 0.05 * (0.2 * slope) ** 2, rel_tol=1e-5)
    assert {name for outcome in outcomes for name in outcome.moments} == {"0.w", "1.w"}
