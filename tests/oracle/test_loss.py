"""The loss against torch's own, and the faults that come from averaging averages.

B batch   S sequence   V vocabulary
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reparto.model import loss
from reparto.model.loss import cross_entropy_sum, cross_entropy_tokens

F64 = torch.float64


def random_case(dtype: torch.dtype, words: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits_BSV = 3 * torch.randn(3, 7, words, dtype=F64, generator=generator)
    labels_BS = torch.randint(0, words, (3, 7), generator=generator)
    labels_BS[0, :3] = loss.IGNORE
    labels_BS[2, 6] = loss.IGNORE
    return logits_BSV.to(dtype).requires_grad_(), labels_BS


def logits_with_losses(losses: list[float]) -> tuple[Tensor, Tensor]:
    """Logits and labels of one sequence whose tokens have exactly these losses, and one ignored
    token after them: two words, the label is word 0."""
    gaps = [math.log(math.expm1(value)) if value else -math.inf for value in losses]
    gaps_S = torch.tensor([*gaps, 5.0], dtype=F64)
    labels_BS = torch.tensor([[0] * len(losses) + [loss.IGNORE]])
    return torch.stack((torch.zeros_like(gaps_S), gaps_S), dim=-1)[None], labels_BS


@pytest.mark.parametrize("chunk", [1, 40, 1 << 18])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_value_and_gradient_equal_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, smoothing: float, chunk: int
) -> None:
    monkeypatch.setattr(loss, "_CPU_CHUNK", chunk)
    logits_BSV, labels_BS = random_case(dtype)
    total, count = cross_entropy_sum(logits_BSV, labels_BS, label_smoothing=smoothing)
    wide = logits_BSV if dtype == F64 else logits_BSV.float()
    expected = functional.cross_entropy(
        wide.flatten(0, 1), labels_BS.flatten(), reduction="sum", label_smoothing=smoothing
    )
    assert count.item() == 17
    assert total.dtype == wide.dtype
    tolerance = 1e-13 if dtype == F64 else 1e-6
    assert total.item() == pytest.approx(expected.item(), rel=tolerance)
    (ours,) = torch.autograd.grad(total / count, logits_BSV)
    (theirs,) = torch.autograd.grad(expected / count, logits_BSV)
    assert ours.dtype == dtype
    # One rounding of the gradient to its own dtype is the only difference left.
    step = {F64: 1e-15, torch.float32: 1e-7, torch.bfloat16: 2**-8}[dtype]
    assert (ours - theirs).abs().max() <= step


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradient_equals_finite_differences(smoothing: float) -> None:
    logits_BSV, labels_BS = random_case(F64, words=5)

    def weighted(logits: Tensor) -> Tensor:
        losses_BS = cross_entropy_tokens(logits, labels_BS, label_smoothing=smoothing)
        weights_BS = torch.arange(21, dtype=F64).view(3, 7)
        return (losses_BS * weights_BS).sum()

    assert torch.autograd.gradcheck(weighted, (logits_BSV,))


def test_tokens_are_the_terms_of_the_sum() -> None:
    logits_BSV, labels_BS = random_case(torch.float32)
    tokens_BS = cross_entropy_tokens(logits_BSV, labels_BS)
    assert tokens_BS.shape == labels_BS.shape
    assert torch.equal(tokens_BS == 0, labels_BS == loss.IGNORE)
    assert torch.equal(tokens_BS.sum(), cross_entropy_sum(logits_BSV, labels_BS)[0])


def test_no_token_gives_zero_and_zero_gradients() -> None:
    logits_BSV, labels_BS = random_case(torch.float32)
    total, count = cross_entropy_sum(logits_BSV, torch.full_like(labels_BS, loss.IGNORE))
    assert (total.item(), count.item()) == (0.0, 0)
    total.backward()
    assert logits_BSV.grad is not None
    assert torch.equal(logits_BSV.grad, torch.zeros_like(logits_BSV))


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    logits_BSV, labels_BS = random_case(torch.float32)
    for wrong in (-1, 11):
        labels_BS[1, 1] = wrong
        with pytest.raises(RuntimeError, match="out of bounds"):
            cross_entropy_sum(logits_BSV, labels_BS)


def test_another_label_can_be_the_ignored_one() -> None:
    logits_BSV, labels_BS = random_case(F64)
    padded_BS = torch.where(labels_BS == loss.IGNORE, -1, labels_BS)
    ours = cross_entropy_sum(logits_BSV, padded_BS, ignore=-1)
    expected = cross_entropy_sum(logits_BSV, labels_BS)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


def test_L53_a_thousand_bf16_tokens_are_summed_in_float32() -> None:
    """In bf16 the sum of 1000 ones stops at 256."""
    words = 3
    logits_BSV = torch.zeros(10, 100, words, dtype=torch.bfloat16)
    total, count = cross_entropy_sum(logits_BSV, torch.zeros(10, 100, dtype=torch.int64))
    assert total.item() / count.item() == pytest.approx(math.log(words), rel=1e-6)


# --- reported faults: sums and counts add up, averages do not ------------------------------------


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param([[1.0] * 6, [3.0] * 2], 1.5, id="L01: micro-batches, not 2.0"),
        pytest.param([[1.0] * 5, [7.0]], 2.0, id="L02: ranks, not 4.0"),
        pytest.param([[2.0], [], [4.0, 6.0]], 4.0, id="an empty part counts for nothing"),
    ],
)
def test_L01_L02_the_loss_of_uneven_parts_is_that_of_the_whole(
    parts: list[list[float]], expected: float
) -> None:
    pairs = [cross_entropy_sum(*logits_with_losses(part)) for part in parts]
    total = sum(pair[0].item() for pair in pairs)
    count = sum(int(pair[1]) for pair in pairs)
    assert total / count == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cuts", [[0, 4, 8], [0, 1, 8], [0, 2, 4, 6, 8], [0, 3, 4, 7, 8]])
def test_L01_L03_the_gradient_does_not_depend_on_how_the_batch_is_cut(
    cuts: list[int], smoothing: float
) -> None:
    """The kind of fault: some path divides by its own count, or forgets to."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 5, dtype=F64, generator=generator).requires_grad_()
    x_BSD = torch.randn(8, 6, 5, dtype=F64, generator=generator)
    labels_BS = torch.randint(0, 9, (8, 6), generator=generator)
    for row in range(8):
        labels_BS[row, : row % 6] = loss.IGNORE  # uneven: 6, 5, 4, 3, 2, 1, 6, 5 tokens
    global_count = int((labels_BS != loss.IGNORE).sum())
    assert global_count == 32

    def gradient(bounds: list[int]) -> Tensor:
        total_gradient, counted = torch.zeros_like(weight), 0
        for start, stop in pairwise(bounds):
            total, count = cross_entropy_sum(
                x_BSD[start:stop] @ weight.T, labels_BS[start:stop], label_smoothing=smoothing
            )
            total_gradient += torch.autograd.grad(total / global_count, weight)[0]
            counted += int(count)
        assert counted == global_count
        return total_gradient

    whole, split = gradient([0, 8]), gradient(cuts)
    assert (whole - split).abs().max() <= 1e-14
    assert (whole.norm() / split.norm()).item() == pytest.approx(1.0, abs=1e-13)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_L05_an_evaluation_gives_the_same_number_on_any_count_of_processes(processes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BSV = torch.randn(16, 5, 7, dtype=F64, generator=generator)
    labels_BS = torch.randint(0, 7, (16, 5), generator=generator)
    expected = functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten()).item()
    parts = [
        cross_entropy_sum(logits_BSV[rank::processes], labels_BS[rank::processes])
        for rank in range(processes)
    ]
    mean = sum(total.item() for total, _ in parts) / sum(int(count) for _, count in parts)
    assert mean == pytest.approx(expected, rel=1e-13)


def test_L06_perplexity_comes_from_the_sums() -> None:
    parts = [
        cross_entropy_sum(*logits_with_losses([0.0, 0.0])),
        cross_entropy_sum(*logits_with_losses([math.log(10)])),
    ]
    mean = sum(total.item() for total, _ in parts) / sum(int(count) for _, count in parts)
    assert math.exp(mean) == pytest.approx(2.1544, abs=5e-5)


def test_L13_dividing_after_backward_scales_like_dividing_before() -> None:
    """16 valid tokens: the count may be applied to the loss or to the gradient, once."""
    generator = torch.Generator().manual_seed(2)
    logits_BSV = torch.randn(2, 8, 5, dtype=F64, generator=generator, requires_grad=True)
    labels_BS = torch.randint(0, 5, (2, 8), generator=generator)
    total, count = cross_entropy_sum(logits_BSV, labels_BS)
    assert int(count) == 16
    (before,) = torch.autograd.grad(total / count, logits_BSV, retain_graph=True)
    (after,) = torch.autograd.grad(total, logits_BSV)
    assert (after / count - before).abs().max() <= 1e-17
