"""Hugging Face's own Llama, built from a config: the same rules, blocks and plans as our decoder.

One small adapter, because nearly everything agrees already: parameter names are the same, so rule
table, initial weights and checkpoints need nothing; the layers are a list, so the model is a chain.
What is left to say is how a layer is called and who makes the rotary tables and the mask, which in
transformers is the model around the layers, and here is every pipeline stage.

Needs the extra `hf`; nothing is downloaded. transformers is imported when a model is built, not
before (0.9 s). Rejected: calling `LlamaForCausalLM.forward`, which makes positions and mask from
the hidden state it holds, and so from a part of the sequence where that is cut.

    B batch   S sequence   C elements of one head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from reparto.config.huggingface import to_hf_config
from reparto.config.model import ModelConfig, rules
from reparto.errors import UserError
from reparto.model.chain import Chain, TokenLoss, Tokens, token_losses
from reparto.model.transformer import segment_mask
from reparto.partition.layers import decoder_costs

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class LlamaContext:
    """What all layers of one forward share."""

    tables: tuple[Tensor, Tensor]
    "cosines and sines of the rotary angles, (B or 1, S, C)"
    position_ids_BS: Tensor
    mask_B1SS: Tensor | None
    "True where a query may look at a key; None: plainly causal"


def llama(config: ModelConfig) -> nn.Module:
    """transformers' `LlamaForCausalLM` of our config, parameters on the meta device.

    Raises `UserError` if transformers is not there, or for dropout, which Llama does not have.
    """
    if config.dropout:
        raise UserError(
            f"dropout={config.dropout}, which Hugging Face's Llama does not have",
            where="model.dropout",
            legal="0",
            nearest="model.dropout=0.0",
        )
    for field in ("num_experts", "qk_norm"):
        if getattr(config, field):
            raise UserError(
                f"{field} = {getattr(config, field)}, which Hugging Face's Llama does not have",
                where=f"model.{field}",
                legal="0" if field == "num_experts" else "false",
                nearest="model.source=reparto",
            )
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    except ImportError as error:
        raise UserError(
            f"transformers cannot be imported: {error}",
            where="model.source",
            legal="huggingface with the extra `hf` installed, or reparto",
            nearest="pip install 'reparto[hf]'",
        ) from error
    fields = {**to_hf_config(config), "use_cache": False, "attn_implementation": "sdpa"}
    foreign = LlamaConfig.from_dict(fields)
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(foreign)
    # its tables of inverse wavelengths are buffers, which no strategy gives memory
    model.get_submodule("model").rotary_emb = LlamaRotaryEmbedding(foreign)
    return model


def llama_chain(
    model: nn.Module,
    config: ModelConfig,
    *,
    read: Callable[[Batch], Tokens],
    dtype: torch.dtype,
    sequence_length: int = 0,
    label_smoothing: float = 0.0,
) -> Chain[Batch]:
    """`llama(config)` as a chain; arguments are those of `decoder_chain`."""
    trunk = model.get_submodule("model")
    layers = list(model.get_submodule("model.layers").children())
    blocks = [
        model.get_submodule("model.embed_tokens"),
        *layers,
        model.get_submodule("model.norm"),
        model.get_submodule("lm_head"),
    ]
    layer_ids = {id(layer) for layer in layers}

    def context(batch: Batch) -> LlamaContext:
        tokens = read(batch)
        ids_BS = tokens.input_ids_BS
        position_ids_BS = tokens.position_ids_BS
        if position_ids_BS is None:
            position_ids_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device)[None]
        like = torch.empty(0, dtype=dtype, device=ids_BS.device)
        tables = trunk.get_submodule("rotary_emb")(like, position_ids_BS)
        segments_BS = tokens.segment_ids_BS
        mask_B1SS = None if segments_BS is None else segment_mask(segments_BS)
        return LlamaContext(tables=tables, position_ids_BS=position_ids_BS, mask_B1SS=mask_B1SS)

    def call(block: nn.Module, hidden: Tensor, shared: object) -> Tensor:
        if id(block) not in layer_ids:
            out: Tensor = block(hidden)
            return out
        assert isinstance(shared, LlamaContext)
        out = block(
            hidden,
            attention_mask=shared.mask_B1SS,
            position_ids=shared.position_ids_BS,
            position_embeddings=shared.tables,
        )
        return out

    def losses(logits_BSV: Tensor, batch: Batch, token_loss: TokenLoss) -> tuple[Tensor, Tensor]:
        return token_losses(logits_BSV, read(batch).labels_BS, token_loss)

    return Chain(
        blocks=blocks,
        enter=lambda batch: read(batch).input_ids_BS,
        context=context,
        hidden_shape=lambda batch, block: (*read(batch).input_ids_BS.shape, config.hidden_size),
        losses=losses,
        label_smoothing=label_smoothing,
        call=call,
        rules=rules(config),
        costs=decoder_costs(config, sequence_length=sequence_length),
    )
