"""Small jobs that save and load: ranks as threads, tensors cut at random, keys fixed."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from reparto.checkpoint.exchange import Exchange
from reparto.checkpoint.save import Saver, SaveReport
from reparto.checkpoint.snapshot import Piece, Snapshot
from reparto.partition.tensors import Rectangle

KEY = bytes(range(32))
RUN = "run-a"
T = TypeVar("T")


class Meeting:
    """Rows of every rank, round by round; a rank that has left is an error for those who wait."""

    def __init__(self, world_size: int) -> None:
        self._rows: list[list[bytes]] = [[] for _ in range(world_size)]
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def exchange_of(self, rank: int) -> Exchange:
        def exchange(row: bytes) -> list[bytes]:
            with self._changed:
                self._rows[rank].append(row)
                turn = len(self._rows[rank])
                self._changed.notify_all()
                while any(len(rows) < turn for rows in self._rows):
                    gone = [r for r in self._left if len(self._rows[r]) < turn]
                    if gone or not self._changed.wait(timeout=20):
                        raise RuntimeError(f"connection closed by ranks {gone}")
                return [rows[turn - 1] for rows in self._rows]

        return exchange

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()


def ranks(world_size: int, work: Callable[[int, Exchange], T]) -> list[T | BaseException]:
    """`work(rank, exchange)` on threads; each rank's result, or what it raised."""
    meeting = Meeting(world_size)
    results: list[T | BaseException] = [RuntimeError("did not end")] * world_size

    def body(rank: int) -> None:
        try:
            results[rank] = work(rank, meeting.exchange_of(rank))
        except BaseException as error:
            results[rank] = error
        finally:
            meeting.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def all_good(results: Sequence[T | BaseException]) -> list[T]:
    """The results, or the first error."""
    good = []
    for one in results:
        if isinstance(one, BaseException):
            raise one
        good.append(one)
    return good


def model(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights and moments of a small model: matrices, a vector, a scalar, three dims."""
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (11, 6),
        "model.layers.0.mlp.up_proj.weight": (8, 6),
        "model.layers.0.conv.weight": (4, 3, 5),
        "model.norm.weight": (6,),
        "temperature": (),
    }
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        for prefix in ("", "exp_avg/", "exp_avg_sq/"):
            found[prefix + name] = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
    return found


def cut_at_random(shape: tuple[int, ...], parts: int, draw: random.Random) -> list[Rectangle]:
    """A tiling of a tensor by at most `parts` boxes, cut along any dims."""
    boxes = [Rectangle.whole(shape)]
    while len(boxes) < parts:
        can = [box for box in boxes if any(size > 1 for size in box.size)]
        if not can:
            break
        box = draw.choice(can)
        dim = draw.choice([dim for dim, size in enumerate(box.size) if size > 1])
        at = draw.randint(1, box.size[dim] - 1)
        boxes.remove(box)
        boxes += [box.narrow(dim, 0, at), box.narrow(dim, at, box.size[dim] - at)]
    return boxes


def view(tensor: Tensor, box: Rectangle) -> Tensor:
    """The part of a tensor that a box names."""
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def shared_out(
    tensors: Mapping[str, Tensor], world_size: int, *, seed: int = 0
) -> list[list[Piece]]:
    """Pieces of every rank: each tensor cut at random and dealt out at random."""
    draw = random.Random(seed)
    found: list[list[Piece]] = [[] for _ in range(world_size)]
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        for box in cut_at_random(shape, draw.randint(1, 2 * world_size), draw):
            piece = Piece(name=name, shape=shape, rectangle=box, tensor=view(tensor, box))
            found[draw.randrange(world_size)].append(piece)
    return found


def snapshot(step: int, pieces: Sequence[Piece], **more: object) -> Snapshot:
    """A snapshot with a small state."""
    fields: dict[str, object] = {"state": {"updates": step, "position": 32 * step}, **more}
    return Snapshot(step=step, plan="data=2", pieces=pieces, **fields)  # type: ignore[arg-type]


def save_world(
    root: Path, step: int, world_size: int, *, seed: int = 0, run: str = RUN, keep: int = 9,
    tensors: Mapping[str, Tensor] | None = None, aliases: Mapping[str, str] | None = None,
) -> list[SaveReport]:  # fmt: skip
    """Save `model(step)` from some ranks; the report of each."""
    shares = shared_out(tensors or model(step), world_size, seed=seed)
    tied = {} if tensors else {"lm_head.weight": "model.embed_tokens.weight"}

    def work(rank: int, exchange: Exchange) -> SaveReport:
        saver = Saver(root, run=run, key=KEY, rank=rank, exchange=exchange, keep=keep)
        return saver.save(snapshot(step, shares[rank], aliases=aliases or tied))

    return all_good(ranks(world_size, work))


def save_alone(root: Path, step: int, *, run: str = RUN, keep: int = 9) -> SaveReport:
    """Save `model(step)` from one rank."""
    return save_world(root, step, 1, run=run, keep=keep)[0]


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: for tests that sync a thousand times."""
    shm = Path("/dev/shm")
    place = shm if os.access(shm, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def steps_in(root: Path) -> list[str]:
    """Names in a checkpoint folder, by step."""
    return sorted((one.name for one in root.iterdir()), key=lambda name: (len(name), name))
