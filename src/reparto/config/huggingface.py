"""A `config.json` read and written: the one place that judges a foreign description.

Four families compute what our decoder does: Llama; Qwen3, which norms queries and keys; Mixtral and
Qwen3-MoE, the same two with experts. Field names agree, so reading is mostly a check. Every key of
a foreign file falls in one of four kinds: a field of ours, a value that must be the one our decoder
computes with, a key that does not touch the computation, or a refusal. The trade-off: a harmless
new key stops an import until it is listed here. Rejected: passing over unknown keys, by which a
rescaled rotary base or a sliding window loads well and computes something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from reparto.config.model import ModelConfig, Scalar, model_config_of
from reparto.errors import UserError

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

#: what a config of each family means by keys that it leaves out, where that differs from ours
_DEFAULTS: Mapping[str, Mapping[str, Scalar]] = MappingProxyType(
    {
        "llama": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        "qwen3": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "qk_norm": True},
        "mixtral": {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 1e6,
                    "num_key_value_heads": 8, "num_experts": 8},
        "qwen3_moe": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "qk_norm": True,
                      "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 768, "norm_topk_prob": False},
    }
)  # fmt: skip

_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }
)

#: keys our decoder can only meet with these values, and what they would change
_FIXED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "hidden_act": (("silu",), "the feed-forward part is SwiGLU"),
        "attention_dropout": ((0, 0.0), "attention weights are never dropped"),
        "pretraining_tp": ((1,), "projections are not computed in slices"),
        "rope_scaling": ((None,), "rotary angles are not rescaled"),
        "partial_rotary_factor": ((1, 1.0), "rotary positions turn the whole head"),
        "sliding_window": ((None,), "attention reaches back to the start"),
        "quantization_config": ((None,), "weights are plain floating point"),
        "is_encoder_decoder": ((False,), "there is only a decoder"),
        "use_sliding_window": ((False,), "attention reaches back to the start"),
        "router_jitter_noise": ((0, 0.0), "router inputs are not disturbed"),
        "mlp_only_layers": (([], None), "which layers have experts follows from one step"),
    }
)

#: keys that do not touch the logits of a plain forward
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_router_logits",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

#: our own fields, which do not touch the logits of a plain forward, are kept under this prefix
_OURS = "reparto_"
_OUR_FIELDS = (
    "dropout", "router_balance", "router_bias_rate", "router_z_loss_coef",
)  # fmt: skip

#: fields that only models with experts have
_EXPERT_FIELDS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
    "decoder_sparse_step", "router_scoring", "norm_topk_prob", "routed_scaling_factor",
    "router_balance", "router_aux_loss_coef", "router_bias_rate", "router_z_loss_coef",
    "capacity_factor",
)  # fmt: skip

#: other families' words for fields of ours
_OTHER_WORDS = {"num_local_experts": "num_experts"}


def from_hf_config(raw: Mapping[str, object], *, where: str = "config.json") -> ModelConfig:
    """`ModelConfig` of a `config.json`; anything that would compute otherwise is refused.

    Raises `UserError` naming the key: another architecture, a key whose value changes the
    computation, a key this version does not know, a missing or wrong size.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _DEFAULTS:
        raise UserError(
            f"model_type is {family!r}; names and computation are only known to "
            f"agree for {', '.join(_DEFAULTS)}",
            where=where,
            legal=f"model_type {', '.join(_DEFAULTS)}",
            nearest="convert the checkpoint to Llama's layout first",
        )
    experts = family in ("mixtral", "qwen3_moe")
    fields: dict[str, Scalar] = dict(_DEFAULTS[family])
    for key, value in raw.items():
        name = _OTHER_WORDS.get(key, key)
        ours = key.removeprefix(_OURS)
        if key in _FIXED:
            legal, reason = _FIXED[key]
            if value not in legal:
                raise UserError(
                    f"{key} is {value!r}, but here {reason}",
                    where=where,
                    legal=" or ".join(map(repr, legal)),
                )
        elif key == "layer_types":
            _refuse_windows(value, where=where)
        elif key == "rope_parameters":
            fields["rope_theta"] = _plain_theta(value, where=where)
        elif key.startswith(_OURS) and ours in _OUR_FIELDS:
            fields[ours] = _scalar(key, value, where=where)
        elif (
            name in ModelConfig.model_fields
            and name not in (*_OUR_FIELDS, "qk_norm")
            and (experts or name not in _EXPERT_FIELDS)
        ):
            fields[name] = _scalar(key, value, where=where)
        elif key not in _WITHOUT_EFFECT:
            raise UserError(
                f"key {key!r} is not known here, so its effect on the model is not either",
                where=where,
                nearest=f"remove {key} if the model is a plain {family} without it",
            )
    for key in _REQUIRED:
        if key not in fields:
            raise UserError(f"size {key!r} is missing", where=where, legal="a positive integer")
    return model_config_of(fields, where=where)


