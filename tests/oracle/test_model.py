"""The decoder against a reference written in another way, in float64.

The reference takes weights by name and works head by head with einsum, turns rotary pairs as
complex numbers and writes the softmax out. float64 leaves about 1e-15 a term; sums here have some
hundred terms over two layers, so 1e-12 relative separates rounding from any mistake.

    B batch   S sequence   D hidden   V vocabulary   C elements of one head
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reparto.config.model import ModelConfig, model_config_of, parameter_shapes, preset
from reparto.model.initial import initial_tensor, materialise
from reparto.model.loss import cross_entropy_sum
from reparto.model.transformer import Attention, Decoder, build, rotary_tables

F64 = torch.float64


def config_of(**change: int | float | bool) -> ModelConfig:
    """Odd sizes on purpose: nothing equal that could be mixed up."""
    return model_config_of(
        {
            "vocab_size": 37,
            "hidden_size": 20,
            "intermediate_size": 28,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "initializer_range": 0.3,  # large, so that attention is far from uniform
            "rms_norm_eps": 1e-4,
            **change,
        }
    )


def reference(
    config: ModelConfig,
    weights: dict[str, Tensor],
    ids_BS: Tensor,
    seen_BSS: Tensor,
    positions: Tensor,
) -> Tensor:
    """Logits (B, S, V); seen_BSS says which key (last dim) a query may look at."""
    size = config.head_dim
    half = size // 2

    def linear(path: str, x: Tensor) -> Tensor:
        out = torch.einsum("bsi,oi->bso", x, weights[f"{path}.weight"])
        return out + weights[f"{path}.bias"] if f"{path}.bias" in weights else out

    def norm(path: str, x: Tensor) -> Tensor:
        length = (torch.einsum("bsd,bsd->bs", x, x) / x.shape[-1] + config.rms_norm_eps).sqrt()
        return torch.einsum("bsd,d,bs->bsd", x, weights[f"{path}.weight"], 1 / length)

    speeds = torch.tensor([config.rope_theta ** (-2 * c / size) for c in range(half)], dtype=F64)
    turns = torch.exp(1j * torch.einsum("bs,c->bsc", positions.to(F64), speeds))

    def turn(x_BSC: Tensor) -> Tensor:
        pairs = torch.complex(x_BSC[..., :half], x_BSC[..., half:]) * turns
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    def attention(path: str, x: Tensor) -> Tensor:
        q, k, v = (linear(f"{path}.{name}_proj", x) for name in "qkv")
        heads = []
        for head in range(config.num_attention_heads):
            shared = head * config.num_key_value_heads // config.num_attention_heads
            mine, theirs = (
                slice(head * size, (head + 1) * size),
                slice(shared * size, (shared + 1) * size),
            )
            score = torch.einsum("bqc,bkc->bqk", turn(q[..., mine]), turn(k[..., theirs]))
            weight = torch.where(seen_BSS, (score / math.sqrt(size)).exp(), 0.0)
            weight = weight / weight.sum(-1, keepdim=True)
            heads.append(torch.einsum("bqk,bkc->bqc", weight, v[..., theirs]))
        return linear(f"{path}.o_proj", torch.cat(heads, dim=-1))

    def feed(path: str, x: Tensor) -> Tensor:
        gate = linear(f"{path}.gate_proj", x)
        return linear(
            f"{path}.down_proj", gate / (1 + (-gate).exp()) * linear(f"{path}.up_proj", x)
        )

    x = weights["model.embed_tokens.weight"][ids_BS]
    for layer in range(config.num_hidden_layers):
        path = f"model.layers.{layer}"
        x = x + attention(f"{path}.self_attn", norm(f"{path}.input_layernorm", x))
        x = x + feed(f"{path}.mlp", norm(f"{path}.post_attention_layernorm", x))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.einsum("bsd,vd->bsv", norm("model.norm", x), head)


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Initial matrices, but norms and biases drawn as well, so that forgetting one would show."""
    drawn = {}
    for name, shape in parameter_shapes(config).items():
        whole = initial_tensor(name, shape, seed=5, config=config, dtype=F64)
        if len(shape) == 1:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            whole = whole + 0.5 * torch.randn(shape, dtype=F64, generator=generator)
        drawn[name] = whole
    return drawn


def decoder_with(config: ModelConfig, weights: dict[str, Tensor]) -> Decoder:
    model = build(config, seed=0, dtype=F64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def inputs(config: ModelConfig, batch: int = 3, sequence: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, config.vocab_size, (batch, sequence), generator=generator)


def causal(batch: int, sequence: int) -> Tensor:
    return torch.ones(sequence, sequence, dtype=torch.bool).tril().expand(batch, -1, -1)


def assert_close(ours: Tensor, theirs: Tensor, relative: float = 1e-12) -> None:
    scale = theirs.abs().max().clamp(min=1e-30)
    assert (ours - theirs).abs().max() <= relative * scale


VARIANTS = {
    "tied": config_of(),
    "untied": config_of(tie_word_embeddings=False),
    "biased": config_of(attention_bias=True, mlp_bias=True),
    "one kv head": config_of(num_key_value_heads=1),
    "no grouping": config_of(num_key_value_heads=6),
    "slow rotary": config_of(rope_theta=500_000.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_every_gradient_equal_the_reference(name: str) -> None:
    config = VARIANTS[name]
    weights = random_weights(config)
    model, ids_BS = decoder_with(config, weights), inputs(config)
    labels_BS = ids_BS.roll(-1, dims=1)
    positions = torch.arange(ids_BS.shape[1])[None]

    leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
    expected_BSV = reference(config, leaves, ids_BS, causal(*ids_BS.shape), positions)
    ours_BSV = model(ids_BS)
    assert_close(ours_BSV, expected_BSV)

    cross_entropy_sum(ours_BSV, labels_BS)[0].backward()
    log_p = expected_BSV.log_softmax(-1)
    (-log_p.gather(-1, labels_BS[..., None]).sum()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert leaves[key].grad is not None
        assert_close(parameter.grad, leaves[key].grad, 1e-11)  # one more pass of sums


def test_float32_and_bfloat16_stay_near_float64() -> None:
    config = VARIANTS["tied"]
    ids_BS = inputs(config)
    exact_BSV = build(config, seed=1, dtype=F64)(ids_BS)
    # 2**-24 and 2**-9 are half a unit in the last place; some ten roundings add up on the path.
    assert_close(build(config, seed=1)(ids_BS), exact_BSV, 20 * 2**-24)
    half = build(config, seed=1, dtype=torch.bfloat16)
    assert half(ids_BS).dtype == torch.bfloat16
    assert_close(half(ids_BS).double(), exact_BSV, 20 * 2**-9)


# --- what a token may see ------------------------------------------------------------------------


def test_a_token_does_not_see_later_ones() -> None:
    config = VARIANTS["tied"]
    model, ids_BS = build(config, seed=1, dtype=F64), inputs(config)
    before_BSV = model(ids_BS)
    for position in (1, 6, 10):
        changed_BS = ids_BS.clone()
        changed_BS[:, position] = (ids_BS[:, position] + 1) % config.vocab_size
        after_BSV = model(changed_BS)
        assert torch.equal(after_BSV[:, :position], before_BSV[:, :position])
        assert not torch.allclose(after_BSV[:, position:], before_BSV[:, position:])


def test_segments_do_not_see_each_other() -> None:
    config = VARIANTS["biased"]
    weights = random_weights(config)
    model, ids_BS = decoder_with(config, weights), inputs(config)
    segments_BS = torch.tensor([[0] * 4 + [1] * 7, [3] * 11, [0, 1, 1, 0, 0, 2, 2, 2, 1, 1, 1]])
    packed_BSV = model(ids_BS, segment_ids_BS=segments_BS)

    same_BSS = segments_BS[:, :, None] == segments_BS[:, None, :]
    positions = torch.arange(11)[None]
    seen_BSS = same_BSS & causal(3, 11)
    assert_close(packed_BSV, reference(config, weights, ids_BS, seen_BSS, positions))
    # Rotary positions are relative, so a segment alone computes what it does inside the pack.
    assert_close(packed_BSV[:1, 4:], model(ids_BS[:1, 4:]))
    assert_close(packed_BSV[1:2], model(ids_BS[1:2]))


def test_positions_are_relative_and_default_to_the_order() -> None:
    config = VARIANTS["tied"]
    model, ids_BS = build(config, seed=1, dtype=F64), inputs(config)
    order_BS = torch.arange(11).expand(3, -1)
    plain_BSV = model(ids_BS)
    assert torch.equal(model(ids_BS, position_ids_BS=order_BS), plain_BSV)
    assert_close(model(ids_BS, position_ids_BS=order_BS + 1000), plain_BSV)
    assert not torch.allclose(model(ids_BS, position_ids_BS=2 * order_BS), plain_BSV)


def test_rotary_angles_are_exact_enough_at_far_positions() -> None:
    far = torch.tensor([[1_000_003]])
    cos, sin = rotary_tables(far, head_dim=4, theta=10_000.0, dtype=F64)
    for pair, speed in enumerate((1.0, 0.01)):
        angle = math.fmod(1_000_003 * speed, 2 * math.pi)
        assert cos[0, 0, pair].item() == pytest.approx(math.cos(angle), abs=1e-9)
        assert sin[0, 0, pair + 2].item() == pytest.approx(math.sin(angle), abs=1e-9)
    # A bf16 table is the rounded float32 one, never an angle of 8 bits.
    near = torch.tensor([[777]])
    wide = rotary_tables(near, head_dim=4, theta=10_000.0, dtype=torch.float32)
    narrow = rotary_tables(near, head_dim=4, theta=10_000.0, dtype=torch.bfloat16)
    assert torch.equal(wide[0].bfloat16(), narrow[0])
    assert torch.equal(wide[1].bfloat16(), narrow[1])


# --- how others take it apart --------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(1, 5))
def test_applying_the_blocks_in_order_is_the_forward_wherever_it_is_cut(cut: int) -> None:
    config = VARIANTS["untied"]
    model, ids_BS = build(config, seed=1), inputs(config)
    blocks = model.blocks()
    assert len(blocks) == config.num_hidden_layers + 3
    x = ids_BS
    for stage in (blocks[:cut], blocks[cut:]):
        # Each stage makes its own context, as two pipeline positions would.
        context = model.prepare(ids_BS.shape, dtype=torch.float32, device="cpu")
        for block in stage:
            x = block(x, context)
    assert torch.equal(x, model(ids_BS))


@pytest.mark.parametrize("degree", [1, 2])
def test_attention_follows_the_heads_that_its_weights_hold(degree: int) -> None:
    config = config_of()
    whole = build(config, seed=1, dtype=F64).model.layers[0].self_attn
    x_BSD = torch.randn(
        2, 7, config.hidden_size, dtype=F64, generator=torch.Generator().manual_seed(1)
    )
    context = Decoder(config).prepare((2, 7), dtype=F64, device="cpu")
    total_BSD = torch.zeros_like(x_BSD)
    for rank in range(degree):
        part = Attention(config).to_empty(device="cpu")
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(whole, name).weight.chunk(degree)[rank]
            getattr(part, name).weight = torch.nn.Parameter(rows)
        part.o_proj.weight = torch.nn.Parameter(whole.o_proj.weight.chunk(degree, dim=1)[rank])
        total_BSD = total_BSD + part(x_BSD, context)
    assert_close(total_BSD, whole(x_BSD, context))


def test_a_context_can_be_replaced_field_by_field() -> None:
    config = config_of()
    model, ids_BS = build(config, seed=1), inputs(config)
    context = model.prepare(ids_BS.shape, dtype=torch.float32, device="cpu")
    mask = torch.ones(3, 1, 11, 11, dtype=torch.bool).tril()
    x_BSD = model.model.embed_tokens(ids_BS, context)
    layer = model.model.layers[0]
    masked_BSD = layer(x_BSD, replace(context, mask_B1SS=mask))
    assert torch.allclose(masked_BSD, layer(x_BSD, context), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_module_has_the_described_parameters_on_meta_and_no_buffers(name: str) -> None:
    config = VARIANTS[name]
    model = Decoder(config)
    found = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert list(found.items()) == list(parameter_shapes(config).items())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


def test_a_billion_parameters_are_described_without_memory() -> None:
    model = Decoder(preset("1b"))
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e9
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied = build(VARIANTS["tied"], seed=1)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = build(VARIANTS["untied"], seed=1)
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


# --- initial weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1m", "10m"])
def test_L29_the_start_loss_is_near_the_logarithm_of_the_vocabulary(name: str) -> None:
    config = preset(name)
    ids_BS = inputs(config, batch=2, sequence=48)
    total, count = cross_entropy_sum(build(config, seed=1)(ids_BS), ids_BS.roll(-1, dims=1))
    assert total.item() / count.item() == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_L30_an_initial_tensor_depends_on_seed_and_global_name_alone() -> None:
    config, taller = config_of(), config_of(tie_word_embeddings=False)
    name = "model.layers.1.mlp.up_proj.weight"
    shape = parameter_shapes(config)[name]
    drawn = initial_tensor(name, shape, seed=1, config=config)
    torch.manual_seed(99)
    torch.randn(17)
    assert torch.equal(initial_tensor(name, shape, seed=1, config=taller), drawn)
    assert not torch.equal(initial_tensor(name, shape, seed=2, config=config), drawn)
    other = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(initial_tensor(other, shape, seed=1, config=config), drawn)


def test_an_initial_tensor_is_drawn_in_float32_and_then_cast() -> None:
    config = config_of()
    name = "model.embed_tokens.weight"
    shape = parameter_shapes(config)[name]
    drawn = initial_tensor(name, shape, seed=1, config=config)
    assert drawn.dtype == torch.float32
    for dtype in (torch.float64, torch.bfloat16):
        cast = initial_tensor(name, shape, seed=1, config=config, dtype=dtype)
        assert torch.equal(cast, drawn.to(dtype))


def test_deviations_norms_and_biases() -> None:
    config = model_config_of({**preset("1m").model_dump(), "attention_bias": True})
    residual = 0.02 / math.sqrt(2 * config.num_hidden_layers)
    expected = {"o_proj.weight": residual, "down_proj.weight": residual}
    for name, shape in parameter_shapes(config).items():
        drawn = initial_tensor(name, shape, seed=1, config=config)
        if name.endswith(".bias"):
            assert torch.equal(drawn, torch.zeros(shape))
        elif len(shape) == 1:
            assert torch.equal(drawn, torch.ones(shape))
        else:
            deviation = next((d for end, d in expected.items() if name.endswith(end)), 0.02)
            assert drawn.std().item() == pytest.approx(deviation, rel=0.03), name
            assert abs(drawn.mean().item()) < 4 * deviation / math.sqrt(drawn.numel())


def test_initial_values_do_not_change_between_versions() -> None:
    """An old run started again must start where it did. The draw may differ in the last bits
    between processors, hence 1e-6 of a deviation."""
    config = preset("1m")
    name = "model.layers.0.self_attn.k_proj.weight"
    drawn = initial_tensor(name, parameter_shapes(config)[name], seed=1, config=config)
    first = [0.02327515, -0.04373486, 0.00182728]
    assert drawn[0, :3].tolist() == pytest.approx(first, abs=2e-8)
    assert drawn[63, 127].item() == pytest.approx(0.00770241, abs=2e-8)


def test_frozen_parameters_stay_frozen_when_given_their_values() -> None:
    config = config_of()
    model = Decoder(config)
    model.model.norm.weight.requires_grad_(False)
    materialise(model, config, seed=1)
    assert not model.model.norm.weight.requires_grad
    assert model.model.embed_tokens.weight.requires_grad
