"""The model as a value: sizes, presets, parameter names and shapes, and what they imply.

A model is described before any tensor exists, so that a planner can count bytes, a checkpoint can
be checked and a run can be refused without importing torch. The field names are those of a Hugging
Face Llama `config.json` and the parameter names those of its weights, so both directions of
exchange are a rename of nothing. The price is that the words are theirs, not DESIGN's
(`hidden_size`, `q_proj`). Rejected: names of our own with a translation table, which has to be
right in every room that touches a weight.

`parameter_shapes` is the one list of parameters. The module in `model/transformer.py` is tested
against it; nothing else writes these names down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reparto.errors import UserError, nearest_word

#: a field's value as TOML or JSON gives it
Scalar = int | float | bool | str | None


class ModelConfig(BaseModel):
    """Sizes of one decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, experts.

    Raises `pydantic.ValidationError` on wrong fields; `model_config_of` raises a `UserError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocab_size: int = Field(gt=0)
    """Rows of the embedding table, in tokens. A run replaces it by its tokenizer's size."""

    hidden_size: int = Field(gt=0)
    """Width of the residual stream, in elements a token."""

    intermediate_size: int = Field(gt=0)
    """Width inside the feed-forward part, in elements a token; gate and up each have it."""

    num_hidden_layers: int = Field(gt=0)
    """Decoder layers of the whole model, over all pipeline stages."""

    num_attention_heads: int = Field(gt=0)
    """Query heads of one layer of the whole model."""

    num_key_value_heads: int = Field(default=0, gt=0)
    """Key and value heads of one layer; each serves heads / kv_heads query heads. None: as many
    as query heads."""

    head_dim: int = Field(default=0, gt=0)
    """Elements of one head, even because rotary positions turn pairs. None: hidden / heads."""

    max_position_embeddings: int = Field(default=2048, gt=0)
    """Longest sequence the model is meant for, in tokens."""

    rms_norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square before the root, so that a zero row stays finite."""

    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary wavelengths; larger means slower turning and longer reach."""

    tie_word_embeddings: bool = True
    """Whether the output head is the embedding table itself."""

    attention_bias: bool = False
    """Whether the four attention projections carry a bias."""

    mlp_bias: bool = False
    """Whether the three feed-forward projections carry a bias."""

    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of initial matrices; residual outputs are scaled down from it."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of elements dropped from what each half-layer adds to the residual stream; ours, not
    Llama's."""

    qk_norm: bool = False
    """Whether queries and keys are normed head by head before they turn (Qwen3)."""

    num_experts: int = Field(default=0, ge=0)
    """Routed experts of a layer; 0: every feed-forward part is dense."""

    num_experts_per_tok: int = Field(default=2, gt=0)
    """Routed experts that one token passes."""

    moe_intermediate_size: int = Field(default=0, ge=0)
    """Width inside one expert, in elements a token. 0: intermediate_size."""

    n_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token passes besides, stored as one of their joint width."""

    decoder_sparse_step: int = Field(default=1, gt=0)
    """Layers s-1, 2s-1, ... have experts; the others are dense."""

    router_scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: over all experts, or each by itself."""

    norm_topk_prob: bool = True
    """Whether the scores of a token's experts are divided by their sum."""

    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Factor of what routed experts add."""

    router_balance: Literal["loss", "bias", "none"] = "loss"
    """What evens out the experts' load: a loss, or a bias on the choice that is no part of the
    weights of the sum."""

    router_aux_loss_coef: float = Field(default=0.001, ge=0)
    """Weight of the balancing loss, under router_balance = "loss"; 1 a layer when even."""

    router_bias_rate: float = Field(default=0.001, gt=0)
    """Step of the bias after each update, under router_balance = "bias"."""

    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the squared log-sum of router logits, which keeps them small."""

    capacity_factor: float = Field(default=0.0, ge=0)
    """Most tokens of one sequence that an expert takes, as a multiple of an even share; what is
    over passes by. 0: no limit, nothing is dropped."""

    @property
    def expert_size(self) -> int:
        """Width inside one routed expert, in elements a token."""
        return self.moe_intermediate_size or self.intermediate_size

    def expert_capacity(self, sequence_length: int) -> int:
        """Most tokens of one sequence that an expert takes, where there is a `capacity_factor`."""
        even = sequence_length * self.num_experts_per_tok / self.num_experts
        return int(self.capacity_factor * even)

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) routes its tokens to experts."""
        return self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(filter(self.has_experts, range(self.num_hidden_layers)))

    @model_validator(mode="before")
    @classmethod
    def _fill_from_heads(cls, raw: object) -> object:
        """Replace a missing or None head_dim and num_key_value_heads by what heads imply."""
        if not isinstance(raw, Mapping):
            return raw
        fields = dict(raw)
        heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
        if fields.get("num_key_value_heads") is None and isinstance(heads, int):
            fields["num_key_value_heads"] = heads
        if fields.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int):
            if heads > 0 and hidden % heads:
                legal = [n for n in range(1, hidden + 1) if hidden % n == 0]
                raise ValueError(
                    f"num_attention_heads = {heads} does not divide hidden_size = {hidden}; "
                    f"nearest that do: {_around(heads, legal)}; or set head_dim"
                )
            fields["head_dim"] = hidden // heads if heads > 0 else 0
        return fields

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelConfig:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            legal = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}; "
                f"legal: {', '.join(map(str, legal))}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim = {self.head_dim} is odd, but rotary positions turn pairs of elements; "
                f"nearest: {self.head_dim - 1 or 2} or {self.head_dim + 1}"
            )
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> ModelConfig:
        experts, chosen = self.num_experts, self.num_experts_per_tok
        if experts == 0:
            return self
        if chosen > experts:
            raise ValueError(
                f"num_experts_per_tok = {chosen} of num_experts = {experts}; legal: 1 to {experts}"
            )
        if self.mlp_bias:
            raise ValueError("experts have no bias; set mlp_bias = false")
        if not self.expert_layers:
            raise ValueError(
                f"decoder_sparse_step = {self.decoder_sparse_step} leaves no layer of "
                f"{self.num_hidden_layers} with experts; legal: 1 to {self.num_hidden_layers}"
            )
        return self

    def with_vocab_size(self, vocab_size: int) -> ModelConfig:
        """The same model over another vocabulary."""
        return model_config_of({**self.model_dump(), "vocab_size": vocab_size})


def _around(value: int, legal: list[int]) -> str:
    """The legal numbers just below and above `value`, as words."""
    below = [n for n in legal if n < value][-1:]
    above = [n for n in legal if n > value][:1]
    return " or ".join(map(str, below + above))


def model_config_of(fields: Mapping[str, Scalar], *, where: str = "model") -> ModelConfig:
    """`ModelConfig` from plain fields; every mistake becomes one `UserError` at `where`."""
    for name in fields:
        if name not in ModelConfig.model_fields:
            raise UserError(
                f"unknown field {name!r}",
                where=where,
                legal=", ".join(ModelConfig.model_fields),
                nearest=nearest_word(name, ModelConfig.model_fields),
            )
    try:
        return ModelConfig.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join([where, *map(str, first["loc"])])
        found = f"; found {first['input']!r}" if first["loc"] else ""
        raise UserError(first["msg"].removeprefix("Value error, ") + found, where=field) from error


# --- presets -------------------------------------------------------------------------------------
# Heads and key/value heads are powers of two, so that tensor degrees 2 and 4 always divide them;
# layer counts are multiples of 4 for the same reason on the pipeline axis.

PRESETS: Mapping[str, Mapping[str, Scalar]] = MappingProxyType(
    {
        name: MappingProxyType(
            {
                "vocab_size": vocab,
                "hidden_size": hidden,
                "intermediate_size": intermediate,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "max_position_embeddings": positions,
            }
        )
        for name, vocab, hidden, intermediate, layers, heads, kv_heads, positions in (
            ("1m", 4096, 128, 256, 4, 4, 2, 2048),
            ("10m", 4096, 320, 832, 8, 8, 4, 2048),
            ("50m", 4096, 512, 1408, 16, 8, 4, 2048),
            ("300m", 32768, 1024, 2560, 24, 16, 8, 4096),
            ("1b", 32768, 2048, 8192, 16, 32, 8, 8192),
        )
    }
    | {
        name: MappingProxyType(
            {
                "vocab_size": 4096,
                "hidden_size": hidden,
                "intermediate_size": intermediate,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": inner,
                "router_aux_loss_coef": 0.01,
            }
        )
        for name, hidden, intermediate, layers, heads, kv_heads, inner in (
            ("moe-tiny", 128, 256, 4, 4, 2, 128),
            ("moe-10m", 256, 512, 8, 8, 4, 160),
        )
    }
)
"""Fields of each preset; a number is the rounded parameter count with that vocabulary. `moe-tiny`
has 2.3 million, of which a token meets 1.1; `moe-10m` 10.5 million, and a token 4.6."""


def preset(name: str) -> ModelConfig:
    """The preset called `name`; unknown names raise a `UserError` with the nearest one."""
    if name not in PRESETS:
        raise UserError(
            f"no preset is called {name!r}",
            where="model.preset",
            legal=", ".join(PRESETS),
            nearest=nearest_word(name, PRESETS) or "10m",
        )
    return model_config_of(PRESETS[name], where=f"model.preset {name}")


# --- parameters ----------------------------------------------------------------------------------

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global name -> global shape of every parameter, in model order.

    Shapes of matrices are (out, in). A tied head is not listed: see `tied_parameters`.
    """
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= _attention_shapes(config, f"{prefix}.self_attn")
        if config.has_experts(layer):
            shapes |= _expert_shapes(config, f"{prefix}.mlp")
        else:
            shapes |= _feed_forward_shapes(
                config, f"{prefix}.mlp", config.intermediate_size, bias=config.mlp_bias
            )
        shapes[f"{prefix}.input_layernorm.weight"] = (config.hidden_size,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (config.hidden_size,)
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _attention_shapes(config: ModelConfig, path: str) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (
        ("q_proj", queries, hidden),
        ("k_proj", keys, hidden),
        ("v_proj", keys, hidden),
        ("o_proj", hidden, queries),
    ):
        found[f"{path}.{name}.weight"] = (rows, columns)
        if config.attention_bias:
            found[f"{path}.{name}.bias"] = (rows,)
    if config.qk_norm:
        found[f"{path}.q_norm.weight"] = found[f"{path}.k_norm.weight"] = (config.head_dim,)
    return found


def _feed_forward_shapes(
    config: ModelConfig, path: str, inner: int, *, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    found: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        found[f"{path}.{name}.weight"] = (rows, columns)
        if bias:
            found[f"{path}.{name}.bias"] = (rows,)
    return found


def _expert_shapes(config: ModelConfig, path: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        f"{path}.gate.weight": (config.num_experts, config.hidden_size)
    }
    for expert in range(config.num_experts):
        found |= _feed_forward_shapes(config, f"{path}.experts.{expert}", config.expert_size)
    if config.n_shared_experts:
        inner = config.n_shared_experts * config.expert_size
        found |= _feed_forward_shapes(config, f"{path}.shared_experts", inner)
    return found


def tied_parameters(config: ModelConfig) -> dict[str, str]:
    """Alias -> the global name whose storage it is; empty if nothing is tied."""
    return {HEAD: EMBEDDING} if config.tie_word_embeddings else {}


def num_parameters(config: ModelConfig) -> int:
    """Elements over all parameters, tied ones once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter with this global name.

    Matrices decay; biases and norm weights do not. The embedding table is a matrix here: tied, it
    is the head's matrix too, and one rule for both cases keeps a tied and an untied run
    comparable; it is also what the common recipes for small decoders do. The cost is that rows of
    tokens that never occur shrink towards zero. The rule reads the name, not the shape, because a
    shard of a flattened or cut tensor no longer shows how many dims the whole has.
    """
    return name.endswith(".weight") and not name.endswith("norm.weight")


def rules(config: ModelConfig) -> dict[str, str]:
    """Module path pattern -> how a tensor strategy may cut it; `*` stands for one path element.

    | style | weight (out, in) is cut by | input | output |
    |---|---|---|---|
    | `vocab_rows` | rows of the table | token ids, whole | sum over ranks |
    | `column` | out (heads for q, k, v) | whole | cut by the last dim |
    | `row` | in | cut by the last dim | sum over ranks |
    | `vocab_column` | out, which is the vocabulary | whole | logits cut by vocabulary |
    | `enter` | not cut | made whole, once for the `column` modules inside | as it comes |
    | `enter_leave` | not cut | the same | sum over ranks |
    | `row_partial` | in | cut by the last dim | a term of the sum that `enter_leave` makes |
    | `partial` | not cut; its gradient is a term of a sum | whole | as it comes |
    | `experts` | not cut; its children may be on other ranks | rows by expert | rows by expert |
    | `replicated` | not cut | as it comes | as it comes |

    A module that no pattern names is `replicated`. All styles: `partition/cuts.py`. Cuts of
    `column` and `row` in attention fall between heads as long as the degree divides
    num_key_value_heads.
    """
    layer = "model.layers.*"
    found = {
        "model.embed_tokens": "vocab_rows",
        f"{layer}.self_attn": "enter",
        f"{layer}.self_attn.q_proj": "column",
        f"{layer}.self_attn.k_proj": "column",
        f"{layer}.self_attn.v_proj": "column",
        f"{layer}.self_attn.o_proj": "row",
        f"{layer}.input_layernorm": "replicated",
        f"{layer}.post_attention_layernorm": "replicated",
        "model.norm": "replicated",
        "lm_head": "vocab_column",
    }
    if config.qk_norm:
        found |= {f"{layer}.self_attn.{one}_norm": "partial" for one in "qk"}
    mixed = 0 < len(config.expert_layers) < config.num_hidden_layers
    for index in range(config.num_hidden_layers) if mixed else (0,):
        mlp = f"{f'model.layers.{index}' if mixed else layer}.mlp"
        if config.has_experts(index) or (not mixed and config.num_experts):
            found |= _expert_rules(config, mlp)
        else:
            found |= {mlp: "enter", **_feed_forward_rules(mlp, "row")}
    return found


def _feed_forward_rules(path: str, down: str) -> dict[str, str]:
    return {f"{path}.gate_proj": "column", f"{path}.up_proj": "column", f"{path}.down_proj": down}


def _expert_rules(config: ModelConfig, mlp: str) -> dict[str, str]:
    found = {
        mlp: "enter_leave",
        f"{mlp}.gate": "partial",
        f"{mlp}.experts": "experts",
        **_feed_forward_rules(f"{mlp}.experts.*", "row_partial"),
    }
    if config.n_shared_experts:
        found |= _feed_forward_rules(f"{mlp}.shared_experts", "row_partial")
    return found
