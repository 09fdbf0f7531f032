"""The `[model]` table of a run: which model, and which of its sizes are given here.

`config/model.py` says what each size means; None takes the preset's or the file's value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from reparto.config.huggingface import from_hf_config
from reparto.config.model import PRESETS, ModelConfig, Scalar, model_config_of, preset
from reparto.errors import UserError, nearest_word


class ModelTable(BaseModel):
    """Which model. A preset, or sizes of your own; any size given here replaces the preset's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    preset: str = "1m"
    "name of a model of this package: 1m, 10m, 50m, 300m, 1b, moe-tiny, moe-10m"
    source: Literal["reparto", "huggingface"] = "reparto"
    "reparto: our decoder; huggingface: the same sizes as transformers' own Llama (extra `hf`)"
    config: str | None = None
    "path of a Hugging Face config.json; its sizes replace the preset"
    weights: str | None = None
    "folder of Hugging Face safetensors to start from"
    vocab_size: int | None = Field(None, gt=0)
    "rows of the embedding, in tokens; default: the tokenizer's size"
    hidden_size: int | None = Field(None, gt=0)
    "elements a token in the residual stream"
    intermediate_size: int | None = Field(None, gt=0)
    "elements a token inside the feed-forward part"
    num_hidden_layers: int | None = Field(None, gt=0)
    "decoder layers"
    num_attention_heads: int | None = Field(None, gt=0)
    "query heads a layer"
    num_key_value_heads: int | None = Field(None, gt=0)
    "key and value heads a layer"
    head_dim: int | None = Field(None, gt=0)
    "elements of one head"
    rope_theta: float | None = Field(None, gt=0, strict=False)
    "base of the rotary wavelengths"
    tie_word_embeddings: bool | None = None
    "whether the head is the embedding table"
    dropout: float | None = Field(None, ge=0, lt=1, strict=False)
    "share of elements dropped from what each half-layer adds"
    qk_norm: bool | None = None
    "whether queries and keys are normed head by head"
    num_experts: int | None = Field(None, ge=0)
    "routed experts a layer; 0: dense"
    num_experts_per_tok: int | None = Field(None, gt=0)
    "routed experts that one token passes"
    moe_intermediate_size: int | None = Field(None, ge=0)
    "elements a token inside one expert; 0: intermediate_size"
    n_shared_experts: int | None = Field(None, ge=0)
    "experts that every token passes besides"
    decoder_sparse_step: int | None = Field(None, gt=0)
    "every how many layers one has experts"
    router_scoring: Literal["softmax", "sigmoid"] | None = None
    "how router logits become scores"
    norm_topk_prob: bool | None = None
    "whether a token's scores are divided by their sum"
    routed_scaling_factor: float | None = Field(None, gt=0, strict=False)
    "factor of what routed experts add"
    router_balance: Literal["loss", "bias", "none"] | None = None
    "what evens out the load of experts"
    router_aux_loss_coef: float | None = Field(None, ge=0, strict=False)
    "weight of the balancing loss"
    router_bias_rate: float | None = Field(None, gt=0, strict=False)
    "step of the balancing bias"
    router_z_loss_coef: float | None = Field(None, ge=0, strict=False)
    "weight of the squared log-sum of router logits"
    capacity_factor: float | None = Field(None, ge=0, strict=False)
    "most tokens of a sequence that an expert takes, in even shares; 0: no limit"

    @field_validator("preset")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PRESETS:
            raise UserError(
                f"no preset is called `{name}`",
                legal=", ".join(PRESETS),
                nearest=nearest_word(name, PRESETS) or "10m",
            )
        return name

    def absolute(self) -> ModelTable:
        """The same with absolute paths, so that a run resumes from any folder."""
        paths = {
            name: str(Path(value).absolute())
            for name, value in (("config", self.config), ("weights", self.weights))
            if value is not None
        }
        return self.model_copy(update=paths)

    def resolved(self, vocab_size: int) -> ModelConfig:
        """The model's sizes for a tokenizer of `vocab_size` kinds.

        Raises `UserError` when the model's vocabulary is smaller than the tokenizer's.
        """
        base = self._base()
        fields: dict[str, Scalar] = base.model_dump()
        changed = {"hidden_size", "num_attention_heads", "num_key_value_heads"}
        for name in ModelConfig.model_fields:
            value = getattr(self, name, None)
            if value is not None:
                fields[name] = value
        if self.head_dim is None and any(getattr(self, name) is not None for name in changed):
            fields["head_dim"] = None
        if self.num_key_value_heads is None and self.num_attention_heads is not None:
            fields["num_key_value_heads"] = None
        if self.vocab_size is None and self.config is None:
            fields["vocab_size"] = vocab_size
        found = model_config_of(fields)
        if found.vocab_size < vocab_size:
            raise UserError(
                f"{found.vocab_size} rows, but the tokenizer makes {vocab_size} kinds of token",
                where="model.vocab_size",
                legal=f">= {vocab_size}",
                nearest=str(vocab_size),
            )
        return found

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts, as far as can be known without a tokenizer."""
        chosen = self.num_experts
        return bool(self._base().num_experts if chosen is None else chosen)

    def _base(self) -> ModelConfig:
        if self.config is None:
            return preset(self.preset)
        try:
            raw = json.loads(Path(self.config).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"cannot read {self.config}: {error.strerror}", where="model.config"
            ) from error
        except ValueError as error:
            raise UserError(f"{self.config} is not JSON: {error}", where="model.config") from error
        if not isinstance(raw, dict):
            raise UserError(f"{self.config} is no JSON object", where="model.config")
        return from_hf_config(raw, where=self.config)
