"""Saves that are cut off: at every system call, on a full disk, by SIGKILL at random instants.

After each, the newest whole checkpoint must be the last that was published or a newer one, with the
values of its step bit by bit, and the next save must work.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.checkpoint_worlds import (
    KEY,
    RUN,
    memory_folder,
    model,
    ranks,
    save_alone,
    save_world,
    shared_out,
    snapshot,
    steps_in,
)

from reparto.checkpoint.exchange import Exchange
from reparto.checkpoint.files import make_private_folder, write_file
from reparto.checkpoint.load import Found, find_latest
from reparto.checkpoint.save import SaveFailed, Saver, SaveReport, refuse_small_disk
from reparto.checkpoint.snapshot import Piece
from reparto.errors import Fault, UserError


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


CALLS = ("mkdir", "chmod", "open", "write", "fsync", "rename", "unlink", "rmdir", "fchmod")


class Killed(BaseException):
    """What stands for the end of the process: nothing catches it."""


@contextmanager
def ends_at(call: int, end: Callable[[str], None], *, once: bool) -> Iterator[list[int]]:
    """Do `end(name)` at the `call`-th change of the file system; at all after it, unless `once`.

    A write that is cut off has written half. Yields the count of calls, in a list.
    """
    count, lock = [0], threading.Lock()
    real = {name: getattr(os, name) for name in CALLS}

    def patched(name: str) -> Callable[..., object]:
        def run(*args: object, **named: object) -> object:
            if name == "open" and not (isinstance(args[1], int) and args[1] & os.O_CREAT):
                return real[name](*args, **named)
            with lock:
                count[0] += 1
                hit = count[0] == call or (not once and count[0] > call)
                first = count[0] == call
            if hit:
                if name == "write" and first:
                    data = memoryview(args[1])  # type: ignore[arg-type]
                    real[name](args[0], data[: len(data) // 2])
                end(name)
            return real[name](*args, **named)

        return run

    for name in CALLS:
        setattr(os, name, patched(name))
    try:
        yield count
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def die(name: str) -> None:
    raise Killed


def disk_full(name: str) -> None:
    if name in ("write", "mkdir", "open", "fsync"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-00001.safetensors")


def assert_whole(found: Found, at_least: int) -> None:
    """It is a checkpoint of `at_least` or later, and holds the values of its step."""
    manifest = found.checkpoint.manifest
    assert manifest.step >= at_least, found.skipped
    assert manifest.state == {"updates": manifest.step, "position": 32 * manifest.step}
    for name, tensor in model(manifest.step).items():
        assert torch.equal(found.checkpoint.read(name), tensor)


@pytest.mark.parametrize("keep", [1, 3])
def test_l73_a_kill_at_any_point_of_a_save_loses_no_complete_checkpoint(
    keep: int, folder: Path
) -> None:
    """L73: SIGKILL at each point of a save; a torn folder is never taken for whole."""
    start = folder / "start"
    for step in (90, 100):
        save_alone(start, step, keep=keep)
    for call in range(1, 200):
        root = Path(shutil.copytree(start, folder / f"c{call}"))
        ended = False
        with ends_at(call, die, once=False) as count:
            try:
                save_alone(root, 200, keep=keep)
                ended = True
            except Killed:
                pass
        found = find_latest(root, key=KEY)
        assert_whole(found, 200 if ended else 100)
        published = (root / "step-200").exists()
        assert published == (found.checkpoint.manifest.step == 200)
        if not published and any("tmp" in name for name in steps_in(root)):
            assert any("step 200 is incomplete" in one for one in found.skipped)
        save_alone(root, 300, keep=keep)  # nothing has to be repaired by hand
        left = steps_in(root)
        assert left[-1] == "step-300" and len(left) <= keep
        assert not any("." in name for name in left)
        assert_whole(find_latest(root, key=KEY), 300)
        if ended:
            assert call > count[0]
            assert call > 15
            return


def save_200(root: Path, shares: list[list[Piece]], rank: int, exchange: Exchange) -> SaveReport:
    saver = Saver(root, run=RUN, key=KEY, rank=rank, exchange=exchange, keep=2)
    return saver.save(snapshot(200, shares[rank]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_l73_a_full_disk_at_any_point_is_told_alike_and_the_old_one_stays(
    world_size: int, folder: Path
) -> None:
    """L73: ENOSPC at each point, on any rank; a failed save deletes nothing."""
    refused, start = 0, folder / "start"
    for step in (90, 100):
        save_world(start, step, world_size, keep=2)
    before = steps_in(start)
    for call in range(1, 200, 2 * world_size - 1):  # every call of one rank, a third of two ranks'
        root = Path(shutil.copytree(start, folder / f"c{call}"))
        shares = shared_out(model(200), world_size)

        with ends_at(call, disk_full, once=True) as count:
            results = ranks(world_size, partial(save_200, root, shares))
        errors = [one for one in results if isinstance(one, BaseException)]
        if errors:
            refused += 1
            assert all(isinstance(one, SaveFailed) for one in results)
            assert len({str(one) for one in results}) == 1
            text = str(results[0])
            assert "No space left on device" in text and "free the disk" in text
            assert "step 200" in text and "rank " in text
            if not (root / "step-200").exists():  # the last fsync comes after the rename
                assert steps_in(root) == before
                assert_whole(find_latest(root, key=KEY), 100)
        else:
            assert_whole(find_latest(root, key=KEY), 200)
        save_world(root, 300, world_size, keep=2)
        assert_whole(find_latest(root, key=KEY), 300)
        if count[0] < call:
            break
    assert refused >= 8


def test_free_space_is_asked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_world(tmp_path / "c", 100, 2)
    before = steps_in(tmp_path / "c")
    monkeypatch.setattr("reparto.checkpoint.save.free_bytes", lambda path: 1 << 20)
    with pytest.raises(
        SaveFailed, match=r"needs 1.0 MiB.*free are 1.0 MiB; largest there: step-100"
    ):
        save_world(tmp_path / "c", 200, 2)
    assert steps_in(tmp_path / "c") == before


def test_a_disk_that_cannot_hold_what_is_kept_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reparto.checkpoint.save.free_bytes", lambda path: 11 << 20)
    refuse_small_disk(tmp_path, checkpoint_bytes=2 << 20, keep=4)
    with pytest.raises(UserError) as caught:
        refuse_small_disk(tmp_path, checkpoint_bytes=2 << 20, keep=5)
    assert caught.value.legal == "1 to 4" and caught.value.nearest == "recover.keep=4"
    with pytest.raises(UserError, match="not even two"):
        refuse_small_disk(tmp_path, checkpoint_bytes=9 << 20, keep=1)


def test_an_error_on_one_rank_is_told_by_all(tmp_path: Path) -> None:
    """A folder that rank 1 cannot see: no shared file system, or a mount that went away."""
    shares = shared_out(model(1), 3)

    def work(rank: int, exchange: Exchange) -> SaveReport:
        root = tmp_path / ("c" if rank != 1 else "elsewhere")
        saver = Saver(root, run=RUN, key=KEY, rank=rank, exchange=exchange)
        return saver.save(snapshot(1, shares[rank]))

    results = ranks(3, work)
    for one in results:
        assert isinstance(one, SaveFailed) and isinstance(one, Fault) and one.exit_code == 4
        assert "rank 1: No such file or directory (rank-00001.safetensors)" in str(one)
    assert steps_in(tmp_path / "c") == []


def test_a_rank_that_is_gone_leaves_an_error_and_the_old_checkpoint(tmp_path: Path) -> None:
    save_world(tmp_path / "c", 100, 2)
    shares = shared_out(model(200), 2)

    def work(rank: int, exchange: Exchange) -> SaveReport:
        meetings = 0

        def sometimes(row: bytes) -> list[bytes]:
            nonlocal meetings
            meetings += 1
            if rank == 1 and meetings == 2:
                raise Killed
            return exchange(row)

        saver = Saver(tmp_path / "c", run=RUN, key=KEY, rank=rank, exchange=sometimes)
        return saver.save(snapshot(200, shares[rank]))

    results = ranks(2, work)
    assert isinstance(results[0], RuntimeError) and isinstance(results[1], Killed)
    assert_whole(find_latest(tmp_path / "c", key=KEY), 100)


# --- real processes, real signals ----------------------------------------------------------------


def over_socket(rank: int, peer: socket.socket) -> Exchange:
    """An exchange of two processes over a socket pair."""

    def receive(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = peer.recv(count - len(data))
            if not part:
                raise RuntimeError("connection closed")
            data += part
        return data

    def exchange(row: bytes) -> list[bytes]:
        peer.sendall(struct.pack("<Q", len(row)) + row)
        other = receive(struct.unpack("<Q", receive(8))[0])
        return [row, other] if rank == 0 else [other, row]

    return exchange


def start_rank(
    rank: int, root: Path, first: int, pair: tuple[socket.socket, ...], told: int
) -> int:
    """A process that saves step after step until it is killed; it tells each published step."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        pair[1 - rank].close()
        exchange = over_socket(rank, pair[rank])
        saver = Saver(root, run=RUN, key=KEY, rank=rank, exchange=exchange, keep=2)
        for step in range(first, first + 10_000):
            saver.save(snapshot(step, shared_out(model(step), 2)[rank]))
            if rank == 0:
                os.write(told, struct.pack("<Q", step))
    except RuntimeError:
        status = 0  # the other rank is gone
    finally:
        os._exit(status)


