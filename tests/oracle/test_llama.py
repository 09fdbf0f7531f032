"""Hugging Face's own Llama under the same rule table and the same plans as our decoder."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="extra `hf` is not installed")

from harness import (
    Case,
    assert_bytes,
    assert_equal_to_one_device,
    one_device,
    train_decoder,
)

from reparto.config.model import ModelConfig, decays, parameter_shapes, tied_parameters
from reparto.errors import UserError
from reparto.model.huggingface import llama
from reparto.parallel.compose import model_map

CASE = Case(foreign=True, layers=4, heads=8, kv_heads=4, sequences=8, length=8, steps=2)

PLANS = [
    "data=2",
    "data=2,shard=parameters",
    "data=4,replicas=2,shard=gradients,num_microbatches=2",
    "tensor=2",
    "tensor=4",
    "tensor=2,sequence_parallel=true",
    "tensor=2,sequence_parallel=true,recompute=full",
    "pipeline=2,num_microbatches=4,schedule=gpipe",
    "pipeline=2,num_microbatches=4,schedule=1f1b",
    "pipeline=2,num_microbatches=4,schedule=interleaved",
    "pipeline=2,num_microbatches=4,schedule=zb-h1",
    "pipeline=2,num_microbatches=4,schedule=zb-v",
    "pipeline=2,num_microbatches=4,schedule=dualpipe-v",
    "data=2,tensor=2,pipeline=2,num_microbatches=2,schedule=zb-v",
    "data=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=2,sequence_parallel=true",
]


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_one_device(plan: str) -> None:
    assert_bytes(assert_equal_to_one_device(CASE, plan))


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2,num_microbatches=2,schedule=zb-v"])
def test_biases_and_an_untied_head(plan: str) -> None:
    case = Case(
        foreign=True, kv_heads=4, sequences=8, length=8, steps=2, bias=True, tied=False,
        label_smoothing=0.1,
    )  # fmt: skip
    assert_bytes(assert_equal_to_one_device(case, plan))


def test_it_is_our_decoder_to_rounding() -> None:
    """Same names, same initial weights, same loss and gradients; its norms compute in float32."""
    case = Case(steps=1)
    ours, theirs = one_device(case), one_device(Case(steps=1, foreign=True))
    assert abs(ours.results[0].loss - theirs.results[0].loss) < 1e-7 * ours.results[0].loss
    for name, gradient in ours.gradients[0].items():
        torch.testing.assert_close(theirs.gradients[0][name], gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_names_shapes_and_ties_are_ours(tied: bool, bias: bool) -> None:
    config = Case(tied=tied, bias=bias).config
    found = model_map(llama(config), [], decays=decays)
    assert dict(found.shapes) == parameter_shapes(config)
    assert dict(found.aliases) == tied_parameters(config)


def test_selective_recompute_is_refused_where_there_is_nothing_to_select() -> None:
    with pytest.raises(UserError, match="modules named `core`"):
        train_decoder(CASE, "data=2,recompute=selective")


def test_dropout_is_refused() -> None:
    config = ModelConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, dropout=0.1,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"dropout=0\.1"):
        llama(config)
