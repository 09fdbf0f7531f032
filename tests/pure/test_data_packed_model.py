"""Packed documents train the model exactly as if each stood alone.

The oracle runs every document by itself; packing must give the same loss sum and the same gradient
of every weight. float64, two layers and some hundred terms a sum leave about 1e-13 relative;
attention over one border changes the loss in the third digit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reparto.config.data import DataConfig
from reparto.config.model import model_config_of
from reparto.data.dataset import IGNORED
from reparto.data.loader import Microbatch, collate_for
from reparto.data.prepare import prepare
from reparto.model.loss import cross_entropy_sum
from reparto.model.transformer import Decoder, build

CONFIG = model_config_of(
    {
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,  # large, so that attention is far from uniform
    }
)


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.fixture
def batch(tmp_path: Path) -> Microbatch:
    for number in range(30):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number} " + "ab" * (number % 9 + 1))
    config = DataConfig(
        source="text",
        paths=(str(tmp_path / "corpus"),),
        tokenizer="bytes",
        sequence_length=48,
        packing="documents",
    )
    prepared = prepare(config, tmp_path / "cache")
    dataset = prepared.train_dataset()
    return collate_for(prepared)([dataset[i] for i in range(len(dataset))], len(dataset) + 1)


def test_attention_does_not_cross_documents(batch: Microbatch) -> None:
    model = build(CONFIG, seed=1, dtype=torch.float64)
    assert batch.segment_ids_BS is not None
    logits = model(
        batch.input_ids_BS,
        position_ids_BS=batch.position_ids_BS,
        segment_ids_BS=batch.segment_ids_BS,
    )
    packed, count = cross_entropy_sum(logits, batch.labels_BS)
    torch.autograd.backward(packed)
    found = gradients(model)

    alone = torch.zeros((), dtype=torch.float64)
    documents = 0
    for row, segments in enumerate(batch.segment_ids_BS):
        for segment in segments.unique():
            place = segments == segment
            ids, labels = batch.input_ids_BS[row, place], batch.labels_BS[row, place]
            if (labels != IGNORED).any():
                loss, _ = cross_entropy_sum(model(ids[None]), labels[None])
                torch.autograd.backward(loss)
                alone += loss.detach()
                documents += 1
    expected = gradients(model)

    assert documents > 20 > len(batch.sample_ids)  # several documents share a sequence
    assert int(count) == batch.num_tokens
    torch.testing.assert_close(packed.detach(), alone, rtol=1e-12, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_without_segments_the_loss_would_be_another(batch: Microbatch) -> None:
    model = build(CONFIG, seed=1, dtype=torch.float64)
    with torch.no_grad():
        crossing, _ = cross_entropy_sum(model(batch.input_ids_BS), batch.labels_BS)
        right, _ = cross_entropy_sum(
            model(
                batch.input_ids_BS,
                position_ids_BS=batch.position_ids_BS,
                segment_ids_BS=batch.segment_ids_BS,
            ),
            batch.labels_BS,
        )
    assert abs(float(crossing / right) - 1) > 1e-4
