"""Model sizes from every description: published parameter counts, config.json, bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reparto.config.model import num_parameters, preset
from reparto.errors import UserError
from reparto.planner.model_spec import ModelSpec, load_model, model_names, spec_from_hf

# printed by their authors, in 1e9 parameters (total, active for a token)
PUBLISHED = {
    "llama-2-7b": (6.74, None),
    "llama-2-70b": (68.98, None),
    "llama-3-8b": (8.03, None),
    "llama-3-405b": (405.9, None),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.1),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.1, 22.2),
    "deepseek-v3": (671.0, 37.5),
    "gpt-3-175b": (174.6, None),
    "bloom-176b": (176.2, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    model = load_model(name)
    total, active = PUBLISHED[name]
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.003)
    if active is not None:
        # active counts in papers differ in whether the embedding table is looked up or counted
        looked_up = model.embedding_parameters / 1e9
        assert active - looked_up - 0.6 < model.active_parameters / 1e9 < active + 0.6


def test_every_named_model_loads() -> None:
    for name in model_names():
        assert load_model(name).parameters > 0


def test_preset_has_the_parameters_of_the_model_that_is_trained() -> None:
    for name in ("1m", "10m", "50m"):
        norm = preset(name).hidden_size  # the last norm, which a prediction leaves out
        assert load_model(name).parameters + norm == num_parameters(preset(name))


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip


def test_config_json_with_latent_attention_and_experts_equals_the_named_model() -> None:
    found = spec_from_hf(DEEPSEEK, name="deepseek-v3", where="config.json")
    assert found == load_model("deepseek-v3")


def test_config_json_of_gpt2_has_its_own_names_and_defaults() -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    found = spec_from_hf(config, name="gpt2", where="config.json")
    assert (found.ffn, found.gated, found.tied) == (3072, False, True)
    # 124.4 million with positions (0.8), biases and norms (0.1)
    assert found.parameters == pytest.approx(123.6e6, rel=0.005)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_of_config_json_is_named(key: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({k: v for k, v in DEEPSEEK.items() if k != key}))
    with pytest.raises(UserError, match="is missing") as error:
        load_model(str(file))
    assert key in error.value.legal


def test_wrong_files_and_names_are_user_errors(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_model(str(broken))
    with pytest.raises(UserError, match="cannot read"):
        load_model(str(tmp_path / "none.json"))
    with pytest.raises(UserError) as error:
        load_model("llama-3-80b")
    assert error.value.nearest.startswith("llama-3-8")


@pytest.mark.parametrize(
    ("field", "value"), [("heads", 0), ("layers", -1), ("kv_heads", 3), ("active_experts", 9)]
)
def test_impossible_sizes_are_refused(field: str, value: int) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 128}
    sizes |= {"vocab": 100, "experts": 8, "active_experts": 2, "expert_ffn": 64}
    with pytest.raises(UserError):
        ModelSpec(name="m", **{**sizes, field: value})  # type: ignore[arg-type]
