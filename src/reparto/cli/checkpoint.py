"""`reparto checkpoint list | check | convert | export | import`."""

from __future__ import annotations

import getpass
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from reparto.cli import rundir
from reparto.cli.console import console
from reparto.config.run import Run, read_run
from reparto.errors import UserError
from reparto.units import human_bytes


def _run_folder(path: Path) -> Path | None:
    """The run that `path` is, or lies in."""
    for folder in (path, *path.absolute().parents[:2]):
        if (folder / "run.toml").is_file():
            return folder
    return None


def _key(path: Path) -> bytes | None:
    from reparto.evidence.ledger import load_key

    run = _run_folder(path)
    return load_key(run / "key") if run is not None and (run / "key").exists() else None


def _root(path: Path) -> Path:
    """The folder that holds step-N folders, or the one step-N folder that was named."""
    return path / "checkpoints" if (path / "run.toml").is_file() else path


def list_all(path: str, *, json_out: bool) -> None:
    """What is there, with the lineage."""
    from reparto.checkpoint.catalog import list_checkpoints

    root = _root(Path(path))
    found = list_checkpoints(root, _key(Path(path)))
    table = Table(title=str(root), title_justify="left")
    for heading in ("checkpoint", "step", "status", "bytes", "plan", "went on from"):
        table.add_column(heading)
    for one in found:
        origin = f"step {one.parent.step} of {one.parent.run}" if one.parent else ""
        table.add_row(
            one.path.name, str(one.step), one.fault.splitlines()[0] if one.fault else one.status,
            human_bytes(one.num_bytes), one.plan, origin,
        )  # fmt: skip
    console().print(table)
    if json_out:
        print(json.dumps({"checkpoints": [_plain(one) for one in found]}))


def _plain(one: object) -> Mapping[str, object]:
    values: dict[str, object] = {}
    for key, value in asdict(one).items():  # type: ignore[call-overload]
        values[key] = str(value) if isinstance(value, Path) else value
    parent = getattr(one, "parent", None)
    if parent is not None:
        values["parent"] = parent.model_dump(mode="json")
    return values


def check(path: str, *, json_out: bool) -> None:
    """Whether every byte is as it was written. Exit status 3 if not."""
    from reparto.checkpoint.catalog import check as check_folder

    passed = check_folder(_root(Path(path)), _key(Path(path)))
    out = console()
    for one in passed:
        signed = "signed" if one.signed else "no key at hand, signature not checked"
        out.print(
            f"{one.path.name}: whole; {one.num_tensors} tensors in {one.num_files} files, "
            f"{human_bytes(one.num_bytes)} digested; {signed}"
        )
    if json_out:
        print(json.dumps({"passed": True, "checkpoints": [_plain(one) for one in passed]}))


def _one(path: Path, step: int | None) -> Path:
    """The step-N folder meant by a run, a folder of checkpoints, or itself."""
    root = _root(path)
    if (root / "manifest.json").exists():
        return root
    if step is not None:
        return root / f"step-{step}"
    from reparto.checkpoint.load import find_latest

    key = _key(path)
    if key is None:
        raise UserError("lies in no run, so name one step-N folder", where=str(path))
    return find_latest(root, key=key).checkpoint.path


def _run_of(path: Path) -> tuple[Path, Run]:
    folder = _run_folder(path)
    if folder is None:
        raise UserError(
            "lies in no run", where=str(path), legal="a run folder, or a checkpoint inside one"
        )
    return folder, read_run(folder / "run.toml")


