"""Saving in the background: what is stored, who waits, what is said when it fails."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.checkpoint_worlds import (
    KEY,
    RUN,
    Meeting,
    all_good,
    model,
    ranks,
    shared_out,
    snapshot,
    steps_in,
)

from reparto.checkpoint.background import BackgroundSaver, Started
from reparto.checkpoint.exchange import Exchange
from reparto.checkpoint.load import find_latest, open_checkpoint
from reparto.checkpoint.save import SaveFailed, Saver, SaveReport
from reparto.checkpoint.snapshot import Contribution, Piece
from reparto.partition.tensors import Rectangle


class Slow(Saver):
    """Publishes only after `go` is set."""

    def hold(self) -> threading.Event:
        self.go = threading.Event()
        return self.go

    def publish(self, part: Contribution) -> SaveReport:
        assert self.go.wait(timeout=20)
        return super().publish(part)


def slow(root: Path, **more: object) -> tuple[Slow, threading.Event]:
    saver = Slow(root, run=RUN, key=KEY, **more)  # type: ignore[arg-type]
    return saver, saver.hold()


def one_piece(tensor: torch.Tensor) -> list[Piece]:
    shape = tuple(tensor.shape)
    return [Piece(name="w", shape=shape, rectangle=Rectangle.whole(shape), tensor=tensor)]


def test_l69_what_changes_after_the_call_is_not_stored(tmp_path: Path) -> None:
    """L69: tensors, state and values of the rank are as they were when `save` was called."""
    saver, go = slow(tmp_path / "c")
    tensor = torch.full((300, 7), 1.0)
    state: dict[str, object] = {"position": [1]}
    own = {"seed": {"a": 1}}
    with BackgroundSaver(saver) as background:
        background.save(snapshot(1, one_piece(tensor), state=state, per_rank=own))
        tensor.mul_(5)
        state["position"].append(2)  # type: ignore[attr-defined]
        own["seed"]["a"] = 2
        assert background.busy and background.reports() == []
        go.set()
    checkpoint = find_latest(tmp_path / "c", key=KEY).checkpoint
    assert torch.equal(checkpoint.read("w"), torch.full((300, 7), 1.0))
    assert checkpoint.manifest.state == {"position": [1]}
    assert checkpoint.for_rank(0, 1) == {"seed": {"a": 1}}


def test_the_buffer_is_kept_and_later_saves_are_right(tmp_path: Path) -> None:
    background = BackgroundSaver(Saver(tmp_path / "c", run=RUN, key=KEY))
    pieces = {step: shared_out(model(step), 1)[0] for step in (1, 2, 3)}
    background.reserve(snapshot(1, pieces[1]))
    buffer = background._buffer
    for step, own in pieces.items():
        started = background.save(snapshot(step, own))
        assert started.step == step and started.skipped_for is None
        assert background._buffer is buffer
    reports = background.finish()
    assert [one.step for one in reports] == [1, 2, 3] and background.finish() == []
    for step in pieces:
        checkpoint = open_checkpoint(tmp_path / "c" / f"step-{step}", KEY)
        for name, tensor in model(step).items():
            assert torch.equal(checkpoint.read(name), tensor)


def test_the_file_is_the_same_as_that_of_a_save_in_the_foreground(tmp_path: Path) -> None:
    own = snapshot(1, shared_out(model(1), 1)[0])
    Saver(tmp_path / "a", run=RUN, key=KEY).save(own)
    with BackgroundSaver(Saver(tmp_path / "b", run=RUN, key=KEY)) as background:
        background.save(own)
    for name in ("manifest.json", "rank-00000.safetensors"):
        both = [(tmp_path / side / "step-1" / name).read_bytes() for side in "ab"]
        assert both[0] == both[1]


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    saver, go = slow(tmp_path / "c")
    background = BackgroundSaver(saver, when_busy="wait")
    background.save(snapshot(1, one_piece(torch.ones(5))))
    threading.Timer(0.2, go.set).start()
    started = background.save(snapshot(2, one_piece(torch.ones(5))))
    assert started.waited_s > 0.05 and started.skipped_for is None
    background.finish()
    assert steps_in(tmp_path / "c") == ["step-1", "step-2"]


def test_b4_44_a_second_save_is_left_out_by_all_ranks_alike(tmp_path: Path) -> None:
    """Rank 0 is done and rank 1 still writes: both leave the second one out, and say for which."""
    writing, agreeing = Meeting(2), Meeting(2)
    gate = threading.Event()

    def work(rank: int, _: Exchange) -> list[Started]:
        saver, go = slow(
            tmp_path / "c", rank=rank, exchange=writing.exchange_of(rank)
        )  # fmt: skip
        background = BackgroundSaver(
            saver, when_busy="skip", agree=agreeing.exchange_of(rank)
        )  # fmt: skip
        shares = shared_out(model(400), 2)
        done = [background.save(snapshot(400, shares[rank]))]
        if rank == 0:
            go.set()
        done.append(background.save(snapshot(500, shares[rank])))
        gate.set()
        go.set()
        while background.busy:
            time.sleep(0.01)
        done.append(background.save(snapshot(600, shares[rank])))
        background.finish()
        return done

    # rank 0 may be done with its own part before rank 1 is: `busy` differs, the answer must not
    for done in all_good(ranks(2, work)):
        assert [one.skipped_for for one in done[:2]] == [None, 400]
        assert done[2].skipped_for in (None, 400)
    assert "step-400" in steps_in(tmp_path / "c")
    assert "step-500" not in steps_in(tmp_path / "c")


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failure_is_raised_by_the_next_call_on_all_ranks(
    when_busy: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    full = threading.Event()
    full.set()

    def fsync(descriptor: int) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    writing = Meeting(world_size)

    def work(rank: int, agree: Exchange) -> str:
        saver = Saver(
            tmp_path / "c", run=RUN, key=KEY, rank=rank, exchange=writing.exchange_of(rank)
        )
        background = BackgroundSaver(saver, when_busy=when_busy, agree=agree)  # type: ignore[arg-type]
        own = shared_out(model(1), world_size)[rank]
        background.save(snapshot(1, own))
        while background.busy:
            time.sleep(0.01)
        assert background.reports() == []
        with pytest.raises(SaveFailed, match="No space left on device") as caught:
            background.save(snapshot(2, own))
        full.clear()
        agree(b"space is there again")
        background.save(snapshot(3, own))  # the failure has been told once; saving goes on
        background.finish()
        return str(caught.value)

    told = all_good(ranks(world_size, work))
    assert len(set(told)) == 1 and "step 1 was not saved" in told[0]
    assert steps_in(tmp_path / "c") == ["step-3"]


def test_finish_raises_what_failed_and_an_error_of_the_caller_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, go = slow(tmp_path / "c")
    monkeypatch.setattr(Saver, "publish", lambda self, part: 1 / 0)
    go.set()
    background = BackgroundSaver(saver)
    background.save(snapshot(1, one_piece(torch.ones(1))))
    with pytest.raises(ZeroDivisionError):
        background.finish()
    with pytest.raises(KeyError), BackgroundSaver(saver) as other:
        other.save(snapshot(1, one_piece(torch.ones(1))))
        raise KeyError


def test_a_fault_of_the_snapshot_is_told_by_all_ranks(tmp_path: Path) -> None:
    writing = Meeting(2)

    def work(rank: int, agree: Exchange) -> str:
        saver = Saver(
            tmp_path / "c", run=RUN, key=KEY, rank=rank, exchange=writing.exchange_of(rank)
        )
        background = BackgroundSaver(saver)
        wrong = one_piece(torch.ones(3)) * (1 + rank)  # rank 1 gives the same piece twice
        background.save(snapshot(1, wrong))
        with pytest.raises(SaveFailed, match="rank 1: two pieces of w") as caught:
            background.finish()
        return str(caught.value)

    assert len(set(all_good(ranks(2, work)))) == 1


def test_the_writing_thread_gives_way_to_the_step(tmp_path: Path) -> None:
    seen: list[int] = []

    class Looks(Saver):
        def publish(self, part: Contribution) -> SaveReport:
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().publish(part)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    with BackgroundSaver(Looks(tmp_path / "c", run=RUN, key=KEY)) as background:
        background.save(snapshot(1, one_piece(torch.ones(1))))
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    assert seen == [min(19, before + 10)]
