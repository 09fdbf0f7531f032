"""Cross-entropy over a vocabulary that is cut by tensor rank; the logits are never gathered.

Equation.  Rank r has logits z over words V_r. With s_r = log sum over V_r of exp z,
           loss = log sum over r of exp s_r - z[label];   d loss / d z = softmax(z) - target,
           which rank r makes of its own z and the one number log sum exp.

| what | collective | when | payload a microbatch, a rank |
|---|---|---|---|
| s_r, label's logit (and sum, if smoothed) | all_gather | once, forward | 4 n k N, k = 2 (or 3) |

Nothing in backward. (N = tokens, n = tensor degree; fp32.) Gathering the logits instead moves V / k
times as much: 2000 times at a vocabulary of 4096. The maximum need not be agreed on first: each
rank's own logsumexp is stable, and so is their sum.

A word of the vocabulary is on exactly one rank and runs may differ by one, so there is no padding
that a logsumexp could count.

    N tokens   W words of this rank   V words of all ranks
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from reparto.comm.collectives import Communicator
from reparto.model.loss import IGNORE

_CHUNK = 1 << 18
"""Logits that are worked on at once, as in `model/loss.py`: 1 MiB in float32."""


def cross_entropy_tokens(
    logits_BSW: Tensor,
    labels_BS: Tensor,
    *,
    group: Communicator,
    first_word: int,
    vocabulary: int,
    ignore: int = IGNORE,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of every token (B, S) in nats, exactly 0 where the label is `ignore`.

    logits_BSW (B, S, W) for words first_word .. first_word + W - 1 of `vocabulary`; labels_BS
    (B, S) int64 words of the whole vocabulary. Every rank of `group` gets the same losses.
    """
    cut = _Cut(group, first_word, vocabulary, ignore, label_smoothing)
    loss_N: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        logits_BSW.flatten(0, -2), labels_BS.flatten(), cut
    )
    return loss_N.view_as(labels_BS)


class _Cut:
    """Which words this rank has, and how losses are made."""

    __slots__ = ("first", "group", "ignore", "smoothing", "vocabulary")

    def __init__(
        self, group: Communicator, first: int, vocabulary: int, ignore: int, smoothing: float
    ) -> None:
        self.group, self.first, self.vocabulary = group, first, vocabulary
        self.ignore, self.smoothing = ignore, smoothing

    def local(self, labels_N: Tensor, words: int) -> tuple[Tensor, Tensor]:
        """Which labels are scored and on this rank, and an index (N, 1) valid for all."""
        index_N = labels_N - self.first
        here_N = (labels_N != self.ignore) & (index_N >= 0) & (index_N < words)
        return here_N, torch.where(here_N, index_N, 0)[:, None]


class _TokenLosses(Function):
    """(N, W) logits and (N,) labels -> (N,) losses, in chunks of rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits_NW: Tensor, labels_N: Tensor, cut: _Cut) -> Tensor:
        tokens, words = logits_NW.shape
        wide = torch.float64 if logits_NW.dtype == torch.float64 else torch.float32
        facts = 3 if cut.smoothing else 2
        mine_KN = torch.zeros(facts, tokens, dtype=wide, device=logits_NW.device)
        for rows in _row_chunks(tokens, words):
            part_NW = logits_NW[rows].to(wide)
            here_N, index_N1 = cut.local(labels_N[rows], words)
            mine_KN[0, rows] = torch.logsumexp(part_NW, dim=-1)
            mine_KN[1, rows] = torch.where(here_N, part_NW.gather(1, index_N1)[:, 0], 0.0)
            if cut.smoothing:
                mine_KN[2, rows] = part_NW.sum(dim=-1)
        all_RKN = torch.empty(cut.group.size, *mine_KN.shape, dtype=wide, device=logits_NW.device)
        cut.group.all_gather(all_RKN, mine_KN, tag="activation loss").wait()
        log_sum_N = torch.logsumexp(all_RKN[:, 0], dim=0)
        expected_N = (1.0 - cut.smoothing) * all_RKN[:, 1].sum(0)
        if cut.smoothing:
            expected_N = expected_N + (cut.smoothing / cut.vocabulary) * all_RKN[:, 2].sum(0)
        ctx.save_for_backward(logits_NW, labels_N, log_sum_N)
        ctx.cut = cut  # type: ignore[attr-defined]
        return torch.where(labels_N != cut.ignore, log_sum_N - expected_N, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_N: Tensor) -> tuple[Tensor, None, None]:
        logits_NW, labels_N, log_sum_N = ctx.saved_tensors  # type: ignore[attr-defined]
        cut: _Cut = ctx.cut  # type: ignore[attr-defined]
        tokens, words = logits_NW.shape
        grad_NW = torch.empty_like(logits_NW)
        for rows in _row_chunks(tokens, words):
            part_NW = (logits_NW[rows].to(log_sum_N.dtype) - log_sum_N[rows, None]).exp_()
            if cut.smoothing:
                part_NW -= cut.smoothing / cut.vocabulary
            here_N, index_N1 = cut.local(labels_N[rows], words)
            target_N1 = here_N.to(part_NW.dtype)[:, None] * (cut.smoothing - 1.0)
            part_NW.scatter_add_(1, index_N1, target_N1)
            part_NW *= torch.where(labels_N[rows] != cut.ignore, grad_N[rows], 0.0)[:, None]
            grad_NW[rows] = part_NW
        return grad_NW, None, None


def _row_chunks(tokens: int, words: int) -> list[slice]:
    size = max(1, _CHUNK // max(1, words))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
