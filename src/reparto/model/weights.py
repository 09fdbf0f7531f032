"""Weights of a Hugging Face folder, by global name: safetensors only, opened where they lie.

Our decoder has Hugging Face's names and shapes, so nothing is renamed. Headers are read first and
every mismatch is listed at once; tensors are read one at a time when a strategy asks for them, so
a rank never holds more than one whole tensor of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from reparto.errors import UserError


class WeightFolder:
    """The tensors of one folder, checked against what a model needs."""

    def __init__(self, files: Mapping[str, Path], aliases: Mapping[str, str]) -> None:
        self._files = files
        self._aliases = aliases

    def read(self, name: str) -> Tensor:
        """The whole tensor, of the stored type."""
        stored = self._aliases.get(name, name)
        with safe_open(str(self._files[stored]), framework="pt") as file:
            found: Tensor = file.get_tensor(stored)
        return found


def open_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    tied: Mapping[str, str],
    names: Mapping[str, str] | None = None,
) -> WeightFolder:
    """The weights in `folder` for a model of `shapes`; `tied` is alias -> name.

    names  our name -> the folder's, where they differ (`config.huggingface.hub_names`)

    Raises `UserError` listing every missing, unused and wrong-shape tensor.
    """
    files = _files(folder)
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in files:
        try:
            with safe_open(str(path), framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    found[name] = (path, tuple(file.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is not safetensors: {error}", where="model.weights") from error
    stored_as = {name: alias for alias, name in tied.items() if name not in found}
    stored_as |= {ours: theirs for ours, theirs in (names or {}).items() if theirs != ours}
    missing, wrong = [], []
    for name, shape in shapes.items():
        stored = stored_as.get(name, name)
        if stored not in found:
            missing.append(name)
        elif found[stored][1] != shape:
            wrong.append(f"{name} is {list(found[stored][1])}, the model needs {list(shape)}")
    known = {*shapes, *tied, *stored_as.values()}
    unused = [name for name in found if name not in known]
    if missing or wrong or unused:
        lists = (("missing", missing), ("wrong shape", wrong), ("unused", unused))
        told = [f"{what} ({len(names)}): {', '.join(names)}" for what, names in lists if names]
        raise UserError(
            f"{folder} holds weights of another model\n  " + "\n  ".join(told),
            where="model.weights",
            legal="the names and shapes of this model",
            nearest="set model.config to the config.json that lies beside the weights",
        )
    return WeightFolder({name: path for name, (path, _) in found.items()}, stored_as)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index} is no index of weights", where="model.weights") from error
        unsafe = [name for name in names if Path(name).name != name]
        if unsafe:
            raise UserError(f"{index} names files outside its folder: {unsafe[0]}",
                            where="model.weights")  # fmt: skip
        files = sorted(folder / name for name in names)
    else:
        files = sorted(folder.glob("*.safetensors"))
    absent = [str(path) for path in files if not path.is_file()]
    if absent or not files:
        raise UserError(
            f"{absent[0] if absent else folder} does not exist or holds no safetensors",
            where="model.weights",
            legal="a folder with model.safetensors, or shards with their index",
        )
    return files
