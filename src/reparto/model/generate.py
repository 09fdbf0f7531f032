"""Text from a trained decoder, one token at a time, with cached keys and values.

The cache takes the place of the parameterless attention core of each layer, the seam where a
context strategy would put its own; no other line of the model knows of it. A step then costs one
token's arithmetic instead of the whole text's.

    B batch (1)   S new tokens   T tokens so far   H query heads   K key/value heads   C head size
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from reparto.model.transformer import Attention, Context, Decoder


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    "0 takes the likeliest; above, logits are divided by it"
    top_k: int = 0
    "only the k likeliest tokens; 0: all"
    top_p: float = 1.0
    "only the likeliest tokens that together reach this probability"
    seed: int = 1
    "of the random choice"


class _CachedCore(nn.Module):
    """Attention over everything seen so far; keys arrive already turned by their position."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def forward(self, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, context: Context) -> Tensor:
        first = self._keys is None
        if self._keys is not None and self._values is not None:
            k_BKSC = torch.cat((self._keys, k_BKSC), dim=2)
            v_BKSC = torch.cat((self._values, v_BKSC), dim=2)
        self._keys, self._values = k_BKSC, v_BKSC
        return functional.scaled_dot_product_attention(
            q_BHSC, k_BKSC, v_BKSC, is_causal=first,
            enable_gqa=q_BHSC.shape[1] != k_BKSC.shape[1],
        )  # fmt: skip


@contextmanager
def _cached(model: Decoder) -> Iterator[None]:
    attentions = [one for one in model.modules() if isinstance(one, Attention)]
    cores = [one.core for one in attentions]
    for attention in attentions:
        attention.core = _CachedCore()
    try:
        yield
    finally:
        for attention, core in zip(attentions, cores, strict=True):
            attention.core = core


def generate(
    model: Decoder, prompt: list[int], *, max_new_tokens: int, end_id: int, sampling: Sampling
) -> Iterator[int]:
    """Token ids after `prompt`, until `end_id` or `max_new_tokens`. `prompt` may not be empty."""
    assert prompt, "at least one token to go on from"
    generator = torch.Generator().manual_seed(sampling.seed)
    model.eval()
    with torch.no_grad(), _cached(model):
        ids_BS = torch.tensor([prompt])
        seen = 0
        for _ in range(max_new_tokens):
            positions_BS = torch.arange(seen, seen + ids_BS.shape[1])[None]
            logits_V = model(ids_BS, position_ids_BS=positions_BS)[0, -1]
            seen += ids_BS.shape[1]
            token = _choose(logits_V.float(), sampling, generator)
            if token == end_id:
                return
            yield token
            ids_BS = torch.tensor([[token]])


def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature <= 0:
        return int(logits_V.argmax())
    logits_V = logits_V / sampling.temperature
    if sampling.top_k:
        least = logits_V.topk(min(sampling.top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, places = logits_V.softmax(0).sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p  # the first one always stays
        logits_V = logits_V.index_fill(0, places[beyond], float("-inf"))
    return int(torch.multinomial(logits_V.softmax(0), 1, generator=generator))
