"""A Llama `config.json` read and written: the one place that judges a foreign description.

Field names agree, so reading is mostly a check. Every key of a foreign file falls in one of four
kinds: a field of ours, a value that must be the one our decoder computes with, a key that does not
touch the computation, or a refusal. The trade-off: a harmless new key stops an import until it is
listed here. Rejected: passing over unknown keys, by which a rescaled rotary base or a sliding
window loads well and computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
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

#: what a Llama config means by a key that it leaves out, where that differs from our default
_LLAMA_DEFAULTS: Mapping[str, Scalar] = MappingProxyType(
    {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
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
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

#: where our own residual dropout is kept, since Llama has no such field
_OUR_DROPOUT = "reparto_dropout"


def from_hf_config(raw: Mapping[str, object], *, where: str = "config.json") -> ModelConfig:
    """`ModelConfig` of a Llama `config.json`; anything that would compute otherwise is refused.

    Raises `UserError` naming the key: another architecture, a key whose value changes the
    computation, a key this version does not know, a missing or wrong size.
    """
    if raw.get("model_type") != "llama":
        raise UserError(
            f"model_type is {raw.get('model_type')!r}; names and computation are only known to "
            "agree for Llama",
            where=where,
            legal="model_type llama",
            nearest="convert the checkpoint to Llama's layout first",
        )
    fields: dict[str, Scalar] = dict(_LLAMA_DEFAULTS)
    for key, value in raw.items():
        if key in _FIXED:
            legal, reason = _FIXED[key]
            if value not in legal:
                raise UserError(
                    f"{key} is {value!r}, but here {reason}",
                    where=where,
                    legal=" or ".join(map(repr, legal)),
                )
        elif key == "rope_parameters":
            fields["rope_theta"] = _plain_theta(value, where=where)
        elif key == _OUR_DROPOUT:
            fields["dropout"] = _scalar(key, value, where=where)
        elif key in ModelConfig.model_fields and key != "dropout":
            fields[key] = _scalar(key, value, where=where)
        elif key not in _WITHOUT_EFFECT:
            raise UserError(
                f"key {key!r} is not known here, so its effect on the model is not either",
                where=where,
                nearest=f"remove {key} if the model is a plain Llama without it",
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


def to_hf_config(config: ModelConfig) -> dict[str, object]:
    """The `config.json` of this model. `from_hf_config` gives the same `ModelConfig` back.

    The rotary base is written twice: older readers look for `rope_theta`, newer ones for
    `rope_parameters`. Our dropout, when set, is kept under a key that other readers pass over.
    """
    fields: dict[str, object] = config.model_dump(exclude={"dropout"})
    if config.dropout:
        fields[_OUR_DROPOUT] = config.dropout
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **fields,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }
