"""Any module under every data plan: equal to one process and to a loop written by hand.

Ranks are threads, weights float64; a tolerance of 1e-10 is what `tests/oracle/harness.py` argues
for. Modules fill their weights from a generator of their own, because threads share torch's.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reparto import Session, Synchronize, UserError
from reparto.api.module import ModuleTrainer
from reparto.api.probe import candidates, find_blocks
from reparto.comm.fake import FakeWorld, run_threads
from reparto.comm.mesh import fake_mesh
from reparto.config.plan import Plan
from reparto.data.dataset import MapDataset
from reparto.errors import Fault
from reparto.evidence.ledger import create_key
from reparto.partition.grid import Grid
from reparto.partition.tokens import ShuffledOrder
from reparto.trace import Ring

torch.set_num_threads(1)

TOLERANCE = 1e-10
#: against torch's own clipping: our factor goes into the fused kernel as a float32 (6e-8 relative),
#: of which Adam, blind to scale, lets through what eps is of the gradient
BY_HAND = 1e-7
PLANS = (
    "data=2",
    "data=2,num_microbatches=2",
    "data=2,shard=optimizer",
    "data=2,shard=gradients",
    "data=2,shard=parameters",
    "data=2,shard=gradients,num_microbatches=3,gradient_sync=microbatch",
    "data=2,shard=parameters,num_microbatches=2",
    "data=4,replicas=2,shard=parameters",
)
STEADY = Synchronize(learning_rate=1e-2, learning_rate_schedule="constant", warmup_steps=0)


# --- modules, data, losses -----------------------------------------------------------------------


def filled(model: nn.Module, seed: int = 7) -> nn.Module:
    """Weights that depend on the seed alone, not on a generator that threads share."""
    generator = torch.Generator().manual_seed(seed)
    for one in model.parameters():
        if one.is_floating_point():
            one.data.copy_(torch.randn(one.shape, generator=generator) * 0.4)
    return model


class Rows:
    """Sample i: eight features and what is asked of them."""

    def __init__(self, count: int = 23) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 8, generator=generator, dtype=torch.float64)
        self.y = (self.x[:, :1] * self.x[:, 1:2]).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Words:
    """Sample i: a row of ids; the next id is asked, at an uneven number of places."""

    def __init__(self, count: int = 19) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 11, (count, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        row = self.ids[index].clone()
        row[1 + index % 5 :] = row[1 + index % 5 :].where(torch.arange(5 - index % 5) < 2, -100)
        return row


def squares(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return ((model(batch[0]) - batch[1]) ** 2).sum(), batch[1].numel()


def next_word(model: nn.Module, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    labels_BS = ids_BS[:, 1:]
    logits_BSV = model(ids_BS[:, :-1].clamp(min=0))
    total = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
    return total, (labels_BS != -100).sum()


def mlp() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5), nn.Tanh(),
                                nn.Linear(5, 1)))  # fmt: skip


class Tied(nn.Module):
    """The head is the embedding: as a module of its own, or read from outside of it."""

    def __init__(self, *, module: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 11, bias=False) if module else None
        if self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, ids_BS: Tensor) -> Tensor:
        h_BSD = self.embedding(ids_BS)
        for layer in self.layers:
            h_BSD = h_BSD + torch.tanh(layer(h_BSD)) * self.scale
        if self.head is not None:
            return self.head(h_BSD)
        return F.linear(h_BSD, self.embedding.weight)


def tied_module() -> nn.Module:
    return filled(Tied(module=True))


def tied_read() -> nn.Module:
    return filled(Tied(module=False))


class Branches(nn.Module):
    """One branch is never in the loss, one layer is frozen, one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 6)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.twice(torch.tanh(self.twice(self.frozen(x)))))


def branches() -> nn.Module:
    return filled(Branches())