def convert(path: str, to: str, *, plan: str, step: int | None, json_out: bool) -> None:
    """The same checkpoint as the ranks of another plan would have written it."""
    from reparto.checkpoint.load import open_checkpoint
    from reparto.checkpoint.rewrite import by_plan
    from reparto.checkpoint.rewrite import convert as rewrite
    from reparto.cli.plan import decoder_view
    from reparto.config.plan import Plan
    from reparto.partition.grid import Grid

    folder, run = _run_of(Path(path))
    target = Plan.parse(plan)
    checkpoint = open_checkpoint(_one(Path(path), step), _key(Path(path)))
    model = run.model.resolved(_vocab_size(folder))
    tables = [decoder_view(target, model, rank).table for rank in range(target.world_size)]
    key = _key(Path(path))
    assert key is not None
    made = rewrite(
        checkpoint, Path(to), key=key, cut=by_plan(tables, Grid.of(target)), plan=target.text
    )
    console().print(f"{checkpoint.path} -> {made}, laid out for `{target.text}`")
    if json_out:
        print(json.dumps({"path": str(made), "plan": target.text}))


def export(path: str, to: str, *, step: int | None, dtype: str | None, json_out: bool) -> None:
    """A Hugging Face folder: config.json, safetensors, tokenizer."""
    from reparto.checkpoint.export import export as write
    from reparto.checkpoint.load import open_checkpoint
    from reparto.config.huggingface import hub_names, to_hf_config

    folder, run = _run_of(Path(path))
    checkpoint = open_checkpoint(_one(Path(path), step), _key(Path(path)))
    tokenizer = folder / "tokenizer.json"
    model = run.model.resolved(_vocab_size(folder))
    done = write(
        checkpoint,
        Path(to),
        config=to_hf_config(model),
        names=hub_names(model, checkpoint.weights),
        tokenizer_json=tokenizer.read_text(encoding="utf-8") if tokenizer.exists() else None,
        dtype=dtype,
    )
    console().print(
        f"{checkpoint.path} -> {done.path}: {human_bytes(done.num_bytes)} of weights in "
        f"{len(done.files)} file{'s' if len(done.files) > 1 else ''}; load it with transformers' "
        "from_pretrained, or as model.weights of a new run"
    )
    if json_out:
        print(json.dumps({"path": str(done.path), "bytes": done.num_bytes,
                          "files": list(done.files)}))  # fmt: skip


def import_(source: str, run_dir: str, *, settings: Sequence[str], json_out: bool) -> None:
    """A new run folder whose step 0 are the weights of a Hugging Face folder."""
    from reparto.checkpoint.export import HuggingFaceFolder, import_huggingface
    from reparto.config.huggingface import hub_names
    from reparto.config.model import parameter_shapes, tied_parameters
    from reparto.evidence.ledger import load_key

    path = Path(run_dir)
    if not Path(source).is_dir():
        raise UserError("is no folder", where=source)
    tokenizer = Path(source) / "tokenizer.json"
    given = [f'model.config="{(Path(source) / "config.json").absolute()}"', *settings]
    if tokenizer.is_file() and not any(one.startswith("data.tokenizer") for one in settings):
        given.append(f'data.tokenizer="{tokenizer.absolute()}"')
    run = read_run(None, settings=given)
    run = run.model_copy(update={"owner": run.owner or getpass.getuser()}).resolved()
    model = run.model.resolved(1)
    folder = HuggingFaceFolder(Path(source), names=hub_names(model, parameter_shapes(model)))
    rundir.create(path, run)
    try:
        made = import_huggingface(
            folder,
            path / "checkpoints",
            run=path.name,
            key=load_key(path / "key"),
            shapes=parameter_shapes(model),
            tied=tied_parameters(model),
            dtype=run.compute.master,
            plan=run.partition.text,
        )
        if tokenizer.is_file():
            text = tokenizer.read_text(encoding="utf-8")
            rundir.write_private(path / "tokenizer.json", text)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    console().print(f"{source} -> {made}; go on with: reparto train --run-dir {path} --resume")
    if json_out:
        print(json.dumps({"path": str(made), "run_dir": str(path)}))


def _vocab_size(folder: Path) -> int:
    from reparto.data.tokenize import open_tokenizer

    path = folder / "tokenizer.json"
    return open_tokenizer(path).vocab_size if path.exists() else 1
