"""Hugging Face folders: what is exported is what transformers loads; import is the inverse."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint_worlds import KEY, RUN, save_world, steps_in

from reparto.checkpoint.export import HuggingFaceFolder, export, import_huggingface
from reparto.checkpoint.layout import moment_name
from reparto.checkpoint.load import Checkpoint, find_latest, open_checkpoint
from reparto.checkpoint.rewrite import by_rows
from reparto.config.huggingface import from_hf_config, to_hf_config
from reparto.config.model import ModelConfig, parameter_shapes, tied_parameters
from reparto.data.tokenize import END_OF_DOCUMENT, train_bpe
from reparto.errors import CheckFailed, UserError
from reparto.model.transformer import Decoder, initial_tensor


def config(*, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Initial weights, made larger so that logits differ clearly."""
    return {
        name: initial_tensor(name, shape, seed=3, config=config, dtype=torch.float32) * 5
        for name, shape in parameter_shapes(config).items()
    }


def saved(root: Path, config: ModelConfig) -> Checkpoint:
    """A checkpoint of that model from three ranks, moments included."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights_of(config).items():
        tensors[name] = tensor
        tensors[moment_name("exp_avg", name)] = tensor * 0.1
        tensors[moment_name("exp_avg_sq", name)] = tensor * tensor
    save_world(root, 30, 3, tensors=tensors, aliases=tied_parameters(config))
    return find_latest(root, key=KEY).checkpoint


@pytest.mark.parametrize("tied", [True, False])
def test_export_and_import_are_inverse(tied: bool, tmp_path: Path) -> None:
    shape = config(tied=tied)
    checkpoint = saved(tmp_path / "c", shape)
    done = export(checkpoint, tmp_path / "hf", config=to_hf_config(shape))
    assert done.files == ("model.safetensors",)
    weights = weights_of(shape)
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert raw["dtype"] == "float32" and from_hf_config(raw) == shape
    assert done.num_bytes == sum(tensor.nbytes for tensor in weights.values())

    source = HuggingFaceFolder(tmp_path / "hf")
    path = import_huggingface(
        source, tmp_path / "again", run="new-run", key=KEY,
        shapes=parameter_shapes(from_hf_config(source.config)), tied=tied_parameters(shape),
        cut=by_rows(2), plan="data=2",
    )  # fmt: skip
    again = find_latest(tmp_path / "again", key=KEY).checkpoint
    assert again.path == path and again.manifest.step == 0
    again.check_against(parameter_shapes(shape))
    assert again.aliases == tied_parameters(shape)
    assert again.manifest.state["updates"] == 0 and again.manifest.state["position"] == 0
    for name, tensor in weights.items():
        assert torch.equal(again.read(name), tensor)
        assert not again.read(moment_name("exp_avg", name)).any()
        assert not again.read(moment_name("exp_avg_sq", name)).any()


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path) -> None:
    shape = config(tied=False)
    checkpoint = saved(tmp_path / "c", shape)
    done = export(checkpoint, tmp_path / "hf", config=to_hf_config(shape), shard_bytes=9_000)
    assert len(done.files) > 2
    assert done.files[0] == f"model-00001-of-{len(done.files):05d}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.num_bytes
    weights = weights_of(shape)
    assert index["weight_map"].keys() == weights.keys()
    for file in done.files:
        for name, tensor in load_file(tmp_path / "hf" / file).items():
            assert index["weight_map"][name] == file and torch.equal(tensor, weights[name])
    largest = max(tensor.nbytes for tensor in weights.values())
    for file in done.files:
        assert (tmp_path / "hf" / file).stat().st_size < max(9_000, largest) + 4_000
    source = HuggingFaceFolder(tmp_path / "hf")
    assert source.shapes == parameter_shapes(shape) and source.files == tuple(sorted(done.files))


def test_a_narrower_type_on_the_way_out_and_a_wider_one_on_the_way_in(tmp_path: Path) -> None:
    shape = config(tied=True)
    checkpoint = saved(tmp_path / "c", shape)
    export(checkpoint, tmp_path / "hf", config=to_hf_config(shape), dtype="bfloat16")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert raw["dtype"] == "bfloat16"
    source = HuggingFaceFolder(tmp_path / "hf")
    path = import_huggingface(
        source, tmp_path / "again", run=RUN, key=KEY, shapes=parameter_shapes(shape),
        tied=tied_parameters(shape),
    )  # fmt: skip
    again = open_checkpoint(path, KEY)
    for name, tensor in weights_of(shape).items():
        assert again.manifest.tensors[name].dtype == "float32"
        assert torch.equal(again.read(name), tensor.bfloat16().float())
    with pytest.raises(UserError, match="int8") as caught:
        export(checkpoint, tmp_path / "x", config={}, dtype="int8")
    assert "bfloat16" in caught.value.legal


def test_export_is_whole_or_not_there(tmp_path: Path) -> None:
    shape = config(tied=True)
    checkpoint = saved(tmp_path / "c", shape)
    path = tmp_path / "c" / "step-30" / "rank-00001.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    fresh = open_checkpoint(tmp_path / "c" / "step-30", KEY)
    with pytest.raises(CheckFailed, match="rank-00001"):
        export(fresh, tmp_path / "hf", config={})
    assert steps_in(tmp_path) == ["c"]
    (tmp_path / "hf").mkdir()
    with pytest.raises(UserError, match="already"):
        export(checkpoint, tmp_path / "hf", config={})


def test_import_lists_all_missing_unused_and_wrong_tensors(tmp_path: Path) -> None:
    shape = config(tied=True)
    weights = weights_of(shape)
    del weights["model.norm.weight"]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(24, 15)
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(to_hf_config(shape)))
    with pytest.raises(UserError) as caught:
        import_huggingface(
            HuggingFaceFolder(tmp_path / "hf"), tmp_path / "c", run=RUN, key=KEY,
            shapes=parameter_shapes(shape), tied=tied_parameters(shape),
        )  # fmt: skip
    text = str(caught.value)
    assert "missing (1): model.norm.weight" in text
    assert "unused (1): model.layers.9.mlp.up_proj.weight" in text
    assert "model.layers.0.mlp.up_proj.weight is [24, 15], the model needs [24, 16]" in text
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("held", ["embedding", "head", "both", "both, unlike"])
def test_a_tied_weight_under_either_of_its_names(held: str, tmp_path: Path) -> None:
    shape = config(tied=True)
    weights = weights_of(shape)
    table = weights["model.embed_tokens.weight"]
    if held != "embedding":
        weights["lm_head.weight"] = table.clone() + (held == "both, unlike")
    if held == "head":
        del weights["model.embed_tokens.weight"]
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")

    def take_in() -> Path:
        return import_huggingface(
            HuggingFaceFolder(tmp_path / "hf"), tmp_path / "c", run=RUN, key=KEY,
            shapes=parameter_shapes(shape), tied=tied_parameters(shape),
        )  # fmt: skip

    if held == "both, unlike":
        with pytest.raises(UserError, match="tied, but hold different values"):
            take_in()
        return
    checkpoint = open_checkpoint(take_in(), KEY)
    assert torch.equal(checkpoint.read("lm_head.weight"), table)
    assert torch.equal(checkpoint.read("model.embed_tokens.weight"), table)


def test_folders_of_the_hubs_cache_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"x")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(UserError, match="links are not followed") as caught:
        HuggingFaceFolder(tmp_path / "hf")
    assert caught.value.nearest.startswith("cp -rL ")
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="is a pickle"):
        HuggingFaceFolder(tmp_path / "hf")


def test_a_shared_folder_that_others_may_write_can_be_imported(tmp_path: Path) -> None:
    """Nobody takes it as proven, so nobody minds who owns it."""
    (tmp_path / "hf").mkdir()
    path = tmp_path / "hf" / "model.safetensors"
    save_file({"w": torch.ones(2)}, path)
    path.chmod(0o666)
    assert HuggingFaceFolder(tmp_path / "hf").shapes == {"w": (2,)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 9_000])
def test_transformers_loads_it_with_equal_logits(
    tied: bool, shard_bytes: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = config(tied=tied)
    checkpoint = saved(tmp_path / "c", shape)
    tokenizer = train_bpe(["to be or not to be, that is the question"] * 4, 280)
    export(
        checkpoint, tmp_path / "hf", config=to_hf_config(shape), shard_bytes=shard_bytes,
        tokenizer_json=tokenizer.to_json(), end_of_text=END_OF_DOCUMENT,
    )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", dtype=torch.float32
    )
    ours = Decoder(shape)
    ours.load_state_dict({name: checkpoint.read(name) for name in ours.state_dict()}, assign=True)
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = ours(ids), theirs(ids).logits
    assert torch.allclose(expected, found, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 0.1
    text = "to be, or not"
    taken = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert taken(text)["input_ids"] == tokenizer.encode(text)
    assert taken.eos_token == END_OF_DOCUMENT
