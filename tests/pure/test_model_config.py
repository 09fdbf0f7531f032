"""The model as a value: sizes that fit, presets that are named right, names that are Llama's."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reparto.config.huggingface import from_hf_config, to_hf_config
from reparto.config.model import (
    PRESETS,
    ModelConfig,
    decays,
    model_config_of,
    num_parameters,
    parameter_shapes,
    preset,
    rules,
    tied_parameters,
)
from reparto.errors import UserError

SMALL = {
    "vocab_size": 50,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 4))
    return ModelConfig(
        vocab_size=draw(st.integers(1, 300)),
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 40)),
        num_hidden_layers=draw(st.integers(1, 5)),
        num_attention_heads=kv_heads * draw(st.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        rope_theta=draw(st.sampled_from([10_000.0, 500_000.0])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )


@pytest.mark.parametrize(
    ("name", "nominal"),
    [("1m", 1e6), ("10m", 10e6), ("50m", 50e6), ("300m", 300e6), ("1b", 1e9)],
)
def test_a_preset_is_named_after_its_parameter_count(name: str, nominal: float) -> None:
    assert num_parameters(preset(name)) == pytest.approx(nominal, rel=0.12)


def test_presets_can_be_cut_by_4_in_heads_layers_and_width() -> None:
    for name in PRESETS:
        config = preset(name)
        assert config.num_key_value_heads % 2 == 0
        assert config.num_hidden_layers % 4 == 0
        assert config.intermediate_size % 8 == 0
        assert config.vocab_size % 8 == 0


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        preset("10mb")
    assert caught.value.nearest == "10m"
    assert "300m" in caught.value.legal


def test_none_means_what_the_heads_imply() -> None:
    config = model_config_of(
        {**SMALL, "hidden_size": 32, "head_dim": None, "num_key_value_heads": None}
    )
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "legal: 1, 2, 4"]),
        ({"num_attention_heads": 5, "head_dim": None}, ["hidden_size = 12", "4 or 6"]),
        ({"head_dim": 7}, ["head_dim = 7", "6 or 8"]),
        ({"head_dim": None}, ["head_dim = 3", "2 or 4"]),
        ({"vocab_size": 0}, ["model.vocab_size", "greater than 0", "found 0"]),
        ({"hidden_size": -12, "head_dim": 2}, ["model.hidden_size", "found -12"]),
        ({"num_hidden_layers": 2.5}, ["model.num_hidden_layers", "integer", "found 2.5"]),
        ({"num_attention_heads": "4"}, ["model.num_attention_heads", "integer"]),
        ({"tie_word_embeddings": 1}, ["model.tie_word_embeddings", "boolean"]),
        ({"dropout": 1.0}, ["model.dropout", "less than 1"]),
        ({"rope_theta": math.nan}, ["model.rope_theta"]),
        ({"rms_norm_eps": math.inf}, ["model.rms_norm_eps"]),
        ({"num_layers": 4}, ["unknown field 'num_layers'", "nearest: num_hidden_layers"]),
    ],
)
def test_wrong_fields_are_refused_in_words(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        model_config_of({**SMALL, **change})  # type: ignore[dict-item]
    for word in words:
        assert word in str(caught.value)


def test_a_missing_size_is_named() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size"):
        model_config_of({k: v for k, v in SMALL.items() if k != "vocab_size"})


def test_a_config_cannot_be_changed_but_can_take_another_vocabulary() -> None:
    config = preset("1m")
    with pytest.raises(ValidationError):
        config.vocab_size = 7  # type: ignore[misc]
    other = config.with_vocab_size(1000)
    assert other.vocab_size == 1000
    assert num_parameters(config) - num_parameters(other) == 3096 * config.hidden_size
    with pytest.raises(UserError, match="vocab_size"):
        config.with_vocab_size(0)


# --- parameters ----------------------------------------------------------------------------------


def test_names_and_shapes_of_one_layer_are_those_of_llama() -> None:
    config = model_config_of({**SMALL, "num_hidden_layers": 1, "tie_word_embeddings": False})
    assert list(parameter_shapes(config).items()) == [
        ("model.embed_tokens.weight", (50, 12)),
        ("model.layers.0.self_attn.q_proj.weight", (24, 12)),
        ("model.layers.0.self_attn.k_proj.weight", (12, 12)),
        ("model.layers.0.self_attn.v_proj.weight", (12, 12)),
        ("model.layers.0.self_attn.o_proj.weight", (12, 24)),
        ("model.layers.0.mlp.gate_proj.weight", (20, 12)),
        ("model.layers.0.mlp.up_proj.weight", (20, 12)),
        ("model.layers.0.mlp.down_proj.weight", (12, 20)),
        ("model.layers.0.input_layernorm.weight", (12,)),
        ("model.layers.0.post_attention_layernorm.weight", (12,)),
        ("model.norm.weight", (12,)),
        ("lm_head.weight", (50, 12)),
    ]


@given(configs())
def test_the_parameter_count_is_the_closed_formula(config: ModelConfig) -> None:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    layer += (queries + 2 * keys + hidden) if config.attention_bias else 0
    layer += (2 * inner + hidden) if config.mlp_bias else 0
    tables = 1 if config.tie_word_embeddings else 2
    expected = config.num_hidden_layers * layer + tables * config.vocab_size * hidden + hidden
    assert num_parameters(config) == expected


@given(configs())
def test_a_tied_head_is_an_alias_and_not_a_parameter(config: ModelConfig) -> None:
    alias = {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_parameters(config) == (alias if config.tie_word_embeddings else {})
    assert ("lm_head.weight" in parameter_shapes(config)) != config.tie_word_embeddings


@given(configs())
def test_L54_matrices_decay_and_vectors_do_not(config: ModelConfig) -> None:
    for name, shape in parameter_shapes(config).items():
        assert decays(name) == (len(shape) == 2), name


@given(configs())
def test_rules_name_every_module_with_parameters(config: ModelConfig) -> None:
    def pattern(name: str) -> str:
        path = name.rpartition(".")[0].split(".")
        return ".".join("*" if part.isdigit() else part for part in path)

    modules = {pattern(name) for name in parameter_shapes(config)} | {"lm_head"}
    entries = {"model.layers.*.self_attn", "model.layers.*.mlp"}
    assert modules | entries == set(rules(config))
    styles = {"vocab_rows", "column", "row", "vocab_column", "enter", "replicated"}
    assert set(rules(config).values()) == styles


# --- config.json ---------------------------------------------------------------------------------


@given(configs())
def test_config_json_round_trip(config: ModelConfig) -> None:
    raw = to_hf_config(config)
    assert from_hf_config(raw) == config
    assert raw["architectures"] == ["LlamaForCausalLM"]


def test_a_published_llama_file_reads_as_its_authors_mean_it() -> None:
    config = from_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 5632,
            "max_position_embeddings": 2048,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 22,
            "num_key_value_heads": 4,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "transformers_version": "4.31.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        }
    )
    assert num_parameters(config) == 1_100_048_384  # TinyLlama 1.1B
    assert (config.head_dim, config.rope_theta) == (64, 10_000.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, ["'qwen2'", "Llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "SwiGLU"]),
        ({"rope_scaling": {"factor": 8.0, "rope_type": "llama3"}}, ["rope_scaling", "rescaled"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_parameters"]),
        ({"attention_dropout": 0.1}, ["attention_dropout is 0.1"]),
        ({"sliding_window": 4096}, ["sliding_window is 4096"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"num_local_experts": 8}, ["'num_local_experts'", "not known"]),
        ({"dropout": 0.5}, ["'dropout'", "not known"]),
        ({"hidden_size": [1, 2]}, ["hidden_size must be one value"]),
    ],
)
def test_what_would_compute_otherwise_is_refused(
    change: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config({**to_hf_config(preset("1m")), **change}, where="M/config.json")
    assert caught.value.where.startswith("M/config.json")
    for word in words:
        assert word in str(caught.value)


def test_a_missing_size_is_not_guessed() -> None:
    raw = to_hf_config(preset("1m"))
    del raw["hidden_size"]
    with pytest.raises(UserError, match="'hidden_size' is missing"):
        from_hf_config(raw)


def test_what_a_llama_file_leaves_out_means_what_llama_means() -> None:
    raw = to_hf_config(preset("1m"))
    for key in ("rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_parameters"):
        del raw[key]
    config = from_hf_config(raw)
    assert config.rms_norm_eps == 1e-6
    assert config.tie_word_embeddings is False
    assert config.rope_theta == 10_000.0


def test_describing_a_model_does_not_import_torch() -> None:
    code = "import sys, reparto.config.huggingface; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
