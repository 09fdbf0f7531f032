"""One process writes a whole checkpoint: another layout of an old one, or an import.

Any plan loads any layout, so nobody needs `convert` to resume. It is for what a layout costs: a
checkpoint of 512 files on a slow file system becomes one of 8, or is cut the way a large job will
read it. Only rectangles move; no value, step or state changes, and the new manifest names the old
one as its parent. Memory stays at one piece, whatever the size: pieces are read when their turn to
be written comes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from reparto.checkpoint import layout
from reparto.checkpoint.files import (
    folder_name,
    free_bytes,
    make_private_folder,
    remove_folder,
    sync_folder,
    write_file,
)
from reparto.checkpoint.layout import Parent, file_of_rank, piece_key
from reparto.checkpoint.shards import element_bytes, header_bytes, lay_out
from reparto.checkpoint.share import writes
from reparto.checkpoint.stored import Checkpoint
from reparto.errors import UserError
from reparto.partition.grid import Grid
from reparto.partition.tensors import Rectangle, Table, shard_rows
from reparto.units import DTYPE_BYTES, human_bytes

#: name and shape of a tensor -> the rectangles it is cut in, each with the number of its file
Cut = Callable[[str, tuple[int, ...]], Sequence[tuple[int, Rectangle]]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tensor that can be read by rectangles."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Rectangle], Tensor]
    "a rectangle's values, of `dtype`"


def by_rows(num_files: int) -> Cut:
    """Every tensor cut by rows over all files; short ones fill the first files."""

    def cut(name: str, shape: tuple[int, ...]) -> list[tuple[int, Rectangle]]:
        whole = Rectangle.whole(shape)
        return [(file, rows) for file in range(num_files)
                for rows in shard_rows(whole, num_files, file)]  # fmt: skip

    return cut


def by_plan(tables: Sequence[Table], grid: Grid) -> Cut:
    """What the ranks of a plan would write themselves.

    tables  the placement table of every rank, in rank order
    """
    mine = [writes(table, grid, rank) for rank, table in enumerate(tables)]

    def cut(name: str, shape: tuple[int, ...]) -> list[tuple[int, Rectangle]]:
        weight = name.rsplit("/", 1)[-1]
        found = [
            (rank, box)
            for rank, table in enumerate(tables)
            if weight in mine[rank]
            for box in table[weight].held
        ]
        if not found:
            raise UserError(
                f"no rank of the plan holds {weight}",
                where="--plan",
                legal="a plan for the model that the checkpoint is of",
            )
        return found

    return cut


def convert(
    checkpoint: Checkpoint,
    root: Path,
    *,
    key: bytes,
    cut: Cut,
    plan: str,
    drop_per_rank: bool = False,
) -> Path:
    """Write `root/step-N` in another layout; returns that folder.

    root           another folder than the one the checkpoint lies in; made if missing
    plan           text of the plan that `cut` is of
    drop_per_rank  leave out values that belong to one rank each; without it they are a `UserError`

    Every file of the source is digested before its first use.
    """
    manifest = checkpoint.manifest
    if manifest.per_rank is not None and not drop_per_rank:
        raise UserError(
            f"holds values that belong to one rank each, of {len(manifest.per_rank)} ranks; they "
            "have no place in another layout",
            where=str(checkpoint.path),
            nearest="convert without them (--drop-per-rank), if the run does not need them",
        )
    sources = {
        name: Source(shape=entry.shape, dtype=entry.dtype, read=_reader(checkpoint, name))
        for name, entry in manifest.tensors.items()
        if entry.alias_of is None
    }
    return write_checkpoint(
        root,
        run=manifest.run,
        step=manifest.step,
        key=key,
        plan=plan,
        sources=sources,
        aliases=checkpoint.aliases,
        cut=cut,
        state=manifest.state,
        parent=checkpoint.parent,
    )


def _reader(checkpoint: Checkpoint, name: str) -> Callable[[Rectangle], Tensor]:
    return lambda box: checkpoint.read(name, box)


def write_checkpoint(
    root: Path,
    *,
    run: str,
    step: int,
    key: bytes,
    plan: str,
    sources: Mapping[str, Source],
    aliases: Mapping[str, str],
    cut: Cut,
    state: Mapping[str, JsonValue],
    parent: Parent | None,
) -> Path:
    """Write and publish `root/step-N` from one process; returns that folder.

    Raises `UserError` if it is there already, if the disk is too small, or if `cut` does not tile
    a tensor; then nothing is left behind.
    """
    final = root / folder_name(step)
    if os.path.lexists(final):
        raise UserError("is there already", where=str(final), nearest="choose another folder")
    make_private_folder(root, exist_ok=True)
    _refuse_small_disk(root, sources)
    folder = root / folder_name(step, "tmp", run=run)
    make_private_folder(folder)
    try:
        files, tensors = _write_files(folder, sources, cut, {"run": run, "step": str(step)})
        for alias, name in aliases.items():
            tensors[alias] = {**tensors[name], "pieces": [], "alias_of": name}
        manifest = layout.build(
            run=run, step=step, plan=plan, tensors=tensors, files=files, per_rank=None,
            state=dict(state), parent=None if parent is None else parent.model_dump(),
        )  # fmt: skip
        write_file(folder / layout.MANIFEST, [layout.encode(manifest, key)])
        sync_folder(folder)
        os.rename(folder, final)
        sync_folder(root)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_folder(folder)
        raise
    return final


def _write_files(
    folder: Path, sources: Mapping[str, Source], cut: Cut, metadata: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """The `files` and `tensors` of the manifest, once all files are written."""
    by_file: dict[int, list[tuple[str, Rectangle]]] = {}
    tensors: dict[str, dict[str, object]] = {}
    for name, source in sources.items():
        pieces = []
        for number, box in cut(name, source.shape):
            by_file.setdefault(number, []).append((name, box))
            file = file_of_rank(number)
            pieces.append({"file": file, "start": box.start, "size": box.size})
        tensors[name] = {"shape": source.shape, "dtype": source.dtype, "pieces": pieces}
    files: dict[str, object] = {}
    for number, parts in sorted(by_file.items()):
        parts.sort(key=lambda part: -DTYPE_BYTES[sources[part[0]].dtype])  # as `lay_out` orders
        blocks = lay_out(
            (piece_key(name, box.start), sources[name].dtype, box.size) for name, box in parts
        )
        header = header_bytes(blocks, {"format": "pt", **metadata})
        file = file_of_rank(number)
        files[file] = write_file(folder / file, _chunks(header, parts, sources)).model_dump()
    return files, tensors


def _chunks(
    header: bytes, parts: Sequence[tuple[str, Rectangle]], sources: Mapping[str, Source]
) -> Iterator[memoryview | bytes]:
    yield header
    for name, box in parts:
        yield element_bytes(sources[name].read(box))


def _refuse_small_disk(root: Path, sources: Mapping[str, Source]) -> None:
    needed = sum(
        Rectangle.whole(one.shape).numel * DTYPE_BYTES[one.dtype] for one in sources.values()
    )
    free = free_bytes(root)
    if needed > free:
        raise UserError(
            f"needs {human_bytes(needed)}, free are {human_bytes(free)}", where=str(root)
        )
