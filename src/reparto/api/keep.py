"""Checkpoints of a foreign module: trained and frozen weights, moments, buffers, and one position.

The format is that of `reparto train` (`checkpoint/`): every element once, whatever the plan, so a
run goes on under another plan. Buffers are equal on all ranks and written by rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from reparto.checkpoint.layout import Parent, moment_name, run_name
from reparto.checkpoint.load import Checkpoint, find_latest
from reparto.checkpoint.save import Saver
from reparto.checkpoint.share import writes
from reparto.checkpoint.snapshot import Piece, Snapshot
from reparto.comm.mesh import Mesh
from reparto.errors import UserError
from reparto.evidence.ledger import load_key
from reparto.parallel.compose import Parallel
from reparto.partition.tensors import Rectangle
from reparto.trace import Kind
from reparto.train.optim import AdamW

State = Mapping[str, JsonValue]


class Keeper:
    """Saves and takes up the state of one shared module."""

    def __init__(self, run_dir: Path, parallel: Parallel, optimizer: AdamW) -> None:
        self._run_dir, self._parallel, self._optimizer = run_dir, parallel, optimizer
        self._mesh: Mesh = parallel.mesh
        self._key = load_key(run_dir / "key")
        self._parent: Parent | None = None
        self._saver = Saver(
            run_dir / "checkpoints",
            run=run_name(run_dir.name),
            key=self._key,
            rank=self._mesh.rank,
            exchange=self._exchange,
        )

    def _exchange(self, row: bytes) -> list[bytes]:
        return self._mesh.world.exchange(row, tag="checkpoint")

    # -- save ----------------------------------------------------------------------------------

    def save(self, step: int, state: State) -> Path:
        """Write step `step`; every rank must call it. Raises `SaveFailed` alike on all."""
        table = self._parallel.table
        snapshot = Snapshot(
            step=step,
            plan=self._parallel.plan.text,
            pieces=[*self._trained(), *self._frozen(), *self._buffers()],
            aliases={name: one.tied_to for name, one in table.items() if one.tied_to is not None},
            state=state,
            parent=self._parent,
        )
        with self._mesh.ring.span(Kind.SAVE, f"step-{step}"):
            return self._saver.save(snapshot).path

    def _mine(self) -> frozenset[str]:
        return writes(self._parallel.table, self._mesh.grid, self._mesh.rank)

    def _trained(self) -> list[Piece]:
        table, mine, found = self._parallel.table, self._mine(), []
        for one in self._parallel.strategy.owned():
            if one.name not in mine:
                continue
            exp_avg, exp_avg_sq = self._optimizer.moments(one.name)
            for name, tensor in (
                (one.name, one.weight),
                (moment_name("exp_avg", one.name), exp_avg),
                (moment_name("exp_avg_sq", one.name), exp_avg_sq),
            ):
                found.append(
                    Piece(
                        name=name,
                        shape=table[one.name].shape,
                        rectangle=one.rectangle,
                        tensor=tensor,
                    )
                )
        return found

    def _frozen(self) -> list[Piece]:
        mine, found = self._mine(), []
        for name in self._frozen_names():
            whole = self._parallel.strategy.full_weight(name)  # a collective: on every rank
            placement = self._parallel.table[name]
            if name in mine:
                for box in placement.held:
                    piece = cut(whole, box).clone()
                    found.append(
                        Piece(name=name, shape=placement.shape, rectangle=box, tensor=piece)
                    )
        return found

    def _frozen_names(self) -> list[str]:
        table = self._parallel.table
        return [name for name, one in table.items() if not one.trainable and one.tied_to is None]

    def _buffers(self) -> list[Piece]:
        if self._mesh.rank != 0:
            return []
        return [
            Piece(name=name, shape=tuple(one.shape), tensor=one,
                  rectangle=Rectangle.whole(tuple(one.shape)))
            for name, one in persistent_buffers(self._parallel.model).items()
        ]  # fmt: skip

    # -- load ----------------------------------------------------------------------------------

    def load(self, settings: Mapping[str, JsonValue]) -> tuple[int, State]:
        """Take up the newest whole checkpoint; returns its step and state.

        settings  what a resume must not change; compared with what the checkpoint says

        Raises `UserError` if there is none, or if it is of another module or other settings.
        """
        found = find_latest(
            self._run_dir / "checkpoints",
            key=self._key,
            rank=self._mesh.rank,
            exchange=self._exchange,
        ).checkpoint
        _same_settings(found, settings)
        table = self._parallel.table
        buffers = persistent_buffers(self._parallel.model)
        frozen = self._frozen_names()
        shapes = {name: one.shape for name, one in table.items() if one.tied_to is None}
        shapes.update({name: tuple(one.shape) for name, one in buffers.items()})
        found.check_against(shapes, frozen=[*frozen, *buffers])
        updates = int(str(found.manifest.state["updates"]))
        with torch.no_grad():
            for one in self._parallel.strategy.owned():
                one.weight.copy_(found.read(one.name, one.rectangle))
                self._optimizer.load(
                    one.name,
                    found.read(moment_name("exp_avg", one.name), one.rectangle),
                    found.read(moment_name("exp_avg_sq", one.name), one.rectangle),
                    updates,
                )
            for name, buffer in buffers.items():
                buffer.copy_(found.read(name))
        self._parallel.strategy.publish()
        self._same_frozen(found, frozen)
        self._parent = found.parent
        return found.manifest.step, found.manifest.state

    def _same_frozen(self, checkpoint: Checkpoint, frozen: list[str]) -> None:
        """What is not trained comes from `build`, so it must be what was saved."""
        for name in frozen:
            built = self._parallel.strategy.full_weight(name)
            if not torch.equal(built.cpu(), checkpoint.read(name, dtype=built.dtype)):
                raise UserError(
                    f"the frozen weight `{name}` is not the one that was saved",
                    where="build",
                    legal="a module with the same frozen weights as when the run began",
                )


def _same_settings(checkpoint: Checkpoint, settings: Mapping[str, JsonValue]) -> None:
    saved = checkpoint.manifest.state.get("settings")
    before = saved if isinstance(saved, dict) else {}
    changed = [key for key in settings if before.get(key) != settings[key]]
    if changed:
        told = "\n".join(f"    {key}: {before.get(key)} -> {settings[key]}" for key in changed)
        raise UserError(
            f"{checkpoint.path} was made with other settings:\n{told}",
            where="resume",
            legal="the same steps, batch size, seed, precision and optimizer; the plan may change",
            nearest="start a new run in another folder",
        )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Name -> buffer, of those that belong to the module's state."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = set(model.state_dict()) - parameters
    return {name: one for name, one in model.named_buffers() if name in state}


def cut(whole: Tensor, box: Rectangle) -> Tensor:
    """The rectangle of a whole tensor, as a view."""
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole
