"""Mixture of experts on one device: against transformers, and against the formula done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reparto.config.huggingface import from_hf_config, hub_names, to_hf_config
from reparto.config.model import ModelConfig, model_config_of, parameter_shapes, rules
from reparto.errors import UserError
from reparto.model.moe import MixtureOfExperts, Router, sorted_by_expert
from reparto.model.transformer import build

SMALL: dict[str, int | float | bool | str] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "rope_theta": 10_000.0,
}  # fmt: skip


class _Plain:
    counted_BS: Tensor | None = None
    token_numbers_BS: Tensor | None = None


def _block(config: ModelConfig, seed: int = 3) -> MixtureOfExperts:
    torch.manual_seed(seed)
    block = MixtureOfExperts(config).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def _by_hand(block: MixtureOfExperts, x_BSD: Tensor) -> Tensor:
    """Token by token: scores of all experts, the best K, their sum."""
    config = block.gate.config
    out = torch.zeros_like(x_BSD)
    for b, s in [(b, s) for b in range(x_BSD.shape[0]) for s in range(x_BSD.shape[1])]:
        x_D = x_BSD[b, s]
        logits_E = block.gate.weight @ x_D
        softmax = config.router_scoring == "softmax"
        scores_E = logits_E.softmax(0) if softmax else logits_E.sigmoid()
        best = (scores_E + block.gate.bias_E).argsort(descending=True)[: config.num_experts_per_tok]
        weights = scores_E[best]
        if config.norm_topk_prob:
            weights = weights / weights.sum()
        for weight, expert in zip(weights, best.tolist(), strict=True):
            out[b, s] += config.routed_scaling_factor * weight * block.experts[expert](x_D)
        if block.shared_experts is not None:
            out[b, s] += block.shared_experts(x_D)
    return out


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 4},
        {"norm_topk_prob": False},
        {"router_scoring": "sigmoid", "routed_scaling_factor": 2.5},
        {"n_shared_experts": 2},
    ],
)
def test_a_block_is_the_sum_over_the_best_experts(change: dict[str, int | bool | str]) -> None:
    block = _block(model_config_of({**SMALL, **change}))
    x_BSD = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    wanted = _by_hand(block, x_BSD)
    found = block(x_BSD, _Plain())
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(found)
    parameters = [x_BSD, *block.parameters()]
    theirs = torch.autograd.grad(wanted, parameters, grad, allow_unused=True)
    without_balance = _block(
        model_config_of({**SMALL, **change, "router_balance": "none", "router_z_loss_coef": 0.0})
    )
    ours = torch.autograd.grad(
        without_balance(x_BSD, _Plain()), [x_BSD, *without_balance.parameters()], grad
    )
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, torch.zeros_like(one) if other is None else other, atol=1e-11)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    block = _block(model_config_of({**SMALL, "router_balance": "bias"}))
    block.gate.bias_E = torch.tensor([5.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    x_BSD = torch.randn(1, 6, 32, dtype=torch.float64)
    experts_NK, weights_NK = block.gate.choose(x_BSD, _Plain())
    assert (experts_NK == 0).any(-1).all()
    assert torch.allclose(weights_NK.sum(-1), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(block(x_BSD, _Plain()), _by_hand(block, x_BSD), atol=1e-12)


def test_experts_without_tokens_have_a_gradient_of_zero() -> None:
    block = _block(model_config_of({**SMALL, "num_experts_per_tok": 1, "router_balance": "bias"}))
    block.gate.bias_E = torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    block(torch.randn(1, 3, 32, dtype=torch.float64), _Plain()).sum().backward()
    used = block.experts[0].gate_proj.weight.grad
    idle = block.experts[2].gate_proj.weight.grad
    assert used is not None and used.abs().sum() > 0
    assert idle is not None and idle.abs().sum() == 0


def test_rows_are_sorted_by_expert_and_dropped_choices_point_beyond_the_last() -> None:
    experts_NK = torch.tensor([[2, 0], [4, 2], [1, 4]])  # 4: dropped
    order, place_NK, counts_E = sorted_by_expert(experts_NK, 4)
    assert counts_E.tolist() == [1, 1, 2, 0]
    assert order.tolist() == [1, 4, 0, 3]
    assert place_NK.tolist() == [[2, 0], [4, 3], [1, 4]]


# --- capacity ------------------------------------------------------------------------------------


def test_a_capacity_drops_what_one_sequence_sends_beyond_it() -> None:
    config = model_config_of({**SMALL, "num_experts_per_tok": 1, "capacity_factor": 1.0,
                              "router_balance": "bias"})  # fmt: skip
    assert config.expert_capacity(8) == 2
    block = _block(config)
    block.gate.bias_E = torch.tensor([9.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    x_BSD = torch.randn(3, 8, 32, dtype=torch.float64)
    out_BSD = block(x_BSD, _Plain())
    assert (out_BSD[:, :2].abs().sum(-1) > 0).all()
    assert (out_BSD[:, 2:] == 0).all()
    block.eval()
    assert (block(x_BSD, _Plain()).abs().sum(-1) > 0).all()  # evaluation drops nothing


def test_what_a_sequence_loses_does_not_depend_on_its_neighbours() -> None:
    block = _block(model_config_of({**SMALL, "capacity_factor": 0.75}))
    x_BSD = torch.randn(4, 8, 32, dtype=torch.float64)
    together = block(x_BSD, _Plain())
    apart = torch.cat([block(x_BSD[i : i + 1], _Plain()) for i in range(4)])
    assert torch.allclose(together, apart, atol=1e-13)


# --- the losses of a router ----------------------------------------------------------------------


def _router(**change: float | str) -> Router:
    config = model_config_of({**SMALL, "num_experts": 2, "num_experts_per_tok": 1, **change})
    router = Router(config).double()
    torch.nn.init.normal_(router.weight, std=0.5)
    return router


def test_L59_the_balancing_loss_reaches_the_router_once_whatever_the_microbatches() -> None:
    x_BSD = torch.randn(8, 4, 32, dtype=torch.float64)
    found = []
    for parts in (1, 4):
        torch.manual_seed(5)
        router = _router(router_aux_loss_coef=0.3, router_z_loss_coef=0.1)
        router.share_E = torch.tensor([0.8, 0.2], dtype=torch.float64)
        for part in x_BSD.chunk(parts):
            _, weights_NK = router.choose(part, _Plain())
            (weights_NK * 0.0).sum().backward()  # all that is left are the router's own losses
        assert router.weight.grad is not None
        found.append(router.weight.grad.clone())
        assert router.seen.tokens == 32 and int(router.seen.counts_E.sum()) == 32
    assert torch.allclose(found[0], found[1], rtol=1e-12)
    # the formula, differentiated by autograd on its own
    torch.manual_seed(5)
    router = _router()
    logits_NE = (x_BSD.flatten(0, 1)) @ router.weight.T
    share_E = torch.tensor([0.8, 0.2], dtype=torch.float64)
    loss = 0.3 * 2 * (logits_NE.softmax(-1).sum(0) * share_E).sum()
    loss = loss + 0.1 * logits_NE.logsumexp(-1).square().sum()
    (wanted,) = torch.autograd.grad(loss, [router.weight])
    assert wanted.norm() > 1e-3
    assert torch.allclose(found[0], wanted, rtol=1e-11)


def test_tokens_that_do_not_count_are_routed_and_not_counted() -> None:
    router = _router(router_aux_loss_coef=0.3)
    router.share_E = torch.tensor([0.9, 0.1], dtype=torch.float64)
    x_BSD = torch.randn(2, 4, 32, dtype=torch.float64)
    shared = _Plain()
    shared.counted_BS = torch.tensor([[True] * 4, [False] * 4])
    experts_NK, weights_NK = router.choose(x_BSD, shared)
    assert experts_NK.shape == (8, 1)
    (weights_NK * 0.0).sum().backward()
    assert router.seen.tokens == 4
    alone = _router(router_aux_loss_coef=0.3)
    alone.weight.data.copy_(router.weight.data)
    alone.share_E = router.share_E
    _, weights_NK = alone.choose(x_BSD[:1], _Plain())
    (weights_NK * 0.0).sum().backward()
    assert router.weight.grad is not None and alone.weight.grad is not None
    assert torch.allclose(router.weight.grad, alone.weight.grad, rtol=1e-12)


# --- transformers --------------------------------------------------------------------------------


def _config(family: str) -> ModelConfig:
    return model_config_of({**SMALL, "qk_norm": family == "qwen3_moe"})


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    config = _config(family)
    model = build(config, seed=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
    raw = to_hf_config(config)
    assert raw["model_type"] == family
    (tmp_path / "config.json").write_text(json.dumps(raw))
    names = hub_names(config, parameter_shapes(config))
    weights = {names[n]: p.detach().clone() for n, p in model.named_parameters()}
    save_file(weights, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    ids_BS = torch.randint(0, config.vocab_size, (2, 17))
    with torch.no_grad():
        wanted, found = theirs(ids_BS).logits, model(ids_BS)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_config_json_goes_both_ways(family: str) -> None:
    raw = to_hf_config(_config(family))
    again = from_hf_config(raw)
    assert parameter_shapes(again) == parameter_shapes(_config(family))
    assert to_hf_config(again) == raw


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"router_scoring": "sigmoid"}, "router_scoring"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"capacity_factor": 2.0}, "capacity_factor"),
        ({"router_balance": "bias"}, "router_balance"),
        ({"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
    ],
)
def test_what_transformers_does_not_compute_is_not_written(
    change: dict[str, str | float], field: str
) -> None:
    with pytest.raises(UserError, match=f"model.{field}"):
        to_hf_config(model_config_of({**SMALL, **change}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"n_group": 4}, "n_group"),
    ],
)
def test_files_that_compute_otherwise_are_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        from_hf_config({**to_hf_config(_config("mixtral")), **change})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 of num_experts = 4"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"decoder_sparse_step": 3}, "decoder_sparse_step"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, int | bool], told: str) -> None:
    with pytest.raises(UserError, match=told):
        model_config_of({**SMALL, **change})


def test_every_second_layer_can_have_experts() -> None:
    config = model_config_of({**SMALL, "num_hidden_layers": 4, "decoder_sparse_step": 2})
    assert config.expert_layers == (1, 3)
    names = parameter_shapes(config)
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    table = rules(config)
    assert table["model.layers.0.mlp"] == "enter" and table["model.layers.1.mlp"] == "enter_leave"
    model = build(config, seed=1)
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == list(names.items())
