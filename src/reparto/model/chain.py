"""A model as an ordered list of blocks, and how one microbatch runs through them.

Nearly every large model is such a list: each block takes the hidden state of the one before and a
context that all share. Who knows the list can run any part of it anywhere, so a pipeline strategy
needs nothing else of a model, and a model needs to know nothing of pipelines. `decoder_chain` is
the chain of our decoder; `model/huggingface.py` has the one of transformers' Llama.

The loss is part of it, as losses of single tokens and which of them count: sums are made by the
caller, so that nobody can average averages, and whoever cuts the logits by vocabulary can hand in
a cross-entropy that knows about it.

    B batch   S sequence   D hidden   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from reparto.config.model import rules
from reparto.model.loss import IGNORE, cross_entropy_tokens
from reparto.model.transformer import Context, Decoder
from reparto.partition.layers import decoder_costs

Batch = TypeVar("Batch")

#: (logits, labels) -> loss of every token; plain, smoothed, or over a cut vocabulary
TokenLoss = Callable[[Tensor, Tensor], Tensor]


def call_plainly(block: nn.Module, hidden: Tensor, context: object) -> Tensor:
    """`block(hidden, context)`."""
    out: Tensor = block(hidden, context)
    return out


@dataclass(frozen=True, kw_only=True)
class Chain(Generic[Batch]):
    """A model as an ordered list of blocks."""

    blocks: Sequence[nn.Module]
    "in the order in which a microbatch meets them"
    enter: Callable[[Batch], Tensor]
    "what the first block is given, such as token ids (B, S)"
    context: Callable[[Batch], object]
    "what all blocks share beside the hidden state; reads no parameter, so every stage makes it"
    hidden_shape: Callable[[Batch, int], tuple[int, ...]]
    "(microbatch, block) -> shape of what that block of the whole model returns, such as (B, S, D)"
    losses: Callable[[Tensor, Batch, TokenLoss], tuple[Tensor, Tensor]]
    "output of the last block -> (loss of every token, 0 where none counts; which ones count)"
    label_smoothing: float = 0.0
    "share of the target spread over the vocabulary, in training only"
    call: Callable[[nn.Module, Tensor, object], Tensor] = call_plainly
    "(block, hidden state, context) -> hidden state"
    rules: Mapping[str, str] | None = None
    "module path pattern -> how it may be cut (`partition/cuts.py`)"
    costs: Sequence[float] = field(default=())
    "relative compute of every block; empty: all alike"

    def run(self, blocks: Sequence[nn.Module], hidden: Tensor, context: object) -> Tensor:
        """`hidden` through some of the blocks."""
        for block in blocks:
            hidden = self.call(block, hidden, context)
        return hidden


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What a language model reads of a microbatch."""

    input_ids_BS: Tensor
    "int64 tokens"
    labels_BS: Tensor
    "int64 tokens that follow, `IGNORE` where nothing is asked"
    position_ids_BS: Tensor | None = None
    "place of each token in its document; None: its place in the sequence"
    segment_ids_BS: Tensor | None = None
    "equal numbers may attend to each other; None: one text"
    sample_ids_B: Tensor | None = None
    "which sequence of the data set; only dropout uses it"


def token_losses(
    logits_BSV: Tensor, labels_BS: Tensor, token_loss: TokenLoss
) -> tuple[Tensor, Tensor]:
    """Losses (B, S) of a language model and the bool mask of the tokens that count."""
    return token_loss(logits_BSV, labels_BS), labels_BS != IGNORE


def plain_token_loss(label_smoothing: float) -> TokenLoss:
    """Cross-entropy over a whole vocabulary."""
    return partial(cross_entropy_tokens, label_smoothing=label_smoothing)


def decoder_chain(
    model: Decoder,
    *,
    read: Callable[[Batch], Tokens],
    dtype: torch.dtype,
    sequence_length: int = 0,
    label_smoothing: float = 0.0,
) -> Chain[Batch]:
    """Our decoder as a chain.

    read             a microbatch as `Tokens`
    dtype            of forward and backward
    sequence_length  tokens; weighs attention when a pipeline is cut by cost
    """
    width = model.config.hidden_size

    def context(batch: Batch) -> Context:
        tokens = read(batch)
        return model.prepare(
            tokens.input_ids_BS.shape,
            dtype=dtype,
            device=tokens.input_ids_BS.device,
            position_ids_BS=tokens.position_ids_BS,
            segment_ids_BS=tokens.segment_ids_BS,
            sample_ids_B=tokens.sample_ids_B,
            counted_BS=tokens.labels_BS != IGNORE if model.config.num_experts else None,
        )

    def losses(logits_BSV: Tensor, batch: Batch, token_loss: TokenLoss) -> tuple[Tensor, Tensor]:
        return token_losses(logits_BSV, read(batch).labels_BS, token_loss)

    return Chain(
        blocks=model.blocks(),
        enter=lambda batch: read(batch).input_ids_BS,
        context=context,
        hidden_shape=lambda batch, block: (*read(batch).input_ids_BS.shape, width),
        losses=losses,
        label_smoothing=label_smoothing,
        rules=rules(model.config),
        costs=decoder_costs(model.config, sequence_length=sequence_length),
    )
