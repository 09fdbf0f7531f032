"""Bytes by group and link out of a record; ranks dealt out to hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reparto.comm.traffic import Traffic, over_ranks, traffic
from reparto.recover.nodes import placed_rank
from reparto.trace import Collective, Kind, Ring

GROUPS = {1: ("tensor", "memory"), 2: ("pipeline", "network")}


def _send(ring: Ring, group: int, size: int, tag: str = "x") -> None:
    ring.end(ring.start(Kind.COLLECTIVE, tag, op=Collective.SEND, group=group, payload_bytes=size))


def test_bytes_are_means_over_training_steps() -> None:
    """Two steps; what happens before them, in an evaluation, a save or at the end counts not."""
    ring = Ring(None, rank=0, capacity=64)
    _send(ring, 2, 1_000_000)  # step 0: start
    for step in (1, 2):
        ring.set_step(step)
        _send(ring, 1, 10)
        _send(ring, 1, 30 * step)
        _send(ring, 2, 8)
    with ring.span(Kind.EVALUATE, "validation"):
        _send(ring, 2, 1_000_000)
    with ring.span(Kind.SAVE, "step-2"):
        _send(ring, 2, 1_000_000)
    _send(ring, 2, 1_000_000, tag="end")
    assert traffic(ring.records(), GROUPS) == [
        Traffic(group="tensor", link="memory", messages=2.0, payload_bytes=(40 + 70) / 2),
        Traffic(group="pipeline", link="network", messages=1.0, payload_bytes=8.0),
    ]


def test_a_step_that_was_partly_overwritten_does_not_count() -> None:
    ring = Ring(None, rank=0, capacity=5)
    for step in (1, 2, 3):
        ring.set_step(step)
        for _ in range(3):
            _send(ring, 1, step)
    assert traffic(ring.records(), GROUPS) == [
        Traffic(group="tensor", link="memory", messages=3.0, payload_bytes=9.0)
    ]


def test_nothing_was_sent() -> None:
    assert traffic([], GROUPS) == []


def test_ranks_are_summed_by_group_and_link() -> None:
    """One tensor group within a host, another across: two rows, not one."""
    near = Traffic(group="tensor", link="memory", messages=2, payload_bytes=5)
    far = Traffic(group="tensor", link="network", messages=1, payload_bytes=7)
    assert over_ranks([[near], [near, far]]) == [
        Traffic(group="tensor", link="memory", messages=4, payload_bytes=10),
        far,
    ]


@given(nodes=st.integers(1, 5), local=st.integers(1, 6))
def test_every_rank_has_one_seat(nodes: int, local: int) -> None:
    seats = range(nodes * local)
    for placement in ("block", "cyclic"):
        placed = [
            placed_rank(seat, local_world_size=local, nodes=nodes, placement=placement)
            for seat in seats
        ]
        assert sorted(placed) == list(seats)
        if placement == "block":
            assert placed == list(seats)
    # cyclic: neighbours in rank are on neighbouring hosts
    assert [
        placed_rank(node * local, local_world_size=local, nodes=nodes, placement="cyclic")
        for node in range(nodes)
    ] == list(range(nodes))
