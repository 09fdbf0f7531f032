"""What `lower` inserts and where; messages that match by position alone; a run with threads."""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reparto.errors import CheckFailed
from reparto.schedule.actions import (
    COMPUTE_OPS,
    RECV_OPS,
    SEND_OPS,
    Action,
    Op,
    Placement,
    Schedule,
)
from reparto.schedule.generate import generate
from reparto.schedule.lower import lower
from reparto.schedule.rules import NAMES, default_chunks, legal_chunks


def made(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    return generate(name, pipeline=p, chunks=v or default_chunks(name), num_microbatches=m)


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.ranks]


def by_hand(*rows: str, placement: Placement = Placement.LOOP, chunks: int = 1) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    m = 1 + max(action.microbatch for row in actions for action in row)
    return Schedule(
        name="by hand",
        num_ranks=len(rows),
        num_chunks=chunks,
        num_microbatches=m,
        placement=placement,
        fuse_backward=False,
        ranks=actions,
    )


def test_1f1b_over_two_ranks_word_by_word() -> None:
    assert text(lower(made("1f1b", 2, 2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0W0 0RECV_B1 0B1 0W1 0REDUCE",
        "1RECV_F0 1F0 1B0 1W0 1SEND_B0 1RECV_F1 1F1 1B1 1W1 1SEND_B1 1REDUCE",
    ]


def test_a_zero_bubble_gradient_leaves_before_the_weight_gradient() -> None:
    rows = text(lower(made("zb-h1", 2, 2)))
    assert rows[1] == ("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1W0 1W1 1REDUCE")


def test_no_message_at_the_turn_of_a_v() -> None:
    lowered = lower(made("zb-v", 3, 4))
    messages = {
        (action.op, action.pipeline_stage)
        for action in lowered.ranks[2]
        if action.op in SEND_OPS | RECV_OPS
    }
    # rank 2 owns stages 2 and 3: nothing between these two, everything to 1 and 4
    assert messages == {
        (Op.RECV_F, 2),
        (Op.SEND_B, 2),
        (Op.SEND_F, 3),
        (Op.RECV_B, 3),
    }


def test_parameters_are_whole_from_the_first_to_the_last_action_of_a_stage() -> None:
    assert text(lower(made("1f1b", 2, 1), shard_parameters=True)) == [
        "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0W0 0REDUCE 0RESHARD",
        "1UNSHARD 1RECV_F0 1F0 1B0 1W0 1SEND_B0 1REDUCE 1RESHARD",
    ]


def test_reducing_every_microbatch_or_once() -> None:
    schedule = made("zb-v", 2, 3)
    for row in lower(schedule).ranks:
        reduces = [action for action in row if action.op is Op.REDUCE]
        assert sorted(str(action) for action in reduces) == sorted(
            f"{stage}REDUCE" for stage in {action.pipeline_stage for action in row}
        )
    for row in lower(schedule, gradient_sync="microbatch").ranks:
        for action, after in pairwise(row):
            if action.op is Op.W:
                assert after == Action(action.pipeline_stage, Op.REDUCE, action.microbatch)


def test_receives_of_one_channel_stand_in_the_order_of_its_sender() -> None:
    """Rank 0 sends microbatch 0 first, rank 1 wants 1 first: it must take 0 out of the way."""
    lowered = lower(by_hand("0F0 0F1 0B1 0W1 0B0 0W0", "1F1 1F0 1B1 1W1 1B0 1W0"))
    assert text(lowered)[1].startswith("1RECV_F0 1RECV_F1 1F1 1F0 1B1 ")


def test_both_kinds_of_message_on_one_channel() -> None:
    """Two ranks, two chunks: rank 1 sends activations of stage 1 and gradients of stages 1 and 3,
    all to rank 0; rank 0 must receive exactly in that order."""
    lowered = lower(made("interleaved", 2, 3))
    sent = [a for a in lowered.ranks[1] if a.op in SEND_OPS]
    received = [a for a in lowered.ranks[0] if a.op in RECV_OPS]
    assert len({action.op for action in sent}) == 2
    assert [(a.peer_stage, a.microbatch) for a in sent] == [
        (a.pipeline_stage, a.microbatch) for a in received
    ]


def channels(schedule: Schedule) -> dict[tuple[int, int], tuple[list[str], list[str]]]:
    """(source, destination) -> (sent, received), each message named by what it is."""
    found: dict[tuple[int, int], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if action.op not in SEND_OPS | RECV_OPS:
                continue
            peer = schedule.owner(action.peer_stage)
            kind = action.op.value[-1]
            sends = action.op in SEND_OPS
            source = action.pipeline_stage if sends else action.peer_stage
            message = f"{kind}{source}.{action.microbatch}"
            if sends:
                found[rank, peer][0].append(message)
            else:
                found[peer, rank][1].append(message)
    return found


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 20), st.integers(2, 4))
def test_messages_match_by_position_on_every_channel(name: str, p: int, m: int, v: int) -> None:
    schedule = made(name, p, m, legal_chunks(name).nearest(v))
    lowered = lower(schedule, shard_parameters=True)
    for (source, destination), (sent, received) in channels(lowered).items():
        assert source != destination
        assert sent == received
    for before, after in zip(schedule.ranks, lowered.ranks, strict=True):
        assert tuple(action for action in after if action.op in COMPUTE_OPS) == before
        counts = Counter(action.op for action in after)
        stages = len({action.pipeline_stage for action in before})
        assert counts[Op.UNSHARD] == counts[Op.RESHARD] == counts[Op.REDUCE] == stages


def test_lowering_again_with_other_options() -> None:
    schedule = made("dualpipe-v", 3, 5)
    first = lower(schedule, shard_parameters=True, gradient_sync="microbatch")
    assert lower(first) == lower(schedule)
    assert not schedule.lowered
    assert first.lowered


def test_a_message_that_nothing_uses_is_refused() -> None:
    with pytest.raises(CheckFailed, match="nothing uses the message 1RECV_F1"):
        lower(by_hand("0F0 0B0 0W0 0F1 0B1 0W1", "1F0 1B0 1W0 1B1 1W1"))


# an executor in a few lines: threads, channels that keep order and carry no names


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (4, 1), (4, 3), (4, 9)])
def test_threads_with_nameless_channels_compute_the_right_sums(name: str, p: int, m: int) -> None:
    """Stage s multiplies by s + 2, so the derivative is the product of all factors, and stage s's
    weight gradient is the sum over microbatches of (input x gradient of the output)."""
    lowered = lower(made(name, p, m))
    stages = range(lowered.num_stages)
    pipes: dict[tuple[int, int], queue.Queue[int]] = defaultdict(queue.Queue)
    pairs = [(a, b) for a in range(p) for b in range(p)]
    pipes.update({pair: queue.Queue() for pair in pairs})
    weight_gradients = dict.fromkeys(stages, 0)
    reduced: list[int] = []

    def run(rank: int) -> None:
        inputs: dict[tuple[int, int], int] = {(0, k): k + 1 for k in range(m)}
        gradients: dict[tuple[int, int], int] = {(stages[-1], k): 1 for k in range(m)}
        out: dict[tuple[int, int], int] = {}
        back: dict[tuple[int, int], int] = {}
        for action in lowered.ranks[rank]:
            s, k = action.pipeline_stage, action.microbatch
            if action.op is Op.F:
                out[s, k] = inputs[s, k] * (s + 2)
                inputs[s + 1, k] = out[s, k]  # for a neighbour on the same rank
            elif action.op is Op.B:
                back[s, k] = gradients[s, k] * (s + 2)
                gradients[s - 1, k] = back[s, k]
            elif action.op is Op.W:
                weight_gradients[s] += inputs[s, k] * gradients[s, k]
            elif action.op is Op.REDUCE:
                reduced.append(s)
            else:
                peer = lowered.owner(action.peer_stage)
                if action.op is Op.SEND_F:
                    pipes[rank, peer].put(out[s, k])
                elif action.op is Op.SEND_B:
                    pipes[rank, peer].put(back[s, k])
                elif action.op is Op.RECV_F:
                    inputs[s, k] = pipes[peer, rank].get(timeout=20)
                else:
                    gradients[s, k] = pipes[peer, rank].get(timeout=20)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(p)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    factors = [s + 2 for s in stages]
    product = 1
    for factor in factors:
        product *= factor
    total = sum(range(1, m + 1))
    assert weight_gradients == {s: total * product // factors[s] for s in stages}
    assert sorted(reduced) == list(stages)
