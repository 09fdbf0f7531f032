"""What is saved from any layout is read back, bit by bit, by any other."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.checkpoint_worlds import (
    KEY,
    RUN,
    all_good,
    cut_at_random,
    model,
    ranks,
    save_alone,
    save_world,
    shared_out,
    snapshot,
    view,
)

from reparto.checkpoint.exchange import Exchange
from reparto.checkpoint.layout import moment_name
from reparto.checkpoint.load import Found, find_latest, open_checkpoint
from reparto.checkpoint.rewrite import by_plan, by_rows, convert
from reparto.checkpoint.save import SaveFailed, Saver, SaveReport
from reparto.checkpoint.shards import SAFETENSORS_DTYPE
from reparto.checkpoint.snapshot import Piece, clipped
from reparto.errors import UserError
from reparto.partition.grid import AXES, Grid
from reparto.partition.tensors import Rectangle, initial_table, shard_rows


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(0, 10_000))
def test_any_cut_is_read_back_by_any_other_cut(world_size: int, seed: int) -> None:
    tensors = model(7)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        save_world(root, 7, world_size, seed=seed)
        checkpoint = find_latest(root, key=KEY).checkpoint
        draw = random.Random(seed + 1)
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor)
            for box in cut_at_random(tuple(tensor.shape), 5, draw):
                assert torch.equal(checkpoint.read(name, box), view(tensor, box))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_long_and_short_runs_of_a_large_matrix(seed: int) -> None:
    """Column cuts on both sides of the border between reading runs and reading rows."""
    draw = random.Random(seed)
    shape = (draw.randint(1, 40), draw.choice([3, 900, 2100, 5000]))
    tensor = torch.randn(shape)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "c"
        save_world(root, 1, 2, seed=seed, tensors={"w": tensor})
        checkpoint = open_checkpoint(root / "step-1", KEY)
        for box in cut_at_random(shape, 6, draw):
            assert torch.equal(checkpoint.read("w", box), view(tensor, box))
            assert torch.equal(
                checkpoint.read("w", box, dtype=torch.bfloat16), view(tensor, box).bfloat16()
            )


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_DTYPE))
def test_every_element_type_comes_back_bit_by_bit(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (6, 40), dtype=torch.uint8)
    tensor = raw.view(kind)
    save_world(tmp_path / "c", 1, 2, tensors={"w": tensor})
    read = open_checkpoint(tmp_path / "c" / "step-1", KEY).read("w")
    assert read.dtype == kind and torch.equal(read.view(torch.uint8), raw)


def test_mixed_types_and_strides_in_one_file(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(5, 4).bfloat16().t(),
        "byte": torch.arange(7, dtype=torch.uint8),
        "wide": torch.randn(3, 8, dtype=torch.float64)[:, ::2],
        "scalar": torch.tensor(2.5, requires_grad=True),
        "flag": torch.tensor([True, False]),
    }
    save_world(tmp_path / "c", 1, 1, tensors=tensors)
    checkpoint = open_checkpoint(tmp_path / "c" / "step-1", KEY)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
    path = tmp_path / "c" / "step-1" / "rank-00000.safetensors"
    with safe_open(path, "pt") as file:  # the library agrees about what was written
        assert file.metadata() == {"format": "pt", "run": RUN, "step": "1"}
        keys = list(file.keys())
        for key in keys:
            name = key.split("@")[0]
            assert torch.equal(file.get_tensor(key).flatten()[:1], _first(key, tensors[name]))


def _first(key: str, tensor: torch.Tensor) -> torch.Tensor:
    start = key.split("@")[1]
    at = tuple(int(index) for index in start.split(",")) if start else ()
    return tensor[at].reshape(1).detach()


def test_l63_moments_and_steps_are_equal_element_by_element_under_other_degrees(
    tmp_path: Path,
) -> None:
    """L63: a change of layout breaks or mixes optimizer moments. All directions between six."""
    tensors = model(3)
    weights = [name for name in tensors if "/" not in name]
    layouts = {
        "rows over 2": lambda shape, n: shard_rows(Rectangle.whole(shape), 2, n) if n < 2 else (),
        "rows over 3": lambda shape, n: shard_rows(Rectangle.whole(shape), 3, n),
        "columns over 2": _columns,
        "one": lambda shape, n: (Rectangle.whole(shape),) if n == 0 else (),
    }
    for save_as, cut in layouts.items():
        root = tmp_path / save_as.replace(" ", "-")
        held = {
            rank: {name: cut(tuple(tensors[name].shape), rank) for name in weights}
            for rank in range(3)
        }
        pieces = [
            [
                Piece(name=full, shape=tuple(tensors[full].shape), rectangle=box,
                      tensor=view(tensors[full], box))
                for name in weights for box in held[rank][name]
                for full in (name, moment_name("exp_avg", name), moment_name("exp_avg_sq", name))
            ]
            for rank in range(3)
        ]  # fmt: skip

        def work(rank: int, exchange: Exchange, root: Path = root, own: list = pieces) -> None:  # type: ignore[type-arg]
            saver = Saver(root, run=RUN, key=KEY, rank=rank, exchange=exchange)
            saver.save(snapshot(3, own[rank]))

        all_good(ranks(3, work))
        checkpoint = find_latest(root, key=KEY).checkpoint
        checkpoint.check_against({name: tuple(tensors[name].shape) for name in weights})
        assert checkpoint.manifest.state == {"updates": 3, "position": 96}
        for load_as in layouts.values():
            for rank in range(3):
                for name in tensors:
                    for box in load_as(tuple(tensors[name].shape), rank):
                        assert torch.equal(checkpoint.read(name, box), view(tensors[name], box))


def _columns(shape: tuple[int, ...], rank: int) -> tuple[Rectangle, ...]:
    if len(shape) < 2:
        return (Rectangle.whole(shape),) if rank == 0 else ()
    half = shape[1] // 2
    whole = Rectangle.whole(shape)
    return {0: (whole.narrow(1, 0, half),), 1: (whole.narrow(1, half, shape[1] - half),)}.get(
        rank, ()
    )


# --- whose value is whose ------------------------------------------------------------------------


def test_l32_values_of_a_rank_come_back_to_it_or_the_load_refuses(tmp_path: Path) -> None:
    shares = shared_out(model(1), 2)

    def work(rank: int, exchange: Exchange) -> Found:
        saver = Saver(tmp_path / "c", run=RUN, key=KEY, rank=rank, exchange=exchange)
        saver.save(snapshot(1, shares[rank], per_rank={"position": 10 * rank, "seed": 100 + rank}))
        return find_latest(tmp_path / "c", key=KEY, rank=rank, exchange=exchange)

    for rank, found in enumerate(all_good(ranks(2, work))):
        own = {"position": 10 * rank, "seed": 100 + rank}
        assert found.checkpoint.for_rank(rank, 2) == own
        for world_size in (1, 3):
            with pytest.raises(UserError, match="2 ranks"):
                found.checkpoint.for_rank(0, world_size)


def test_without_values_of_its_own_any_number_of_ranks_loads(tmp_path: Path) -> None:
    save_world(tmp_path / "c", 1, 2)
    assert open_checkpoint(tmp_path / "c" / "step-1", KEY).for_rank(4, 5) is None


def pieces(name: str, tensor: torch.Tensor, box: Rectangle | None = None) -> list[Piece]:
    box = box or Rectangle.whole(tuple(tensor.shape))
    return [Piece(name=name, shape=tuple(tensor.shape), rectangle=box, tensor=view(tensor, box))]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ([pieces("w", torch.zeros(4)), pieces("w", torch.ones(4))], "overlap"),
        ([pieces("w", torch.zeros(4)), pieces("w", torch.zeros(4).double())], "float64"),
        ([pieces("w", torch.zeros(4)), pieces("w", torch.zeros(5))], r"\[5\]"),
        ([pieces("w", torch.zeros(4)) * 2, []], "two pieces of w"),
        ([pieces("w", torch.zeros(4), Rectangle(start=(0,), size=(3,))), []], "in no piece"),
        ([pieces("w", torch.zeros(4, dtype=torch.complex64)), []], "complex64"),
        ([pieces("a b", torch.zeros(4)), []], "tensors"),
        ([[], []], None),
    ],
)
def test_l32_what_two_ranks_hold_differently_is_refused_at_save(
    own: list[list[Piece]], words: str | None, tmp_path: Path
) -> None:
    def work(rank: int, exchange: Exchange) -> SaveReport:
        saver = Saver(tmp_path / "c", run=RUN, key=KEY, rank=rank, exchange=exchange)
        return saver.save(snapshot(1, own[rank]))

    results = ranks(2, work)
    if words is None:
        all_good(results)  # a model without tensors is a whole checkpoint too
        return
    assert len({str(one) for one in results}) == 1
    with pytest.raises(SaveFailed, match=words):
        all_good(results)
    assert list((tmp_path / "c").glob("*")) == []


@pytest.mark.parametrize("own", [[{"a": 1}, None], [None, {"a": 1}]])
def test_values_of_some_ranks_only_are_refused(own: list[dict[str, int]], tmp_path: Path) -> None:
    shares = shared_out(model(1), 2)

    def work(rank: int, exchange: Exchange) -> SaveReport:
        saver = Saver(tmp_path / "c", run=RUN, key=KEY, rank=rank, exchange=exchange)
        return saver.save(snapshot(1, shares[rank], per_rank=own[rank]))

    with pytest.raises(SaveFailed, match="no values of its own"):
        all_good(ranks(2, work))


def test_ranks_that_save_different_steps_are_told_alike(tmp_path: Path) -> None:
    def work(rank: int, exchange: Exchange) -> SaveReport:
        saver = Saver(tmp_path / "c", run=RUN, key=KEY, rank=rank, exchange=exchange)
        return saver.save(snapshot(5 + rank, shared_out(model(1), 2)[rank]))

    results = ranks(2, work)
    assert all(isinstance(one, SaveFailed) for one in results)
    for one in results:
        assert "rank 1 saves step 6 of run run-a, rank 0 step 5" in str(one)


# --- another model -------------------------------------------------------------------------------


def test_all_missing_unused_and_wrong_keys_are_listed(tmp_path: Path) -> None:
    save_world(tmp_path / "c", 1, 2)
    checkpoint = open_checkpoint(tmp_path / "c" / "step-1", KEY)
    shapes = checkpoint.weights
    checkpoint.check_against(shapes)
    checkpoint.check_against({**shapes, "lm_head.weight": (11, 6)})  # an alias names the same
    needed = {**shapes, "new.weight": (3,), "model.norm.weight": (7,)}
    del needed["temperature"]
    with pytest.raises(UserError) as caught:
        checkpoint.check_against(needed)
    text = str(caught.value)
    assert "missing (3): new.weight, exp_avg/new.weight, exp_avg_sq/new.weight" in text
    assert "unused (3): exp_avg/temperature, exp_avg_sq/temperature, temperature" in text
    assert "model.norm.weight is [6], the model needs [7]" in text
    assert "exp_avg/model.norm.weight is [6], the model needs [7]" in text
    with pytest.raises(UserError, match=r"unused \(2\): exp_avg/temperature"):
        checkpoint.check_against(shapes, frozen={"temperature"})
    weights_only = {name: shape for name, shape in needed.items() if name == "never"}
    with pytest.raises(UserError) as caught:
        checkpoint.check_against(weights_only, moments=False)
    assert "exp_avg" not in str(caught.value)


def test_unknown_names_and_aliases(tmp_path: Path) -> None:
    save_world(tmp_path / "c", 2, 2)
    checkpoint = open_checkpoint(tmp_path / "c" / "step-2", KEY)
    tied = checkpoint.read("lm_head.weight", Rectangle(start=(2, 1), size=(3, 4)))
    assert torch.equal(tied, model(2)["model.embed_tokens.weight"][2:5, 1:5])
    assert "lm_head.weight" not in checkpoint.weights
    assert checkpoint.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(UserError, match="no tensor"):
        checkpoint.read("model.gone.weight")


def test_padding_of_the_vocabulary_is_never_stored(tmp_path: Path) -> None:
    padded = torch.randn(12, 4)  # 10 rows of vocabulary on 3 ranks, 4 rows each
    cut = [
        clipped("e", (10, 4), Rectangle(start=(first, 0), size=(4, 4)), padded[first : first + 4])
        for first in (0, 4, 8)
    ]
    sizes = [piece.rectangle.size for piece in cut if piece is not None]
    assert sizes == [(4, 4), (4, 4), (2, 4)]
    assert clipped("e", (10, 4), Rectangle(start=(10, 0), size=(2, 4)), padded[10:]) is None
    saver = Saver(tmp_path / "c", run=RUN, key=KEY)
    saver.save(snapshot(1, [piece for piece in cut if piece is not None]))
    assert torch.equal(open_checkpoint(tmp_path / "c" / "step-1", KEY).read("e"), padded[:10])


# --- another layout on disk ----------------------------------------------------------------------


@pytest.mark.parametrize("num_files", [1, 3, 5])
def test_convert_moves_rectangles_and_nothing_else(num_files: int, tmp_path: Path) -> None:
    save_world(tmp_path / "a", 4, 3)
    old = open_checkpoint(tmp_path / "a" / "step-4", KEY)
    path = convert(old, tmp_path / "b", key=KEY, cut=by_rows(num_files), plan=f"data={num_files}")
    new = find_latest(tmp_path / "b", key=KEY).checkpoint
    assert new.path == path and len(new.manifest.files) == num_files
    assert new.manifest.state == old.manifest.state and new.manifest.run == old.manifest.run
    assert new.manifest.parent == old.parent and new.aliases == old.aliases
    for name, tensor in model(4).items():
        assert torch.equal(new.read(name), tensor)
    with pytest.raises(UserError, match="already"):
        convert(old, tmp_path / "b", key=KEY, cut=by_rows(1), plan="data=1")


def test_convert_to_a_plan_writes_what_its_ranks_would_write(tmp_path: Path) -> None:
    save_alone(tmp_path / "a", 4)
    old = open_checkpoint(tmp_path / "a" / "step-4", KEY)
    grid = Grid(replicas=2, data=2)
    base = initial_table(old.weights, decays=dict.fromkeys(old.weights, True), axes=AXES)
    tables = [
        {
            name: one.with_(
                held=shard_rows(one.held[0], 2, grid.coordinates(rank)["data"]),
                replicated_over=("replicas", "pipeline", "tensor"),
            )
            for name, one in base.items()
        }
        for rank in range(4)
    ]
    cut = by_plan(tables, grid)
    convert(old, tmp_path / "b", key=KEY, cut=cut, plan="data=4,replicas=2,shard=parameters")
    new = find_latest(tmp_path / "b", key=KEY).checkpoint
    assert len(new.manifest.files) == 4
    for name, tensor in model(4).items():
        assert torch.equal(new.read(name), tensor)
    del tables[0]["temperature"], tables[2]["temperature"]
    with pytest.raises(UserError, match="no rank of the plan holds temperature"):
        convert(old, tmp_path / "d", key=KEY, cut=by_plan(tables, grid), plan="")


def test_convert_refuses_values_that_belong_to_ranks(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "a", run=RUN, key=KEY)
    saver.save(snapshot(1, shared_out(model(1), 1)[0], per_rank={"seed": 1}))
    old = open_checkpoint(tmp_path / "a" / "step-1", KEY)
    with pytest.raises(UserError, match="one rank each"):
        convert(old, tmp_path / "b", key=KEY, cut=by_rows(2), plan="data=2")
    assert not (tmp_path / "b").exists()
    convert(old, tmp_path / "b", key=KEY, cut=by_rows(2), plan="data=2", drop_per_rank=True)
    assert find_latest(tmp_path / "b", key=KEY).checkpoint.manifest.per_rank is None


# --- values of the run ---------------------------------------------------------------------------


def test_values_come_back_equal_tuples_as_lists(tmp_path: Path) -> None:
    state = {"position": (3, [4, (5,)]), "rate": 1e-300, "big": 2**60, "none": None, "text": "ü\n"}
    own = snapshot(1, pieces("w", torch.ones(2)), state=state)
    Saver(tmp_path / "c", run=RUN, key=KEY).save(own)
    found = open_checkpoint(tmp_path / "c" / "step-1", KEY).manifest.state
    assert found == {**state, "position": [3, [4, [5]]]}


@pytest.mark.parametrize("value", [{1: 2}, float("nan"), float("-inf"), {"a": {2: 1}}, {3}, b"x"])
@pytest.mark.parametrize("place", ["state", "per_rank"])
def test_values_that_would_come_back_otherwise_are_refused(
    value: object, place: str, tmp_path: Path
) -> None:
    own = snapshot(1, pieces("w", torch.ones(2)), **{place: {"x": value}})
    with pytest.raises(SaveFailed, match="checkpoint state"):
        Saver(tmp_path / "c", run=RUN, key=KEY).save(own)
    assert list((tmp_path / "c").glob("*")) == []
