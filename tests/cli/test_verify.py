"""`reparto verify`: every plan of the data and shard strategies holds; a broken one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from reparto.cli import verify as verb
from reparto.comm.collectives import Communicator, Handle
from reparto.errors import CheckFailed, UserError
from reparto.schedule.rules import NAMES

PLANS = [
    "data=2",
    "data=4",
    *(f"data={degree},shard={mode}" for degree in (2, 4)
      for mode in ("optimizer", "gradients", "parameters")),
    *(f"data=2,num_microbatches={m}" for m in (1, 3, 4)),
    "data=2,shard=parameters,num_microbatches=3",
    "data=2,shard=gradients,num_microbatches=4,gradient_sync=microbatch",
    "data=4,replicas=2,shard=parameters",
    "data=2,shard=parameters,recompute=full",
    "tensor=2,sequence_parallel=true",
    "pipeline=2,num_microbatches=3",
    "data=2,tensor=2,pipeline=2",
    "tensor=2,pipeline=2,schedule=zb-v,num_microbatches=4",
    "data=2,shard=parameters,tensor=2,pipeline=2,num_microbatches=2",
]  # fmt: skip


def _verify(plan: str, precision: str = "float64", transport: str = "threads") -> None:
    verb.verify(
        run_file=None, plan=plan, against="data=1", steps=2, precision=precision,
        transport=transport, settings=[], json_out=True,
    )  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_plans_hold_in_float64(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    _verify(plan)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["passed"] and found["first_departure"] is None
    assert found["loss_rel"] < 1e-12 and found["grad_rel"] < 1e-10 and found["weight_rel"] < 1e-10


@pytest.mark.parametrize("plan", ["data=2", "data=2,shard=parameters,num_microbatches=3"])
def test_plans_hold_in_float32(plan: str) -> None:
    _verify(plan, precision="float32")


def test_real_processes_hold(capsys: pytest.CaptureFixture[str]) -> None:
    _verify("data=2,shard=parameters", transport="processes")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passed"]


@pytest.mark.parametrize(
    "plan",
    ["data=2,tensor=2,pipeline=2", "data=2,shard=parameters,tensor=2,pipeline=2",
     "tensor=2,sequence_parallel=true",
     *(f"pipeline=2,num_microbatches=4,schedule={name}" for name in NAMES)],
)  # fmt: skip
def test_plans_hold_for_the_llama_of_transformers(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="extra `hf` is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "Todo lo que se reparte se puede volver a juntar, y a contar. "
    (tmp_path / "text.txt").write_text((text * 40 + "\n\n") * 20)
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    }))  # fmt: skip
    (tmp_path / "run.toml").write_text(
        f"""
[model]
source = "huggingface"
config = "{tmp_path / "config.json"}"
[data]
source = "text"
paths = ["{tmp_path / "text.txt"}"]
tokenizer = "bytes"
sequence_length = 16
batch_size = 8
validation_share = 0.0
"""
    )
    verb.verify(
        run_file=str(tmp_path / "run.toml"), plan=plan, against="data=1", steps=2,
        precision="float64", transport="threads", settings=[], json_out=True,
    )  # fmt: skip
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passed"]


def test_the_same_plan_is_bitwise_equal(capsys: pytest.CaptureFixture[str]) -> None:
    verb.verify(
        run_file=None, plan="data=2,shard=gradients", against="data=2,shard=gradients", steps=2,
        precision="float32", transport="threads", settings=[], json_out=True,
    )  # fmt: skip
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bitwise"] is True


def test_a_lost_reduction_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of fault it is for: one bucket that one rank does not add."""
    real = Communicator.all_reduce

    def broken(self: Communicator, tensor: torch.Tensor, *, tag: str, op: str = "sum") -> Handle:
        if tag == "gradient 0" and self.size > 1:
            tensor.mul_(0.5)
        return real(self, tensor, tag=tag, op=op)

    monkeypatch.setattr(Communicator, "all_reduce", broken)
    with pytest.raises(CheckFailed, match=r"step 1, stage synchronize, collective `gradient 0`"):
        _verify("data=2")


def test_wrong_questions_are_refused() -> None:
    for changes in ({"plan": None}, {"precision": "float16"}, {"steps": 0}, {"against": "dta=1"}):
        options = {
            "run_file": None, "plan": "data=2", "against": "data=1", "steps": 1,
            "precision": "float64", "transport": "threads", "settings": [], "json_out": False,
            **changes,
        }  # fmt: skip
        with pytest.raises(UserError):
            verb.verify(**options)  # type: ignore[arg-type]