def _scalar(key: str, value: object, *, where: str) -> Scalar:
    if value is None or isinstance(value, int | float | str):
        return value
    raise UserError(f"{key} must be one value; found {value!r}", where=where)


def _plain_theta(value: object, *, where: str) -> Scalar:
    """The base out of newer files' `rope_parameters`, which must ask for unscaled angles."""
    if (
        isinstance(value, Mapping)
        and set(value) <= {"rope_theta", "rope_type"}
        and value.get("rope_type", "default") == "default"
        and "rope_theta" in value
    ):
        return _scalar("rope_theta", value["rope_theta"], where=where)
    raise UserError(
        f"rope_parameters is {value!r}, but here rotary angles are not rescaled",
        where=where,
        legal='{"rope_type": "default", "rope_theta": NUMBER}',
    )


def _refuse_windows(value: object, *, where: str) -> None:
    if not isinstance(value, list) or any(kind != "full_attention" for kind in value):
        raise UserError(
            f"layer_types is {value!r}, but here attention reaches back to the start",
            where=where,
            legal="full_attention in every layer",
        )


def _family(config: ModelConfig) -> str:
    """The family that computes what this model does. Raises `UserError` if there is none."""
    if config.qk_norm and config.mlp_bias:
        raise UserError(
            "Qwen3 norms queries and keys, and its feed-forward parts have no bias",
            where="model.mlp_bias",
            legal="false with qk_norm = true",
        )
    if not config.num_experts:
        return "qwen3" if config.qk_norm else "llama"
    for field, value, wanted in (
        ("router_scoring", config.router_scoring, "softmax"),
        ("n_shared_experts", config.n_shared_experts, 0),
        ("routed_scaling_factor", config.routed_scaling_factor, 1.0),
        ("capacity_factor", config.capacity_factor, 0.0),
        ("router_balance", config.router_balance == "bias", False),
    ):
        if value != wanted:
            raise UserError(
                "no architecture of transformers that is written here computes this",
                where=f"model.{field}",
                legal="loss, none" if field == "router_balance" else str(wanted),
                nearest="keep the checkpoint in its own format",
            )
    if config.qk_norm:
        return "qwen3_moe"
    if not config.norm_topk_prob or config.decoder_sparse_step != 1 or config.attention_bias:
        raise UserError(
            "Mixtral has experts in every layer, norms a token's scores and has no biases; "
            "Qwen3-MoE also norms queries and keys",
            where="model",
            legal="norm_topk_prob = true, decoder_sparse_step = 1, attention_bias = false, or "
            "qk_norm = true",
        )
    return "mixtral"


def hub_names(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """Our parameter names -> those of the family's files. They differ for Mixtral alone, which
    calls gate, up and down w1, w3 and w2.
    """
    if _family(config) != "mixtral":
        return {name: name for name in names}
    words = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    found = {}
    for name in names:
        other = name.replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in words.items():
            other = other.replace(f".{ours}.", f".{theirs}.")
        found[name] = other
    return found


def to_hf_config(config: ModelConfig) -> dict[str, object]:
    """The `config.json` of this model. `from_hf_config` gives the same `ModelConfig` back.

    The rotary base is written twice: older readers look for `rope_theta`, newer ones for
    `rope_parameters`. Our own fields, when set, are kept under keys that other readers pass over.
    Raises `UserError` for a model that transformers has no architecture for.
    """
    family = _family(config)
    ours = set(_OUR_FIELDS) | {"qk_norm"}
    fields: dict[str, object] = config.model_dump(exclude=ours | set(_EXPERT_FIELDS))
    defaults = {name: ModelConfig.model_fields[name].default for name in _OUR_FIELDS}
    for name, default in defaults.items():
        if getattr(config, name) != default:
            fields[f"{_OURS}{name}"] = getattr(config, name)
    if config.num_experts:
        fields["num_local_experts"] = config.num_experts
        fields["num_experts_per_tok"] = config.num_experts_per_tok
        fields["router_aux_loss_coef"] = config.router_aux_loss_coef
    if family == "mixtral":
        fields["intermediate_size"] = config.expert_size
        fields.pop("attention_bias"), fields.pop("mlp_bias")
    if family == "qwen3_moe":
        fields["num_experts"] = fields.pop("num_local_experts")
        fields["moe_intermediate_size"] = config.expert_size
        fields["norm_topk_prob"] = config.norm_topk_prob
        fields["decoder_sparse_step"] = config.decoder_sparse_step
        fields["mlp_only_layers"] = []
    if family != "llama":
        fields.pop("mlp_bias", None)
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "hidden_act": "silu",
        **fields,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