class Recurrent(nn.Module):
    """Torch's LSTM keeps a list of its weights; its attention reads a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.cells(x.view(len(x), 2, 4))
        h, _ = self.attention(h, h, h)
        return self.out(h[:, -1])


def recurrent() -> nn.Module:
    return filled(Recurrent())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., object], MapDataset[object]]] = {
    "mlp": (mlp, squares, Rows()),
    "tied module": (tied_module, next_word, Words()),
    "tied read": (tied_read, next_word, Words()),
    "branches": (branches, squares, Rows()),
    "recurrent": (recurrent, squares, Rows()),
}


# --- running -------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluation: tuple[float, int] = (0.0, 0)


def on_ranks(plan: str, work: Callable[[Session], None], **options: object) -> None:
    """`work(session)` on every rank of a plan, as threads."""
    parsed = Plan.parse(plan)
    if parsed.world_size == 1:
        work(Session(parsed, **options))  # type: ignore[arg-type]
        return

    def rank(number: int, world: FakeWorld) -> None:
        ring = Ring(None, rank=number, capacity=8192)
        mesh = fake_mesh(Grid.of(parsed), number, world=world, ring=ring)
        work(Session(parsed, mesh=mesh, **options))  # type: ignore[arg-type]

    run_threads(parsed.world_size, rank)


def train(name: str, plan: str, *, steps: int = 3, batch_size: int = 7) -> list[Seen]:
    build, loss, dataset = CASES[name]
    seen = [Seen() for _ in range(Plan.parse(plan).world_size)]

    def work(session: Session) -> None:
        trainer = session.trainer(
            build, loss, dataset, steps=steps, batch_size=batch_size, precision="float64",
            synchronize=STEADY, loader_workers=0,
        )  # type: ignore[arg-type]  # fmt: skip
        mine = seen[session.rank]
        for result in trainer:
            mine.losses.append(result.loss)
            mine.norms.append(result.norm)
            mine.counts.append(result.num_tokens)
        mine.evaluation = trainer.evaluate(dataset)
        mine.weights = trainer.full_state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(plan, work)
    return seen


def by_hand(name: str, *, steps: int = 3, batch_size: int = 7) -> Seen:
    """The same training with torch alone: whole batches, torch's AdamW, torch's clipping."""
    build, loss, dataset = CASES[name]
    model = build().double()
    order = ShuffledOrder(seed=1, num_samples=len(dataset))
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.dim() >= 2], "weight_decay": STEADY.weight_decay},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=STEADY.learning_rate, betas=(STEADY.beta1, STEADY.beta2), eps=STEADY.eps
    )
    collate = torch.utils.data.default_collate
    seen = Seen()
    for step in range(steps):
        ids = order.at(range(step * batch_size, (step + 1) * batch_size))
        total, count = loss(model, collate([dataset[index] for index in ids]))  # type: ignore[misc]
        optimizer.zero_grad()
        for one in trained:
            one.grad = torch.zeros_like(one)  # an unused weight decays all the same
        (total / count).backward()
        seen.losses.append(float(total.detach() / count))
        seen.norms.append(float(nn.utils.clip_grad_norm_(trained, STEADY.clip_norm)))
        seen.counts.append(int(count))
        optimizer.step()
    with torch.no_grad():
        everything = collate([dataset[index] for index in range(len(dataset))])
        total, count = loss(model, everything)  # type: ignore[misc]
    seen.evaluation = (float(total / count), int(count))
    seen.weights = {key: value.detach() for key, value in model.state_dict().items()}
    return seen


def close(ours: Seen, theirs: Seen, tolerance: float) -> None:
    assert ours.counts == theirs.counts
    assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
    assert ours.norms == pytest.approx(theirs.norms, rel=tolerance)
    assert ours.evaluation[1] == theirs.evaluation[1]
    assert ours.evaluation[0] == pytest.approx(theirs.evaluation[0], rel=tolerance)


def same_weights(ours: Seen, theirs: Seen, tolerance: float) -> None:
    assert ours.weights.keys() == theirs.weights.keys()
    for name, expected in theirs.weights.items():
        off = torch.linalg.vector_norm(ours.weights[name] - expected)
        assert float(off) <= tolerance * float(torch.linalg.vector_norm(expected)), name


# --- every plan gives what one process gives ------------------------------------------------------


@cache
def one_process(name: str) -> Seen:
    return train(name, "data=1")[0]


@pytest.mark.parametrize("name", CASES)
def test_one_process_equals_a_loop_written_by_hand(name: str) -> None:
    close(one_process(name), by_hand(name), BY_HAND)
    same_weights(one_process(name), by_hand(name), BY_HAND)


@pytest.mark.parametrize("plan", ["data=1,num_microbatches=3", *PLANS])
@pytest.mark.parametrize("name", CASES)
def test_every_plan_equals_one_process(name: str, plan: str) -> None:
    """Losses, norms, counts, evaluation and whole weights, an uneven batch of 7 of 19 or 23."""
    expected = one_process(name)
    found = train(name, plan)
    for seen in found:
        close(seen, expected, TOLERANCE)
    same_weights(found[0], expected, TOLERANCE)
    assert all(not seen.weights for seen in found[1:])


def test_state_dict_loads_into_a_fresh_module() -> None:
    found = train("tied module", "data=2,shard=parameters")[0].weights
    model = tied_module().double()
    model.load_state_dict(found)  # strict: every name, tied ones under both
    assert torch.equal(model.get_parameter("head.weight"), found["embedding.weight"])


@pytest.mark.parametrize("plan", ["data=1", "data=2", "data=2,num_microbatches=2", "data=4"])
def test_l34_every_sample_once_an_epoch_in_another_order_each(plan: str) -> None:
    """L34: 22 samples over the ranks, batches of 5 that straddle epochs, three epochs."""
    read: list[tuple[int, list[int]]] = []
    steps, batch_size, count = 14, 5, 22

    def work(session: Session) -> None:
        trainers: list[ModuleTrainer[object, object]] = []

        def noting(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            if torch.is_grad_enabled():
                read.append((trainers[0].step, batch[2].tolist()))
            return squares(model, batch)

        trainer = session.trainer(
            mlp, noting, Rows(count), steps=steps, batch_size=batch_size, precision="float64"
        )
        trainers.append(trainer)  # type: ignore[arg-type]
        for _ in trainer:
            pass
        assert trainer.position == steps * batch_size

    on_ranks(plan, work)
    by_step = [
        sorted(itertools.chain(*(ids for step, ids in read if step == number)))
        for number in range(steps)
    ]
    order = ShuffledOrder(seed=1, num_samples=count)
    epochs = [order.at(range(first, first + count)) for first in (0, count, 2 * count)]
    assert [len(ids) for ids in by_step] == [batch_size] * steps
    for number, ids in enumerate(by_step):  # each step reads its own run of the order, on any plan
        assert ids == sorted(order.at(range(number * batch_size, (number + 1) * batch_size)))
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_l56_unused_branch_trains_and_is_named() -> None:
    """L56: six clean steps, the branch named once, its gradient 0."""

    def work(session: Session) -> None:
        trainer = session.trainer(
            branches, squares, Rows(), steps=6, batch_size=6, precision="float64"
        )
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = list(trainer)
        assert len(results) == 6
        assert all(one.untouched == ("spare.bias", "spare.weight") for one in results)
        assert len(told) == 1 and "spare.weight" in str(told[0].message)

    work(Session())


def test_unused_branch_is_named_by_sharded_ranks_too() -> None:
    seen: list[tuple[str, ...]] = []

    def work(session: Session) -> None:
        trainer = session.trainer(
            branches, squares, Rows(), steps=2, batch_size=6, precision="float64"
        )
        seen.extend(result.untouched for result in trainer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks("data=2,shard=parameters", work)
    assert seen == [("spare.bias", "spare.weight")] * 4


def test_values_of_a_dataset_come_in_its_order_from_any_plan() -> None:
    """More ranks than some have samples for: sharded ranks keep step, nothing counts twice."""
    dataset = Rows(5)
    expected = mlp().double()(dataset.x)[:, 0].detach()
    for plan in ("data=1", "data=2,shard=parameters", "data=4"):

        def work(session: Session) -> None:
            trainer = session.trainer(
                mlp, squares, Rows(), steps=1, batch_size=8, precision="float64"
            )
            found = trainer.per_sample(dataset, lambda model, batch: model(batch[0])[:, 0])
            assert torch.allclose(found, expected, rtol=1e-14)
            assert trainer.evaluate(dataset)[1] == 5
            with pytest.raises(UserError, match="one a sample"):
                trainer.per_sample(dataset, lambda model, batch: model(batch[0]))

        on_ranks(plan, work)


def test_recompute_gives_the_same_step() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
            self.out = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.out(x)

    found = []
    for plan in ("data=1", "data=1,recompute=full"):
        trainer = Session(plan).trainer(
            lambda: filled(Deep()), squares, Rows(), steps=2, batch_size=6, precision="float64"
        )
        found.append([result.loss for result in trainer])
    assert found[0] == pytest.approx(found[1], rel=1e-14)


def test_a_module_on_meta_takes_its_weights_one_at_a_time() -> None:
    """The same training as the module with values, and no weight is asked for twice."""
    whole = {name: one.detach().double() for name, one in mlp().named_parameters()}
    asked: list[str] = []

    def initial(name: str) -> Tensor:
        asked.append(name)
        return whole[name]

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5), nn.Tanh(),
                                 nn.Linear(5, 1))  # fmt: skip

    losses: list[list[float]] = []

    def work(session: Session) -> None:
        trainer = session.trainer(
            on_meta, squares, Rows(), steps=3, batch_size=7, precision="float64",
            synchronize=STEADY, initial=initial,
        )  # fmt: skip
        losses.append([result.loss for result in trainer])

    on_ranks("data=2,shard=parameters", work)
    assert losses[0] == pytest.approx(one_process("mlp").losses, rel=TOLERANCE)
    assert sorted(asked) == sorted([*whole, *whole])  # once on each of two ranks


def test_bfloat16_sums_in_float32() -> None:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        found = model(batch[0].bfloat16()).float()
        return ((found - batch[1].float()) ** 2).sum(), batch[1].numel()

    def work(session: Session) -> None:
        trainer = session.trainer(
            mlp, loss, Rows(), steps=2, batch_size=7, precision="bfloat16", synchronize=STEADY
        )
        assert {one.dtype for one in trainer.parallel.model.parameters()} == {torch.bfloat16}
        losses.append([result.loss for result in trainer])
        weights = trainer.full_state_dict()
        assert {one.dtype for one in weights.values()} <= {torch.float32}

    losses: list[list[float]] = []
    on_ranks("data=2,shard=gradients", work)
    # bfloat16 keeps 8 bits: a product is right to 2^-8, and errors of rows average out
    assert losses[0] == pytest.approx(one_process("mlp").losses[:2], rel=3e-2)


# --- blocks --------------------------------------------------------------------------------------


def test_blocks_are_the_modules_that_run() -> None:
    model = Tied(module=False)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    blocks, seen = find_blocks(model, None, lambda: model(ids), cut_weights=True)
    assert blocks == list(model.layers)  # the embedding is read from outside, so it is none
    assert list(seen.leaking) == [model.embedding]
    whole = Tied(module=True)
    blocks, _ = find_blocks(whole, None, lambda: whole(ids), cut_weights=True)
    assert blocks == [whole.embedding, *whole.layers, whole.head]
    spare = Branches()
    assert set(candidates(spare)) == {spare.frozen, spare.twice, spare.spare, spare.out}
    blocks, _ = find_blocks(spare, None, lambda: spare(torch.zeros(2, 8)), cut_weights=True)
    assert blocks == [spare.frozen, spare.twice, spare.out]
    lone = nn.Linear(2, 2)
    assert find_blocks(lone, None, lambda: lone(torch.zeros(1, 2)), cut_weights=True)[0] == [lone]


def test_blocks_of_the_user_must_keep_their_promise() -> None:
    def work(session: Session) -> None:
        session.trainer(
            tied_read, next_word, Words(), steps=1, batch_size=4, precision="float64",
            blocks=lambda model: [model.embedding, model.layers],  # type: ignore[list-item]
        )  # fmt: skip

    with pytest.raises(UserError) as caught:
        on_ranks("data=2,shard=parameters", work)
    text = str(caught.value)
    assert "embedding: `embedding.weight` is read while its block does not run" in text
    assert "layers: forward does not call it" in text
    on_ranks("data=2,shard=gradients", work)  # weights stay whole there, so nothing is wrong


def test_a_weight_penalty_in_the_loss_reads_whole_weights() -> None:
    """Then no block can be gathered by itself, and the step is still that of one process."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        total, count = squares(model, batch)
        return total + count * 1e-2 * sum(one.square().sum() for one in model.parameters()), count

    losses: dict[str, list[float]] = {}
    for plan in ("data=1", "data=2,shard=parameters"):

        def work(session: Session, plan: str = plan) -> None:
            trainer = session.trainer(mlp, loss, Rows(), steps=2, batch_size=7, precision="float64")
            losses[plan] = [result.loss for result in trainer]
            losses[plan].append(trainer.evaluate(Rows())[0])

        on_ranks(plan, work)
    assert losses["data=1"] == pytest.approx(losses["data=2,shard=parameters"], rel=TOLERANCE)


