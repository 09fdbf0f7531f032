"""What `comm/shared.py` does beside the operations that `test_collectives.py` tries on it too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from collective_cases import fractions
from processes import Pool

from reparto.comm.mailbox import Blocks, Segment

#: group name -> its size
GROUPS = {"world": 4, "shard": 2}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("numel", "parts"), [(1, 1), (7, 3), (150_001, 4)])
def test_sums_in_a_buffer_are_made_in_rank_order_on_all(
    gloo: Pool, group: str, dtype: str, numel: int, parts: int
) -> None:
    values = gloo.run("buffer_sums", over="shared", group=group, dtype=dtype, numel=numel,
                      parts=parts)  # fmt: skip
    expected: list[object] = [True]
    for turn in range(2):
        total = fractions(turn, (numel,), dtype).clone()
        for member in range(1, GROUPS[group]):
            total += fractions(member + turn, (numel,), dtype)
        expected.append(total.tolist())
    assert all(value == expected for value in values)


def test_gloo_gives_plain_memory_for_a_buffer(gloo: Pool) -> None:
    values = gloo.run("buffer_sums", group="shard", dtype="float64", numel=9, parts=2)
    total = fractions(0, (9,), "float64") + fractions(1, (9,), "float64")
    assert all(isinstance(value, list) and value[1] == total.tolist() for value in values)


def test_a_sender_of_more_than_a_box_holds_waits_and_nothing_is_lost(gloo: Pool) -> None:
    values = gloo.run("unread_messages", over="shared", number=700)
    assert values[1] == values[3] == [float(value) for value in range(700)]


def test_lanes_can_be_waited_for_in_opposite_orders(gloo: Pool) -> None:
    assert gloo.run("crossed_waits", over="shared") == [[[3.0, 3.0], [21.0, 21.0]]] * 4


@pytest.mark.parametrize(
    ("how", "words"),
    [("size", ["all_reduce of 16 bytes", "all_reduce of 20 bytes"]),
     ("operation", ["all_reduce of 16 bytes", "all_gather of 16 bytes"])],
)  # fmt: skip
def test_ranks_that_do_different_things_are_told_both(
    how: str, words: list[str], tmp_path: Path
) -> None:
    pool = Pool(4, tmp_path)  # its own: the group is of no use afterwards
    try:
        for value in pool.run("different_things", over="shared", how=how):
            assert isinstance(value, str)
            assert "step 4" in value and "group `replicas`" in value
            assert all(one in value for one in words), value
    finally:
        pool.close()


_DIES = """
import os, sys, time
import torch
from reparto.comm.backend import file_store
from reparto.comm.shared import Host
rank = int(sys.argv[1])
host = Host(file_store(sys.argv[2], 2), rank=rank, world_size=2, timeout_s=float(sys.argv[3]))
one = host.transport((0, 1), "")
print(os.getpid(), flush=True)
if rank:
    one.send(torch.ones(2), to=0)
    time.sleep(60)
got = torch.zeros(2)
one.recv(got, source=1).wait()  # sent before the end: it still counts
print(got.tolist(), flush=True)
try:
    one.all_reduce(torch.ones(2), op="sum").wait()
except RuntimeError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("sent", "timeout", "words"),
    [(signal.SIGKILL, "60", "rank 1 has ended"),
     (signal.SIGSTOP, "1", "rank 1 has not come within 1 s")],
)  # fmt: skip
def test_a_dead_or_stopped_peer_is_named(
    sent: signal.Signals, timeout: str, words: str, tmp_path: Path
) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", _DIES, str(rank), str(tmp_path / "store"), timeout],
                         stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        told = [one.stdout for one in ranks]
        assert told[0] is not None and told[1] is not None
        for lines, one in zip(told, ranks, strict=True):
            assert int(lines.readline()) == one.pid
        assert told[0].readline() == "[1.0, 1.0]\n"
        os.kill(ranks[1].pid, sent)
        began = time.monotonic()
        assert told[0].readline().strip() == words
        assert time.monotonic() - began < 30, "not before the time-out of 60 s"
        assert ranks[0].wait(30) == 0
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def test_blocks_are_used_again_when_all_have_read() -> None:
    blocks = Blocks()
    first = blocks.take(100_000, readers=2)
    blocks.read(first)
    assert blocks.take(100_000, readers=1) is not first
    blocks.read(first)
    assert blocks.take(90_000, readers=1) is first
    blocks.read(first)
    assert blocks.take(50_000, readers=1) is first
    blocks.read(first)
    assert blocks.take(1_000_000, readers=1) is not first, "too small"


def test_a_segment_is_seen_by_another_mapping_and_has_no_name() -> None:
    segment = Segment.create(5000)
    assert segment.nbytes == 2 * Segment.PAGE
    other = Segment.of(os.getpid(), segment.descriptor, segment.nbytes)
    segment.tensor(torch.float64, 16, 8).copy_(torch.tensor([1.5, -2.0]))
    assert other.tensor(torch.float64, 24).tolist() == [0.0, 1.5, -2.0]
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{segment.descriptor}")
    with pytest.raises(OSError, match="another size"):
        Segment.of(os.getpid(), segment.descriptor, Segment.PAGE)
