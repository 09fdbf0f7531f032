"""The decoder: a Llama-shaped language model for one device, which knows nothing of ranks.

Attribute paths spell Hugging Face's parameter names, so a checkpoint needs no translation. Sizes
that a tensor strategy may cut (heads, inner width, vocabulary) are read from what a projection
returns, never from the config, so splitting q, k, v by heads needs no change here; `head_dim` is
the one size that attention keeps, and no strategy cuts it.

A model is an ordered list of blocks (`blocks()`): embedding, layers, final norm, head. Each takes
and returns the hidden state, and reads the rest from one `Context` made once a forward (rotary
tables, mask, dropout keys), so a pipeline may cut between any two. Rejected: recomputing tables
and mask in every layer, which is shorter but costs a B·S·S mask a layer.

Attention is torch's fused scaled-dot-product kernel. It sits in a module of its own without
parameters (`self_attn.core`), the place where a context strategy puts its own.

    B batch        S sequence       D hidden          V vocabulary
    H query heads  K key/value heads  C elements of one head   F inner width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from reparto.config.model import ModelConfig
from reparto.model.dropout import ElementDropout, token_keys
from reparto.model.feed_forward import FeedForward
from reparto.model.initial import initial_tensor, materialise
from reparto.model.moe import MixtureOfExperts

__all__ = ["Context", "Decoder", "build", "initial_tensor", "materialise", "rotary_tables"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What all blocks of one forward share besides the hidden state; made by `Decoder.prepare`."""

    cos_BSC: Tensor
    """Cosines of the rotary angles, (B or 1, S, C), in the model's dtype."""

    sin_BSC: Tensor
    """Sines of the same angles."""

    mask_B1SS: Tensor | None
    """True where a query may look at a key; None means plainly causal, the fast path."""

    token_keys_BS: Tensor | None
    """One int32 a token from which dropout masks grow; None when nothing is dropped."""

    counted_BS: Tensor | None = None
    """True where a token counts in the loss, and so in the load of experts; None: all do."""

    token_numbers_BS: Tensor | None = None
    """Number of each token in the data set (sequence times its length, plus place), for whoever
    compares routes; None where sequences have no number."""


def rotary_tables(
    position_ids_BS: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin (B, S, C) for positions (B, S); angles in float32, in float64 for float64.

    The second half of C repeats the first, which is the rotate-half layout of Hugging Face's
    Llama weights (Su et al. 2021, equation 34, with the pairs laid out half against half).
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, head_dim, 2, device=position_ids_BS.device).to(exact)
    angle = position_ids_BS[:, :, None].to(exact) * theta ** (-pairs / head_dim)
    angle_BSC = torch.cat((angle, angle), dim=-1)
    return angle_BSC.cos().to(dtype), angle_BSC.sin().to(dtype)


def _rotate(x_BHSC: Tensor, cos_BSC: Tensor, sin_BSC: Tensor) -> Tensor:
    """Turn each pair (x[c], x[c + C/2]) by its position's angle."""
    first, second = x_BHSC.chunk(2, dim=-1)
    turned_BHSC = torch.cat((-second, first), dim=-1)
    cos_B1SC = cos_BSC[:, None].to(x_BHSC.dtype)
    sin_B1SC = sin_BSC[:, None].to(x_BHSC.dtype)
    return x_BHSC * cos_B1SC + turned_BHSC * sin_B1SC


def segment_mask(segment_ids_BS: Tensor) -> Tensor:
    """(B, 1, S, S) bool: a query sees earlier tokens and itself, inside its own segment only."""
    size = segment_ids_BS.shape[1]
    same_BSS = segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]
    causal_SS = torch.ones(size, size, dtype=torch.bool, device=segment_ids_BS.device).tril()
    return (same_BSS & causal_SS)[:, None]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dim; the mean square is taken in float32 or better.

    Written out, it costs what torch's `rms_norm` does (4.9 ms for 8 x 256 x 320 on 2 cores), and
    the order of rounding is in plain sight: scale in float32, round, then multiply by the weight.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x_BSD: Tensor, context: Context | None = None) -> Tensor:
        """(B, S, D) -> the same. The context is taken and not used: the final norm is a block."""
        wide_BSD = x_BSD if x_BSD.dtype == torch.float64 else x_BSD.float()
        square_BS1 = wide_BSD.pow(2).mean(-1, keepdim=True)
        return (wide_BSD * torch.rsqrt(square_BS1 + self.eps)).to(x_BSD.dtype) * self.weight


class TokenEmbedding(nn.Embedding):
    """The first block: ids (B, S) -> hidden state (B, S, D)."""

    def forward(self, input: Tensor, context: Context | None = None) -> Tensor:
        return super().forward(input)


class Head(nn.Linear):
    """The last block: hidden state (B, S, D) -> logits (B, S, V)."""

    def forward(self, input: Tensor, context: Context | None = None) -> Tensor:
        return super().forward(input)