# --- what is refused ------------------------------------------------------------------------------


def trainer_of(
    plan: str,
    build: Callable[[], nn.Module] = mlp,
    loss: Callable[..., object] = squares,
    dataset: object = None,
    **options: object,
) -> None:
    def work(session: Session) -> None:
        chosen: dict[str, object] = {"steps": 1, "batch_size": 6, "precision": "float64", **options}
        session.trainer(build, loss, dataset or Rows(), **chosen)  # type: ignore[arg-type]

    on_ranks(plan, work)


def test_ranks_that_start_different_are_told_which_tensors() -> None:
    """Whatever the difference is: values of one tensor, a shape, what is trained."""
    turn = itertools.count()

    def values() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            model[2].bias += next(turn)  # type: ignore[index, operator]
        return model

    with pytest.raises(UserError) as caught:
        trainer_of("data=2", values)
    assert "parameter 2.bias: rank 0" in str(caught.value)
    assert "2.weight" not in str(caught.value)
    freezing = itertools.count()

    def frozen() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(next(freezing) % 2 == 0)  # type: ignore[index]
        return model

    with pytest.raises(UserError, match=r"parameter 0\.weight"):
        trainer_of("data=2", frozen)


def test_ranks_with_other_data_are_told() -> None:
    sizes = iter((20, 21))
    with pytest.raises(UserError, match="samples in the dataset: rank 0: 2"):
        on_ranks(
            "data=2",
            lambda session: session.trainer(  # type: ignore[arg-type, return-value]
                mlp, squares, Rows(next(sizes)), steps=1, batch_size=6, precision="float64"
            ),
        )


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda m, b: (F.mse_loss(m(b[0]), b[1]), len(b[1])), "a mean"),
        (lambda m, b: (F.mse_loss(m(b[0]), b[1]), 1), "a mean"),
        (lambda m, b: F.mse_loss(m(b[0]), b[1]), "returned a Tensor"),
        (lambda m, b: ((m(b[0]) - b[1]) ** 2, b[1].numel()), "not one number"),
        (lambda m, b: (float(m(b[0]).sum()), 1), "not one number"),
        (lambda m, b: (m(b[0]).sum(), 0.5), r"counted 0\.5"),
        (lambda m, b: (m(b[0]).sum(), -1), "counted -1"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused(loss: Callable[..., object], match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        trainer_of("data=1", loss=loss)
    assert caught.value.where == "loss"


def test_a_loss_that_looks_across_the_batch_is_warned_of() -> None:
    def contrast(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        found = model(batch[0])
        return (found @ found.T).square().sum(), len(found)

    with pytest.warns(UserWarning, match="depends on how the batch is cut"):
        trainer_of("data=1", loss=contrast)


def test_buffers_that_forward_changes_are_refused_over_ranks() -> None:
    """BatchNorm and a counter of the user's own; one rank alone may have them."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 1)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.out(x)

    def normed() -> nn.Module:
        return filled(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))

    for build, name in ((normed, r"BatchNorm1d \(1\.running_mean"),
                        (lambda: filled(Counting()), r"Counting \(calls\)")):  # fmt: skip
        with pytest.raises(UserError, match=name):
            trainer_of("data=2", build)
        trainer_of("data=1", build)

    def still() -> nn.Module:
        model = normed()
        model[1].eval()  # type: ignore[index]
        return model

    trainer_of("data=2,shard=parameters", still)


def test_probing_leaves_no_trace() -> None:
    """Statistics, flags and torch's generator are as `build` left them."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        model[2].eval()
        return filled(model)

    state = torch.get_rng_state()
    trainer = Session().trainer(build, squares, Rows(), steps=1, batch_size=6, precision="float64")
    model = trainer.parallel.model
    assert [one.training for one in model] == [True, True, False, True]  # type: ignore[attr-defined]
    assert int(model.get_buffer("1.num_batches_tracked")) == 0
    assert torch.equal(model.get_buffer("1.running_mean"), torch.zeros(4, dtype=torch.float64))
    assert torch.equal(state, torch.get_rng_state())


def test_buffers_that_drift_later_are_found_before_they_are_saved() -> None:
    class Late(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.out, self.rank = nn.Linear(8, 1), rank
            self.register_buffer("mark", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x)

    def work(session: Session) -> None:
        trainer = session.trainer(
            lambda: filled(Late(session.rank)), squares, Rows(), steps=1, batch_size=6,
            precision="float64",
        )  # fmt: skip
        trainer.parallel.model.get_buffer("mark").fill_(session.rank)
        trainer.full_state_dict()

    with pytest.raises(Fault, match="mark: rank 0"):
        on_ranks("data=2", work)


class Keeping(nn.Module):
    """Reads its weight through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 1)
        self.mine = [self.out.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mine[0]) + 0 * self.out.bias


def early(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    penalty = model[0].weight.square().sum()  # type: ignore[index, union-attr, operator]
    total, count = squares(model, batch)
    return total + count * penalty, count


def by_parts(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    found = batch[0]
    for part in model:  # type: ignore[attr-defined]
        found = part(found)
    return ((found - batch[1]) ** 2).sum(), batch[1].numel()


def dropping() -> nn.Module:
    return filled(nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1)), nn.Linear(4, 1)))


@pytest.mark.parametrize(
    ("plan", "options", "match"),
    [
        ("data=1", {"build": lambda: filled(Keeping())}, "`mine` keeps a reference"),
        ("data=1", {"build": lambda: nn.Sequential(nn.LazyLinear(1))}, "before the first batch"),
        ("data=1", {"build": lambda: nn.Linear(8, 1, device="meta")}, "on `meta`"),
        ("data=1", {"build": lambda: mlp().requires_grad_(False)}, "no trainable parameter"),
        ("data=1", {"build": lambda: None}, "returned a NoneType"),
        ("data=1", {"dataset": iter(())}, "has no length"),
        ("data=1", {"steps": 0}, "0 is too small"),
        ("data=1", {"precision": "float33"}, "`float33` is not known"),
        ("data=1", {"save_every": 5}, "needs a run_dir"),
        ("data=1", {"blocks": lambda model: []}, "there are none"),
        ("data=1,recompute=full", {"build": dropping}, "draws random numbers"),
        ("data=1,recompute=full", {}, "acts on blocks with submodules"),
        ("data=1,recompute=selective", {}, "acts on blocks with a submodule named `core`"),
        ("data=2", {"batch_size": 1}, "cannot feed data = 2"),
        ("data=2,shard=parameters", {"loss": early}, r"reads `0\.weight` before the module runs"),
        ("data=2,shard=parameters", {"loss": by_parts}, "does not call the module"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said(plan: str, options: dict[str, object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        trainer_of(plan, **options)  # type: ignore[arg-type]


def test_what_only_cut_weights_forbid_is_allowed_with_whole_ones() -> None:
    trainer_of("data=2,shard=gradients", loss=early)
    trainer_of("data=2,shard=gradients", loss=by_parts)


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_axes_that_cut_a_module_are_refused_by_name(axis: str) -> None:
    with pytest.raises(UserError, match=f"{axis}=2") as caught:
        Session(f"data=2,{axis}=2,num_microbatches=2")
    assert f"{axis}=2" not in caught.value.nearest


def test_a_session_needs_its_ranks() -> None:
    with pytest.raises(UserError, match=r"for 2 ranks .* the mesh has 1") as caught:
        Session("data=2")
    assert "launch(main" in caught.value.nearest
    with pytest.raises(UserError, match="run_dir"):
        Session(resume=True)
    ring = Ring(None, rank=0, capacity=64)
    mesh = fake_mesh(Grid.of(Plan(data=4)), 0, world=FakeWorld(), ring=ring)
    assert Session("data=4,shard=parameters", mesh=mesh).world_size == 4  # one mesh, many plans
    with pytest.raises(UserError, match="replicas 2 x data 2"):
        Session("data=4,replicas=2,shard=parameters", mesh=mesh)


# --- checkpoints ---------------------------------------------------------------------------------


def keep(
    folder: Path, plan: str, *, stop_after: int | None = None, resume: bool = False,
    build: Callable[[], nn.Module] = branches, **options: object,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    """Six steps in `folder`, saved every two; losses and whole weights."""
    losses: list[float] = []
    weights: dict[str, Tensor] = {}

    def work(session: Session) -> None:
        chosen: dict[str, object] = {
            "steps": 6, "batch_size": 7, "precision": "float64", "save_every": 2, **options,
        }  # fmt: skip
        trainer = session.trainer(build, squares, Rows(), **chosen)  # type: ignore[arg-type]
        for result in trainer:
            if session.rank == 0:
                losses.append(result.loss)
            if trainer.step == stop_after:
                break
        found = trainer.full_state_dict()
        if session.rank == 0:
            weights.update(found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(plan, work, run_dir=folder, resume=resume)
    return losses, weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    create_key(path / "key")
    return path


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("data=1", "data=1"),
        ("data=2,shard=parameters", "data=1"),
        ("data=1", "data=2,shard=parameters"),
        ("data=2", "data=4,replicas=2,shard=optimizer"),
    ],
)
def test_a_run_goes_on_under_another_plan(
    folder: Path, tmp_path: Path, first: str, second: str
) -> None:
    """Stopped after 5, it goes on from the checkpoint of 4; frozen and unused weights included."""
    whole = tmp_path / "whole"
    whole.mkdir(mode=0o700)
    create_key(whole / "key")
    expected, weights = keep(whole, "data=1")
    before, _ = keep(folder, first, stop_after=5)
    after, found = keep(folder, second, resume=True)
    assert len(before) == 5 and len(after) == 2
    assert before[:4] + after == pytest.approx(expected, rel=TOLERANCE)
    for name, one in weights.items():
        assert torch.allclose(found[name], one, rtol=TOLERANCE, atol=1e-14), name
    assert sorted(one.name for one in (folder / "checkpoints").iterdir()) == [
        "step-2", "step-4", "step-6",
    ]  # fmt: skip


def test_buffers_come_back(folder: Path) -> None:
    def build() -> nn.Module:
        return filled(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))

    _, weights = keep(folder, "data=1", stop_after=4, build=build)
    _, found = keep(folder, "data=1", resume=True, build=build, stop_after=5)
    assert int(found["1.num_batches_tracked"]) == int(weights["1.num_batches_tracked"]) + 1


def test_dropout_is_the_same_after_a_resume(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir(mode=0o700)
    create_key(whole / "key")
    expected, _ = keep(whole, "data=1", build=dropping)
    before, _ = keep(folder, "data=1", stop_after=4, build=dropping)
    after, _ = keep(folder, "data=1", resume=True, build=dropping)
    assert before + after == expected


def test_a_resume_with_other_settings_or_another_module_is_refused(folder: Path) -> None:
    keep(folder, "data=1", stop_after=2)
    with pytest.raises(UserError, match="batch_size: 7 -> 6"):
        keep(folder, "data=1", resume=True, batch_size=6)
    with pytest.raises(UserError, match=r"missing .*0\.weight"):
        keep(folder, "data=1", resume=True, build=mlp)

    def other_frozen() -> nn.Module:
        model = branches()
        with torch.no_grad():
            model.frozen.weight += 1  # type: ignore[union-attr, operator]
        return model

    with pytest.raises(UserError, match=r"frozen weight `frozen\.weight`"):
        keep(folder, "data=1", resume=True, build=other_frozen)


def test_saving_needs_a_folder() -> None:
    trainer = Session().trainer(mlp, squares, Rows(), steps=1, batch_size=6, precision="float64")
    with pytest.raises(UserError, match="no folder to save in"):
        trainer.save()


# --- going wrong ----------------------------------------------------------------------------------


def test_steps_that_are_not_finite_are_skipped_everywhere_and_end_the_run() -> None:
    """Sample 3 is broken: whoever reads it, all ranks skip that step and go on."""
    dataset = Rows(8)
    dataset.y[3] = float("nan")
    skipped: list[list[bool]] = []

    def work(session: Session) -> None:
        trainer = session.trainer(mlp, squares, dataset, steps=4, batch_size=2, precision="float64")
        skipped.append([result.skipped for result in trainer])

    on_ranks("data=2", work)
    assert skipped[0] == skipped[1] and sum(skipped[0]) == 1

    def hopeless(session: Session) -> None:
        dataset.y[:] = float("nan")
        trainer = session.trainer(
            mlp, squares, dataset, steps=9, batch_size=2, precision="float64",
            synchronize=Synchronize(max_skipped=3),
        )  # fmt: skip
        for _ in trainer:
            pass

    with pytest.raises(Fault, match="step 3: 3 steps in a row"):
        on_ranks("data=1", hopeless)


def test_a_stop_asked_of_one_rank_ends_all_after_the_same_step(folder: Path) -> None:
    ended: list[tuple[int, tuple[int, ...]]] = []

    def work(session: Session) -> None:
        trainer = session.trainer(
            mlp, squares, Rows(), steps=9, batch_size=6, precision="float64", save_every=100
        )
        session.asked_to_stop = lambda: session.rank == 1 and trainer.step == 3
        for _ in trainer:
            pass
        ended.append((trainer.step, trainer.stopped_by))

    on_ranks("data=2", work, run_dir=folder)
    assert ended == [(4, (1,)), (4, (1,))]
    assert [one.name for one in (folder / "checkpoints").iterdir()] == ["step-4"]