@pytest.mark.parametrize(
    "times", [12, pytest.param(200, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_sigkill_at_random_instants_loses_no_complete_checkpoint(times: int, folder: Path) -> None:
    """Promise 2: no kill point loses the last complete checkpoint. Either rank is hit, or both."""
    root, draw = folder / "c", random.Random(2)
    last, torn = 0, 0
    for turn in range(times):
        pair = socket.socketpair()
        reading, told = os.pipe()
        pids = [start_rank(rank, root, last + 1, pair, told) for rank in range(2)]
        for one in pair:
            one.close()
        os.close(told)
        time.sleep(draw.uniform(0.0, 0.15))
        for rank in ((0,), (1,), (0, 1))[turn % 3]:
            os.kill(pids[rank], signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        with os.fdopen(reading, "rb") as pipe:
            published = [one[0] for one in struct.iter_unpack("<Q", pipe.read())]
        last = published[-1] if published else last
        if last:
            found = find_latest(root, key=KEY)
            assert_whole(found, last)
            assert found.checkpoint.manifest.step <= last + 1
            torn += any("incomplete" in one for one in found.skipped)
            last = found.checkpoint.manifest.step
    assert last > times / 4
    assert torn > 0, "no kill fell into a save, so nothing was tested"


# --- folders that many make at once --------------------------------------------------------------


def test_l71_eight_processes_that_make_the_same_folder_never_fail(folder: Path) -> None:
    """L71: only rank 0 makes the step's folder; the folder of checkpoints may be made by all."""
    forked = multiprocessing.get_context("fork")
    door = forked.Barrier(8)

    def make_all() -> None:
        for turn in range(200):
            root = folder / f"deep{turn}" / "run" / "checkpoints"
            door.wait(timeout=20)
            make_private_folder(root, exist_ok=True)
            assert root.stat().st_mode & 0o777 == 0o700

    makers = [forked.Process(target=make_all) for _ in range(8)]
    for one in makers:
        one.start()
    for one in makers:
        one.join()
    assert [one.exitcode for one in makers] == [0] * 8


def test_l71_the_ranks_of_one_job_share_one_folder(folder: Path) -> None:
    for step in range(1, 26):
        save_world(folder / "c", step, 8, keep=1)
        assert steps_in(folder / "c") == [f"step-{step}"]


def test_modes_are_private_under_any_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        save_world(tmp_path / "new" / "c", 1, 2)
        os.umask(0o777)
        write_file(tmp_path / "closed", [b"x"])
    finally:
        os.umask(old)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "closed").stat().st_mode & 0o777 == 0o600
    for one in (tmp_path / "new").rglob("*"):
        assert one.stat().st_mode & 0o777 == (0o700 if one.is_dir() else 0o600), one
