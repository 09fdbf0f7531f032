"""The fields of a run's `[model]` table that only models with experts read; `config/model.py` says
what each means. None takes the preset's or the file's value.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ExpertFields(BaseModel):
    """Sizes and rules of experts in `[model]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

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
