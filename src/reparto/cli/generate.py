"""`reparto generate RUN "text"`: samples from a checkpoint of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from reparto.cli.console import console
from reparto.errors import UserError


def generate(
    *,
    run_dir: str,
    text: str,
    step: int | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    json_out: bool,
) -> None:
    """The verb. The text goes to stdout as it is made."""
    for value, where, legal, fine in (
        (max_new_tokens, "--tokens", ">= 1", max_new_tokens >= 1),
        (temperature, "--temperature", ">= 0", temperature >= 0),
        (top_k, "--top-k", ">= 0", top_k >= 0),
        (top_p, "--top-p", "above 0, at most 1", 0 < top_p <= 1),
    ):
        if not fine:
            raise UserError(f"{value} is not allowed", where=where, legal=legal)
    path = Path(run_dir)
    if not (path / "run.toml").is_file():
        raise UserError(f"{path} is no run", where="RUN", legal="a folder made by `reparto train`")

    import torch

    from reparto.checkpoint.load import find_latest, open_checkpoint
    from reparto.config.run import read_run
    from reparto.data.tokenize import open_tokenizer
    from reparto.evidence.ledger import load_key
    from reparto.model.generate import Sampling
    from reparto.model.generate import generate as tokens_after
    from reparto.model.moe import set_bias
    from reparto.model.transformer import Decoder
    from reparto.parallel.flat import put_parameters

    key = load_key(path / "key")
    if step is None:
        checkpoint = find_latest(path / "checkpoints", key=key).checkpoint
    else:
        folder = path / "checkpoints" / f"step-{step}"
        if not folder.is_dir():
            there = sorted(one.name for one in (path / "checkpoints").glob("step-*"))
            raise UserError(f"{folder} does not exist", where="--step", legal=", ".join(there))
        checkpoint = open_checkpoint(folder, key)
        checkpoint.verify()
    run = read_run(path / "run.toml")
    tokenizer = open_tokenizer(path / "tokenizer.json")
    model = Decoder(run.model.resolved(tokenizer.vocab_size))
    put_parameters(model, lambda name, old: checkpoint.read(name, dtype=torch.float32))
    if model.config.num_experts and checkpoint.manifest.step:  # an import has no load yet
        set_bias(model, checkpoint.load_of_experts()["bias_steps"])
    prompt = tokenizer.encode(text) or [tokenizer.eod_id]
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    made: list[int] = []
    written = ""
    if not json_out:
        print(text, end="", flush=True)
    for token in tokens_after(
        model, prompt, max_new_tokens=max_new_tokens, end_id=tokenizer.eod_id, sampling=sampling
    ):
        made.append(token)
        whole = tokenizer.decode(made)
        if not whole.endswith("\ufffd"):  # a character is not complete yet
            if not json_out:
                print(whole[len(written) :], end="", flush=True)
            written = whole
    written = tokenizer.decode(made)
    if json_out:
        print(
            json.dumps(
                {"text": written, "tokens": made, "step": checkpoint.manifest.step,
                 "run_dir": str(path)}
            )
        )  # fmt: skip
    else:
        print()
    console().print(f"{len(made)} tokens from step {checkpoint.manifest.step} of {path}")
    sys.stdout.flush()
