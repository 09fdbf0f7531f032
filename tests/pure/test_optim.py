"""AdamW on owned rows against a plain one in float64, clipping by one norm, and the schedules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reparto.parallel.flat import Owned, cut_rows
from reparto.partition.flat import flat_layout
from reparto.partition.tensors import Rectangle
from reparto.train.optim import AdamW, clip_coefficient, learning_rate, square_sum

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


def owned(
    name: str, weight: Tensor, gradient: Tensor | None, *, decays: bool = True, counts: bool = True
) -> Owned:
    return Owned(
        name=name,
        rectangle=Rectangle.whole(tuple(weight.shape)),
        weight=weight,
        gradient=gradient,
        decays=decays,
        counts=counts,
    )


def made(rows: Sequence[Owned], weight_decay: float = DECAY) -> AdamW:
    return AdamW(rows, betas=BETAS, eps=EPS, weight_decay=weight_decay)


class PlainAdamW:
    """Algorithm 2 of Loshchilov and Hutter, line by line, on one tensor in float64."""

    def __init__(self, weight: Tensor, *, weight_decay: float) -> None:
        self.weight = weight.double().clone()
        self.first = torch.zeros_like(self.weight)
        self.second = torch.zeros_like(self.weight)
        self.step_number = 0
        self.weight_decay = weight_decay

    def step(self, gradient: Tensor, rate: float) -> None:
        self.step_number += 1
        gradient = gradient.double()
        self.weight = self.weight * (1 - rate * self.weight_decay)
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        first = self.first / (1 - BETAS[0] ** self.step_number)
        second = self.second / (1 - BETAS[1] ** self.step_number)
        self.weight = self.weight - rate * first / (second.sqrt() + EPS)


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# --- the update ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "factor", "tolerance"),
    [
        # torch keeps the divisor in float32: a power of two is exact there, so nothing is lost
        (torch.float64, 1 / 512, 1e-14),
        # any other factor is rounded to 24 bits: Adam hardly sees the size of its gradients
        (torch.float64, 1 / 773, 1e-7),
        (torch.float32, 1 / 773, 1e-6),
    ],
)
def test_the_fused_kernel_with_its_factor_is_plain_adamw(
    dtype: torch.dtype, factor: float, tolerance: float
) -> None:
    weight = random((7, 5), 1, dtype)
    plain = PlainAdamW(weight, weight_decay=DECAY)
    ours = made([owned("w", weight, None)])
    for number in range(1, 9):
        gradient = 300 * random((7, 5), 10 + number, dtype)
        rate = 1e-2 / number
        plain.step(gradient * factor, rate)
        ours.step([owned("w", weight, gradient.clone())], rate=rate, factor=factor)
        apart = (weight.double() - plain.weight).norm() / plain.weight.norm()
        assert apart.item() < tolerance
    first, second = ours.moments("w")
    assert torch.allclose(first.double(), plain.first, rtol=1e-5)
    assert torch.allclose(second.double(), plain.second, rtol=1e-5)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_rows_are_updated_to_the_same_bits_however_they_are_cut(shards: int) -> None:
    whole, gradient = random((7, 5), 1, torch.float32), random((7, 5), 2, torch.float32)
    reference = whole.clone()
    made([owned("w", reference, None)]).step(
        [owned("w", reference, gradient.clone())], rate=1e-2, factor=0.25
    )
    layout = flat_layout({"w": (7, 5)}, num_shards=shards)
    parts = []
    for shard in range(shards):
        mine = cut_rows(whole, layout, layout.slots[0], shard).clone()
        part = cut_rows(gradient, layout, layout.slots[0], shard).clone()
        rows = [owned("w", mine, part)] if mine.numel() else []  # 8 shards of 7 rows: one is empty
        made(rows).step(rows, rate=1e-2, factor=0.25)
        parts.append(mine)
    assert torch.equal(torch.cat(parts), reference)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_L54_zero_gradients_shrink_matrices_and_leave_vectors_whatever_the_cut(shards: int) -> None:
    for name, shape, decays in (
        ("mlp.up_proj.weight", (6, 4), True),
        ("mlp.up_proj.bias", (6,), False),
        ("norm.weight", (6,), False),
    ):
        layout = flat_layout({name: shape}, num_shards=shards)
        for shard in range(shards):
            whole = torch.full(shape, 2.0, dtype=torch.float64)
            mine = cut_rows(whole, layout, layout.slots[0], shard).clone()
            rows = [owned(name, mine, torch.zeros_like(mine), decays=decays)]
            made(rows).step(rows, rate=0.1, factor=1.0)
            expected = 2.0 * 0.99 if decays else 2.0
            assert torch.allclose(mine, torch.full_like(mine, expected), rtol=1e-15, atol=0)


def test_L54_one_optimizer_with_both_kinds_keeps_them_apart() -> None:
    matrix, norm = torch.ones(4, 4), torch.ones(4)
    rows = [
        owned("norm.weight", norm, torch.zeros(4), decays=False),
        owned("w.weight", matrix, torch.zeros(4, 4)),
    ]
    made(rows).step(rows, rate=0.1, factor=1.0)
    assert torch.equal(norm, torch.ones(4))
    assert torch.allclose(matrix, torch.full((4, 4), 0.99))


def test_moments_exist_from_the_start_and_their_bytes_never_jump() -> None:
    weight = torch.ones(6, 2)
    ours = made([owned("w", weight, None), owned("b", torch.ones(3), None, decays=False)])
    assert ours.state_bytes() == 2 * (12 + 3) * 4
    ours.step([owned("w", weight, torch.ones(6, 2))], rate=1e-3, factor=1.0)
    assert ours.state_bytes() == 2 * (12 + 3) * 4


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    still, moving = torch.ones(3, 3), torch.ones(3, 3)
    ours = made([owned("still", still, None), owned("moving", moving, None)])
    ours.step(
        [owned("still", still, None), owned("moving", moving, torch.ones(3, 3))],
        rate=0.1,
        factor=1.0,
    )
    assert torch.equal(still, torch.ones(3, 3)) and not torch.equal(moving, still)


def test_saved_moments_continue_to_the_same_bits() -> None:
    weight = random((5, 3), 1, torch.float32)
    ours = made([owned("w", weight, None)])

    def step(optimizer: AdamW, target: Tensor, number: int) -> None:
        rows = [owned("w", target, random((5, 3), 20 + number, torch.float32))]
        optimizer.step(rows, rate=1e-2, factor=0.5)

    for number in range(3):
        step(ours, weight, number)
    first, second = (one.clone() for one in ours.moments("w"))
    copy = weight.clone()
    resumed = made([owned("w", copy, None)])
    resumed.load("w", first, second, 3)
    for number in range(3, 6):
        step(ours, weight, number)
        step(resumed, copy, number)
    assert torch.equal(weight, copy)
    assert all(map(torch.equal, ours.moments("w"), resumed.moments("w")))


# --- clipping ------------------------------------------------------------------------------------


def test_L20_two_parts_of_norm_3_and_4_are_scaled_by_one_fifth_together() -> None:
    parts = [
        [owned("a", torch.zeros(2), torch.tensor([3.0, 0.0]))],
        [owned("b", torch.zeros(2), torch.tensor([0.0, 4.0]))],
    ]
    norm = math.sqrt(sum(square_sum(one) for one in parts))
    assert norm == 5.0
    assert clip_coefficient(norm, 1.0) == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_L23_the_small_term_is_added_once_whatever_the_number_of_shards(shards: int) -> None:
    gradient = torch.full((8, 2), 0.25, dtype=torch.float64)  # norm 1
    layout = flat_layout({"w": (8, 2)}, num_shards=shards)
    total = 0.0
    for shard in range(shards):
        part = cut_rows(gradient, layout, layout.slots[0], shard)
        total += square_sum([owned("w", torch.zeros_like(part), part)])
    assert clip_coefficient(math.sqrt(total), 1.0) == pytest.approx(1 / (1 + 1e-6), rel=1e-12)
    assert clip_coefficient(math.sqrt(total), 1.0) != pytest.approx(1 / (1 + 8e-6), rel=1e-7)


def test_equal_copies_count_once() -> None:
    gradient = torch.tensor([3.0, 4.0])
    rows = [owned("w", torch.zeros(2), gradient)]
    copy = [owned("w", torch.zeros(2), gradient, counts=False)]
    assert square_sum(rows) == 25.0
    assert square_sum(copy) == square_sum([]) == 0.0
    assert square_sum([owned("w", torch.zeros(2), None)]) == 0.0


def test_squares_add_in_float64() -> None:
    big = owned("big", torch.zeros(1), torch.tensor([4096.0]))
    small = [owned(f"{i}", torch.zeros(1), torch.tensor([0.5])) for i in range(8)]
    assert square_sum([big, *small]) == 4096.0**2 + 2.0  # in float32 the small ones would vanish


@pytest.mark.parametrize(
    ("norm", "clip_norm", "expected"),
    [(0.0, 1.0, 1.0), (0.5, 1.0, 1.0), (10.0, 0.0, 1.0), (10.0, -1.0, 1.0),
     (10.0, 2.0, 2.0 / (10.0 + 1e-6))],
)  # fmt: skip
def test_clipping_by_hand(norm: float, clip_norm: float, expected: float) -> None:
    assert clip_coefficient(norm, clip_norm) == expected


@settings(deadline=None)
@given(st.floats(0, 1e30), st.floats(1e-6, 1e6))
def test_a_clipped_norm_is_at_most_the_limit_and_no_gradient_grows(
    norm: float, limit: float
) -> None:
    coefficient = clip_coefficient(norm, limit)
    assert 0 <= coefficient <= 1
    assert norm * coefficient <= limit * (1 + 1e-12)


# --- schedules -----------------------------------------------------------------------------------


def rate(update: int, schedule: str, *, warmup: int = 0, steps: int = 10, final: float = 0.0,
         base: float = 1.0) -> float:  # fmt: skip
    return learning_rate(
        update, base=base, schedule=schedule, warmup_steps=warmup, steps=steps, final_share=final
    )


def test_L41_half_of_the_cosine_is_half_the_rate_and_its_end_is_zero() -> None:
    assert rate(5, "warmup-cosine", base=3e-4) == pytest.approx(1.5e-4, rel=1e-12)
    assert rate(10, "warmup-cosine", base=3e-4) == 0.0
    assert rate(11, "warmup-cosine", base=3e-4) == 0.0  # and it does not climb again
    assert rate(40, "warmup-cosine", base=3e-4) == 0.0


def test_L42_the_rate_is_of_optimizer_steps_alone() -> None:
    """8 microbatches in windows of 4 are 2 updates: the second has the rate of update 2."""
    rates = [rate(update, "warmup-cosine", warmup=4, steps=12) for update in (1, 2)]
    assert rates == [0.25, 0.5]


@pytest.mark.parametrize(
    ("schedule", "warmup", "steps", "expected"),
    [
        ("constant", 0, 3, [1.0, 1.0, 1.0]),
        ("constant", 2, 4, [0.5, 1.0, 1.0, 1.0]),
        ("warmup-cosine", 0, 1, [0.0]),
        ("warmup-cosine", 1, 1, [1.0]),
        ("warmup-cosine", 4, 4, [0.25, 0.5, 0.75, 1.0]),
        ("warmup-cosine", 1, 3, [1.0, 0.5, 0.0]),
        ("warmup-stable-decay", 2, 10, [0.5, *[1.0] * 7, 0.5, 0.0]),
        ("warmup-stable-decay", 0, 5, [1.0, 1.0, 1.0, 1.0, 0.0]),
        ("warmup-stable-decay", 0, 1, [0.0]),
    ],
)
def test_schedules_at_their_borders(
    schedule: str, warmup: int, steps: int, expected: list[float]
) -> None:
    found = [rate(update, schedule, warmup=warmup, steps=steps) for update in range(1, steps + 1)]
    assert found == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("schedule", ["warmup-cosine", "warmup-stable-decay"])
def test_the_last_rate_is_the_final_share(schedule: str) -> None:
    assert rate(100, schedule, warmup=10, steps=100, final=0.1) == pytest.approx(0.1)
    assert rate(10, schedule, warmup=10, steps=100, final=0.1) == 1.0


@settings(deadline=None)
@given(
    st.sampled_from(["constant", "warmup-cosine", "warmup-stable-decay"]),
    st.integers(1, 60),
    st.floats(0, 1),
    st.data(),
)
def test_rates_rise_once_to_the_base_and_never_after(
    schedule: str, steps: int, final: float, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, steps))
    rates = [
        rate(u, schedule, warmup=warmup, steps=steps, final=final) for u in range(1, steps + 1)
    ]
    assert all(0 <= one <= 1.0 for one in rates)
    assert rates[:warmup] == [(u + 1) / warmup for u in range(warmup)]
    after = rates[max(0, warmup - 1) :]
    assert all(b <= a + 1e-15 for a, b in itertools.pairwise(after))
    if schedule != "constant" and warmup < steps:
        assert rates[-1] == pytest.approx(final, abs=1e-12)
