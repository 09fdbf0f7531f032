"""One checkpoint on disk: what it holds, proof that it is whole, and any rectangle of any tensor.

Order of belief: the signature of the manifest, before it is parsed; the digest of a file, before
its first element is used; only then elements. A file is read twice for this, the second time out of
memory as a rule: 1.4 GB/s of SHA-256 on one core is what proof costs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from pydantic import JsonValue, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from reparto.checkpoint import layout
from reparto.checkpoint.files import (
    Identity,
    digest_file,
    open_plain,
    read_small,
    refuse_foreign_folder,
    step_folder,
)
from reparto.checkpoint.layout import Damaged, Manifest, Parent, PieceEntry, piece_key
from reparto.checkpoint.shards import Header, read_box, read_header
from reparto.errors import UserError
from reparto.partition.tensors import Rectangle

_DIGEST_THREADS = 4


class LoadOfExperts(TypedDict):
    """What `parallel/expert.py` keeps of routers, by layer and expert."""

    counts: list[list[int]]
    bias_steps: list[list[int]]


_LOAD = TypeAdapter(LoadOfExperts)


class Checkpoint:
    """One checkpoint on disk whose manifest has been read. Made by `open_checkpoint`."""

    def __init__(self, path: Path, raw: bytes, manifest: Manifest, *, signed: bool) -> None:
        """Private: takes what `open_checkpoint` has read."""
        self.path = path
        self.manifest = manifest
        self.signed = signed
        "whether the signature was checked; without a key it is not"
        self.parent = Parent(run=manifest.run, step=manifest.step, manifest=layout.digest(raw))
        "what a run that goes on from here names as its parent"
        self.aliases = {
            name: entry.alias_of
            for name, entry in manifest.tensors.items()
            if entry.alias_of is not None
        }
        "tied name -> the name it is stored under"
        self._proven: dict[str, Identity | None] = {}
        self._headers: dict[str, Header] = {}

    # --- what it holds ---------------------------------------------------------------------------

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Global name -> shape of every weight; no aliases, no optimizer state."""
        return {
            name: entry.shape
            for name, entry in self.manifest.tensors.items()
            if entry.alias_of is None and not layout.is_moment(name)
        }

    def load_of_experts(self) -> LoadOfExperts:
        """Raises `UserError` if the checkpoint has none or holds anything else."""
        try:
            return _LOAD.validate_python(self.manifest.state.get("experts"), strict=True)
        except ValidationError as error:
            raise UserError(
                "keeps no load of experts, and this model has experts",
                where=str(self.path),
                legal="a checkpoint of the same model",
            ) from error

    def check_against(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        frozen: Collection[str] = (),
        moments: bool = True,
    ) -> None:
        """`UserError` that lists every missing, unused and wrong-shape key, if there is one.

        shapes   global name -> shape of what the model needs, tied weights under any of their names
        frozen   those of them that are not trained, and have no moments
        moments  whether optimizer state is looked at; False where only weights are wanted
        """
        needed = {self.aliases.get(name, name): shape for name, shape in shapes.items()}
        if moments:
            trained = [(name, shape) for name, shape in needed.items() if name not in frozen]
            for one in layout.MOMENTS:
                needed.update((layout.moment_name(one, name), shape) for name, shape in trained)
        here = {
            name: entry.shape
            for name, entry in self.manifest.tensors.items()
            if entry.alias_of is None and (moments or not layout.is_moment(name))
        }
        missing = [name for name in needed if name not in here]
        unused = [name for name in here if name not in needed]
        wrong = [
            f"{name} is {list(here[name])}, the model needs {list(shape)}"
            for name, shape in needed.items()
            if name in here and here[name] != shape
        ]
        if missing or unused or wrong:
            lists = (("missing", missing), ("unused", unused), ("wrong shape", wrong))
            found = [f"{what} ({len(names)}): {', '.join(names)}" for what, names in lists if names]
            raise UserError(
                f"step {self.manifest.step} is of another model\n  " + "\n  ".join(found),
                where=str(self.path),
                legal="the same names and shapes as the model's",
                nearest="resume with the run.toml that lies beside the checkpoints",
            )

    def for_rank(self, rank: int, world_size: int) -> JsonValue:
        """What this rank gave as its own; None if nobody did.

        `UserError` when the number of ranks differs: such values have no meaning elsewhere.
        """
        if self.manifest.per_rank is None:
            return None
        if len(self.manifest.per_rank) != world_size:
            raise UserError(
                f"holds values that belong to one rank each, of {len(self.manifest.per_rank)} "
                f"ranks; this run has {world_size}",
                where=str(self.path),
                legal=f"{len(self.manifest.per_rank)} ranks",
                nearest=f"resume with the plan that wrote it: {self.manifest.plan}",
            )
        return self.manifest.per_rank[str(rank)]

    # --- proof -----------------------------------------------------------------------------------

    def verify(self, *, share: int = 0, shares: int = 1) -> None:
        """Digest the files (every `shares`-th, from `share`); `Damaged` naming all that differ."""
        names = sorted(self.manifest.files)[share::shares]
        with ThreadPoolExecutor(_DIGEST_THREADS, thread_name_prefix="digest") as threads:
            found = list(threads.map(self._fault_of, names))
        faults = [fault for fault in found if fault]
        if faults:
            raise Damaged(self.path, *faults)

    def trust_other_ranks(self) -> None:
        """Take the files that this rank has not digested as proven: other ranks have said so."""
        for name in self.manifest.files:
            self._proven.setdefault(name, None)

    def _fault_of(self, name: str) -> str:
        """What is wrong with one file; empty if it is the one that was written."""
        try:
            descriptor = open_plain(self.path / name)
        except Damaged as error:
            return f"{name} {error.faults[0]}"
        try:
            before = Identity.of(descriptor)
            expected = self.manifest.files[name]
            if before.size != expected.bytes:
                return (
                    f"{name} has {before.size} bytes, not {expected.bytes}"
                    f"{self._other_step(descriptor)}"
                )
            found = digest_file(descriptor, before.size)
            if found != expected.sha256:
                return (
                    f"{name} has been changed{self._other_step(descriptor)}: digest "
                    f"{found[:16]}..., expected {expected.sha256[:16]}..."
                )
            if fault := self._header_fault(name, descriptor):
                return fault
            if Identity.of(descriptor) != before:
                return f"{name} changes while it is read"
            self._proven[name] = before
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        finally:
            os.close(descriptor)
        return ""

    def _header_fault(self, name: str, descriptor: int) -> str:
        """Whether a file's own header says what the manifest says of it; empty if so.

        Only the writer can have made them differ, so this finds a fault of ours, or a stranger who
        has the key. Keeps the header for `read`.
        """
        try:
            header = read_header(descriptor, where=name)
        except Damaged as error:
            return str(error)
        expected = self._listed[name]
        found = {key: (block.dtype, block.shape) for key, block in header.blocks.items()}
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                said = f"{found.get(key, 'nothing')} and {expected.get(key, 'nothing')}"
                return f"{name}: header and manifest say of {key[:120]!a} {said}"
        self._headers[name] = header
        return ""

    @cached_property
    def _listed(self) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
        """What the manifest says of each file: key of a piece -> element type and shape."""
        listed: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
            name: {} for name in self.manifest.files
        }
        for tensor, entry in self.manifest.tensors.items():
            for piece in entry.pieces:
                listed[piece.file][piece_key(tensor, piece.start)] = (entry.dtype, piece.size)
        return listed

    def _other_step(self, descriptor: int) -> str:
        """Whether a changed file is a whole one out of another save; for the message only."""
        try:
            written = read_header(descriptor, where="").metadata
        except Damaged:
            return ""
        run, step = written.get("run", ""), written.get("step", "")
        if (run, step) == (self.manifest.run, str(self.manifest.step)):
            return ""
        return f" (it says step {step[:20]!a} of run {run[:40]!a})"

    def _open(self, name: str) -> int:
        """Descriptor of a proven file; proves it first if nobody has."""
        if name not in self._proven and (fault := self._fault_of(name)):
            raise Damaged(self.path, fault)
        descriptor = open_plain(self.path / name)
        proven = self._proven[name]
        if proven is not None and Identity.of(descriptor) != proven:
            os.close(descriptor)
            raise Damaged(self.path, f"{name} has been changed since its digest was checked")
        return descriptor

    # --- elements --------------------------------------------------------------------------------

    def read(
        self, name: str, rectangle: Rectangle | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A rectangle of a tensor (all of it without one), whatever pieces it was saved in.

        Returns a new tensor in host memory, of the stored element type or of `dtype`. Raises
        `UserError` for an unknown name and `Damaged` for a file that does not hold.
        """
        name = self.aliases.get(name, name)
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise UserError(f"has no tensor {name!r}", where=str(self.path))
        box = Rectangle.whole(entry.shape) if rectangle is None else rectangle
        out = torch.empty(box.size, dtype=getattr(torch, entry.dtype))
        for piece in entry.pieces:
            common = box.intersect(piece.rectangle) if entry.shape else box
            if common is None:
                continue
            target = out
            for dim, (at, size) in enumerate(zip(common.start, common.size, strict=True)):
                target = target.narrow(dim, at - box.start[dim], size)
            self._read_part(name, entry.dtype, piece, common, target)
        return out if dtype is None else out.to(dtype)

    def _read_part(
        self, name: str, dtype: str, piece: PieceEntry, part: Rectangle, target: Tensor
    ) -> None:
        """Read `part`, a rectangle of the tensor that lies inside `piece`, into `target`."""
        where, key = self.path / piece.file, piece_key(name, piece.start)
        corner = zip(part.start, piece.start, strict=True)
        inside = Rectangle(start=tuple(a - b for a, b in corner), size=part.size)
        descriptor = self._open(piece.file)
        try:
            header = self._headers.get(piece.file)
            if header is None:
                header = self._headers[piece.file] = read_header(descriptor, where=where)
            block = header.blocks.get(key)
            if block is None or (block.dtype, block.shape) != (dtype, piece.size):
                raise Damaged(where, f"holds no {dtype} piece {key} of shape {list(piece.size)}")
            read_box(descriptor, header, block, inside, target, where=where)
        except OSError as error:
            raise Damaged(where, f"cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)


def open_checkpoint(path: Path, key: bytes | None) -> Checkpoint:
    """Read the manifest of one checkpoint folder.

    key  the run's secret. None reads a checkpoint whose key is not at hand: digests still tell
         accidents, but whoever could write the folder could write the manifest.

    Raises `Damaged` naming what does not hold, `UserError` for another format version.
    """
    refuse_foreign_folder(path)
    limit = layout.MAX_MANIFEST_BYTES if key is not None else layout.MAX_UNSIGNED_BYTES
    raw = read_small(path / layout.MANIFEST, limit)
    manifest = layout.decode(raw, key, where=path / layout.MANIFEST)
    named = step_folder(path)
    if named is not None and named.step != manifest.step:
        raise Damaged(path, f"is named after step {named.step}, its manifest is of step "
                      f"{manifest.step}")  # fmt: skip
    return Checkpoint(path, raw, manifest, signed=key is not None)
