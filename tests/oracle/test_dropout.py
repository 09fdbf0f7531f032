"""Dropout masks name the element, so every split of the work drops the same ones.

B batch   S sequence   D hidden
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reparto.config.model import model_config_of
from reparto.model.dropout import ElementDropout, mix, token_keys
from reparto.model.loss import cross_entropy_sum
from reparto.model.transformer import build

BATCH, SEQUENCE, HIDDEN = 6, 19, 37
SAMPLES_B = torch.tensor([0, 1, 7, 2**31 + 5, 2**40, 123_456])
POSITIONS_BS = torch.arange(SEQUENCE)[None]


def keys(step: int = 3, seed: int = 1, samples_B: Tensor = SAMPLES_B) -> Tensor:
    return token_keys(seed=seed, step=step, sample_ids_B=samples_B, position_ids_BS=POSITIONS_BS)


def mask(share: float = 0.5, layer: int = 2, site: int = 0, **which: int) -> Tensor:
    dropout = ElementDropout(share, layer=layer, site=site)
    return dropout.keep(keys(**which), sequence=SEQUENCE, width=HIDDEN)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, BATCH - 1),
    sequence=st.integers(1, SEQUENCE - 1),
    hidden=st.integers(1, HIDDEN - 1),
    share=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_L27_parts_of_the_mask_are_the_mask_of_the_parts(
    batch: int, sequence: int, hidden: int, share: float
) -> None:
    whole_BSD = mask(share)
    dropout = ElementDropout(share, layer=2, site=0)

    def part(b: slice, s: slice, d: slice) -> Tensor:
        keys_BS = token_keys(
            seed=1, step=3, sample_ids_B=SAMPLES_B[b], position_ids_BS=POSITIONS_BS[:, s]
        )
        dropout.first_hidden = d.start
        return dropout.keep(keys_BS, sequence=s.stop - s.start, width=d.stop - d.start)

    for b in (slice(0, batch), slice(batch, BATCH)):
        for s in (slice(0, sequence), slice(sequence, SEQUENCE)):
            for d in (slice(0, hidden), slice(hidden, HIDDEN)):
                assert torch.equal(part(b, s, d), whole_BSD[b, s, d])


@pytest.mark.parametrize("cut", [1, 8, 18])
def test_L27_rows_of_a_sequence_cut_after_the_keys_were_made(cut: int) -> None:
    """Sequence parallel: rotary tables and keys cover the sequence, the activation a part."""
    x_BSD = torch.randn(BATCH, SEQUENCE, HIDDEN)
    dropout = ElementDropout(0.5, layer=0, site=1)
    whole_BSD = dropout(x_BSD, keys())
    for start, stop in ((0, cut), (cut, SEQUENCE)):
        dropout.first_token = start
        assert torch.equal(dropout(x_BSD[:, start:stop], keys()), whole_BSD[:, start:stop])


def test_masks_differ_wherever_an_element_is_another_one() -> None:
    first = mask()
    others = {
        "step": mask(step=4),
        "seed": mask(seed=2),
        "layer": mask(layer=3),
        "site": mask(site=1),
        "samples": ElementDropout(0.5, layer=2, site=0).keep(
            keys(samples_B=SAMPLES_B + 1), sequence=SEQUENCE, width=HIDDEN
        ),
    }
    size = first.numel()
    for name, other in others.items():
        agree = (first == other).float().mean().item()
        assert agree == pytest.approx(0.5, abs=4 * 0.5 / size**0.5), name
    rows = [first[b, s] for b in range(BATCH) for s in range(SEQUENCE)]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.97])
def test_the_share_dropped_and_the_scale(share: float) -> None:
    samples_B = torch.arange(64)
    keys_BS = token_keys(
        seed=0, step=0, sample_ids_B=samples_B, position_ids_BS=torch.arange(64)[None]
    )
    x_BSD = torch.ones(64, 64, 64)
    out_BSD = ElementDropout(share, layer=0, site=0)(x_BSD, keys_BS)
    deviation = (share * (1 - share) / x_BSD.numel()) ** 0.5
    assert (out_BSD == 0).float().mean().item() == pytest.approx(share, abs=5 * deviation)
    assert torch.allclose(out_BSD[out_BSD != 0], torch.tensor(1 / (1 - share)))


def test_neighbours_are_independent() -> None:
    """Correlation between masks of elements that lie side by side along every index."""
    samples_B, positions_BS = torch.arange(64), torch.arange(64)[None]
    masks = torch.stack(
        [
            ElementDropout(0.5, layer=layer, site=0).keep(
                token_keys(seed=0, step=step, sample_ids_B=samples_B, position_ids_BS=positions_BS),
                sequence=64,
                width=64,
            )
            for step in range(2)
            for layer in range(2)
        ]
    ).view(2, 2, 64, 64, 64)
    signs = masks.double() * 2 - 1
    for dim in range(5):
        ahead, behind = (
            signs.narrow(dim, 1, signs.shape[dim] - 1),
            signs.narrow(dim, 0, signs.shape[dim] - 1),
        )
        product = ahead * behind
        assert abs(product.mean().item()) < 5 / product.numel() ** 0.5


def test_the_mixer_is_a_bijection_that_spreads_every_bit() -> None:
    x = torch.arange(-(2**12), 2**12, dtype=torch.int32)
    assert mix(x).unique().numel() == x.numel()
    outputs = torch.arange(32, dtype=torch.int32)
    for bit in range(32):
        changed = mix(x) ^ mix(x ^ (-(2**31) if bit == 31 else 1 << bit))
        moved = ((changed[:, None] >> outputs) & 1).float().mean(dim=0)
        assert ((moved > 0.4) & (moved < 0.6)).all(), (bit, moved)


def test_products_wrap_alike_in_vector_and_scalar_kernels() -> None:
    x = torch.randint(-(2**31), 2**31 - 1, (203,), dtype=torch.int32)
    one_by_one = torch.cat([mix(value) for value in x.split(1)])
    assert torch.equal(mix(x), one_by_one)
    multiplied = [(int(v) * 0x21F0AAAD + 2**31) % 2**32 - 2**31 for v in x]
    assert (x * 0x21F0AAAD).tolist() == multiplied


# --- in the model --------------------------------------------------------------------------------

CONFIG = model_config_of(
    {
        "vocab_size": 31,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dropout": 0.3,
    }
)
IDS_BS = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(0))


def test_gradients_of_microbatches_add_up_to_those_of_the_batch_with_dropout_on() -> None:
    model = build(CONFIG, seed=1, dtype=torch.float64)
    model.set_step(seed=1, step=5)
    samples_B = torch.tensor([10, 3, 8, 2])

    def accumulate(parts: list[slice]) -> list[Tensor]:
        model.zero_grad()
        for part in parts:
            ids_BS = IDS_BS[part]
            logits_BSV = model(ids_BS, sample_ids_B=samples_B[part])
            cross_entropy_sum(logits_BSV, ids_BS.roll(-1, dims=1))[0].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole = accumulate([slice(0, 4)])
    split = accumulate([slice(0, 1), slice(1, 4)])
    for one, other in zip(whole, split, strict=True):
        assert (one - other).abs().max() <= 1e-12 * one.abs().max()


def test_a_forward_repeats_within_a_step_and_changes_with_the_next() -> None:
    model = build(CONFIG, seed=1)
    samples_B = torch.arange(4)
    model.set_step(seed=1, step=1)
    first_BSV = model(IDS_BS, sample_ids_B=samples_B)
    assert torch.equal(model(IDS_BS, sample_ids_B=samples_B), first_BSV)
    model.set_step(seed=1, step=2)
    assert not torch.equal(model(IDS_BS, sample_ids_B=samples_B), first_BSV)


def test_dropout_needs_to_know_which_elements_it_drops() -> None:
    model = build(CONFIG, seed=1)
    with pytest.raises(ValueError, match="set_step"):
        model(IDS_BS, sample_ids_B=torch.arange(4))
    model.set_step(seed=1, step=1)
    with pytest.raises(ValueError, match="sample_ids_B"):
        model(IDS_BS)


def test_without_dropout_the_very_same_tensor_comes_back() -> None:
    x_BSD = torch.ones(1, 2, 3)
    assert ElementDropout(0.0, layer=0, site=0)(x_BSD, None) is x_BSD
    plain = build(CONFIG.model_copy(update={"dropout": 0.0}), seed=1)
    trained = build(CONFIG, seed=1).eval()
    assert torch.equal(trained(IDS_BS), plain(IDS_BS))