class CausalAttention(nn.Module):
    """Softmax attention of given queries over given keys and values; no parameters.

    Grouping is left to the kernel: on 2 CPU cores forward and backward take 25 ms against 49 with
    key heads repeated first (8 sequences of 256, 4 heads over 2, float32), and nothing is copied.
    """

    def forward(self, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, context: Context) -> Tensor:
        """q (B, H, S, C), k and v (B, K, S, C) with K dividing H -> (B, H, S, C)."""
        return functional.scaled_dot_product_attention(
            q_BHSC,
            k_BKSC,
            v_BKSC,
            attn_mask=context.mask_B1SS,
            is_causal=context.mask_B1SS is None,
            enable_gqa=q_BHSC.shape[1] != k_BKSC.shape[1],
        )


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm
        self.core: nn.Module = CausalAttention()

    def _heads(self, x_BSX: Tensor) -> Tensor:
        """(B, S, heads * C) -> (B, heads, S, C); as many heads as the projection returned."""
        return x_BSX.view(*x_BSX.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        q_BHSC, k_BKSC = self._heads(self.q_proj(x_BSD)), self._heads(self.k_proj(x_BSD))
        if self.qk_norm:
            q_BHSC, k_BKSC = self.q_norm(q_BHSC), self.k_norm(k_BKSC)
        q_BHSC = _rotate(q_BHSC, context.cos_BSC, context.sin_BSC)
        k_BKSC = _rotate(k_BKSC, context.cos_BSC, context.sin_BSC)
        v_BKSC = self._heads(self.v_proj(x_BSD))
        seen_BHSC = self.core(q_BHSC, k_BKSC, v_BKSC, context)
        out_BSD: Tensor = self.o_proj(seen_BHSC.transpose(1, 2).flatten(2))
        return out_BSD


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual stream after."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = Attention(config)
        self.mlp: FeedForward | MixtureOfExperts = (
            MixtureOfExperts(config)
            if config.has_experts(index)
            else FeedForward(config, config.intermediate_size, bias=config.mlp_bias)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_dropout = ElementDropout(config.dropout, layer=index, site=0)
        self.mlp_dropout = ElementDropout(config.dropout, layer=index, site=1)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        keys_BS = context.token_keys_BS
        attended_BSD = self.self_attn(self.input_layernorm(x_BSD), context)
        x_BSD = x_BSD + self.attention_dropout(attended_BSD, keys_BS)
        fed_BSD = self.mlp(self.post_attention_layernorm(x_BSD), context)
        x_BSD = x_BSD + self.mlp_dropout(fed_BSD, keys_BS)
        return x_BSD


class Trunk(nn.Module):
    """Holder of everything but the head, so that names begin with `model.`; never called."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """The whole model. Parameters are built on the meta device and hold no memory until
    `materialise` or a strategy gives them their values; there are no buffers.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.model = Trunk(config)
            self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._seed_step: tuple[int, int] | None = None

    def blocks(self) -> list[nn.Module]:
        """Embedding, layers, final norm, head: each is `block(hidden_state, context)`."""
        return [self.model.embed_tokens, *self.model.layers, self.model.norm, self.lm_head]

    def set_step(self, seed: int, step: int) -> None:
        """Name the optimizer step whose dropout masks the next forwards use."""
        self._seed_step = (seed, step)

    def prepare(
        self,
        shape_BS: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        position_ids_BS: Tensor | None = None,
        segment_ids_BS: Tensor | None = None,
        sample_ids_B: Tensor | None = None,
        counted_BS: Tensor | None = None,
    ) -> Context:
        """The shared inputs of one forward over (B, S) tokens. Reads no parameter, so a pipeline
        position that owns only a few blocks can call it too.

        position_ids_BS   place of each token in its sequence; default 0 .. S-1
        segment_ids_BS    equal numbers may attend to each other; default one segment
        sample_ids_B      which sequence of the data set; needed only while dropout is on
        counted_BS        which tokens count in the load of experts; default all
        """
        if position_ids_BS is None:
            position_ids_BS = torch.arange(shape_BS[1], device=device)[None]
        cos_BSC, sin_BSC = rotary_tables(
            position_ids_BS,
            head_dim=self.config.head_dim,
            theta=self.config.rope_theta,
            dtype=dtype,
        )
        keys_BS: Tensor | None = None
        if self.config.dropout > 0 and self.training:
            if sample_ids_B is None or self._seed_step is None:
                raise ValueError(
                    "dropout is on, so masks need set_step(seed, step) and sample_ids_B; "
                    "give both, or call eval()"
                )
            seed, step = self._seed_step
            places_BS = position_ids_BS
            if segment_ids_BS is not None:  # positions restart in each packed document
                places_BS = torch.arange(shape_BS[1], device=device)[None]
            keys_BS = token_keys(
                seed=seed, step=step, sample_ids_B=sample_ids_B, position_ids_BS=places_BS
            )
        mask_B1SS = None if segment_ids_BS is None else segment_mask(segment_ids_BS)
        numbers_BS: Tensor | None = None
        if sample_ids_B is not None and self.config.num_experts:
            places_S = torch.arange(shape_BS[1], device=device)
            numbers_BS = sample_ids_B.to(device)[:, None] * shape_BS[1] + places_S
        return Context(
            cos_BSC=cos_BSC, sin_BSC=sin_BSC, mask_B1SS=mask_B1SS, token_keys_BS=keys_BS,
            counted_BS=counted_BS, token_numbers_BS=numbers_BS,
        )  # fmt: skip

    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor | None = None,
        segment_ids_BS: Tensor | None = None,
        sample_ids_B: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, S) -> logits (B, S, V); the optional inputs are those of `prepare`."""
        context = self.prepare(
            input_ids_BS.shape,
            dtype=self.model.embed_tokens.weight.dtype,
            device=input_ids_BS.device,
            position_ids_BS=position_ids_BS,
            segment_ids_BS=segment_ids_BS,
            sample_ids_B=sample_ids_B,
        )
        x = input_ids_BS
        for block in self.blocks():
            x = block(x, context)
        return x


def build(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """An initialised model on one device."""
    model = Decoder(config)
    materialise(model, config, seed=seed, dtype=dtype, device=device)
    return model
