"""Cross-entropy as a pair (sum over tokens, number of tokens), and never a mean.

A mean cannot be split: averaging the means of two micro-batches or two ranks weighs a token by how
many others happened to sit beside it. A sum and a count can be added over micro-batches, ranks
and groups in any order, and divided once at the end by the global count. Every path here returns
that pair, the smoothed one too, so that no caller can forget the count.

    B batch   S sequence   V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100
"""The label of a token that is not scored; Hugging Face's and torch's value."""


def _wide(logits: Tensor) -> Tensor:
    """At least float32: a bf16 sum of 1000 ones is 256."""
    return logits if logits.dtype == torch.float64 else logits.float()


def cross_entropy_sum(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    *,
    ignore: int = IGNORE,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of all tokens whose label is not `ignore`, and how many they are.

    logits_BSV (B, S, V) any float dtype; labels_BS (B, S) int64. Returns two scalars: the sum in
    nats (float64 for float64 logits, else float32; differentiable, exactly 0 with zero gradients
    when no token counts) and the count (int64).

    With label smoothing s the target is (1 - s) on the label and s / V on every token
    (Szegedy et al. 2016, section 7).
    """
    total = functional.cross_entropy(
        _wide(logits_BSV).flatten(0, -2),
        labels_BS.flatten(),
        ignore_index=ignore,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return total, (labels_BS != ignore).sum()


def cross_entropy_tokens(logits_BSV: Tensor, labels_BS: Tensor, *, ignore: int = IGNORE) -> Tensor:
    """The loss of every token (B, S) in nats, 0 where the label is `ignore`: for sums by group."""
    loss = functional.cross_entropy(
        _wide(logits_BSV).flatten(0, -2),
        labels_BS.flatten(),
        ignore_index=ignore,
        reduction="none",
    )
    return loss.view_as(labels_BS)
