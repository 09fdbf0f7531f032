"""From what is computed to what is executed: messages, parameter gathers and gradient reductions.

`lower` keeps the order of F, B and W and inserts around it. The executor runs exactly this list,
`check` proves it and `timing` simulates it.

Note: the order of messages
    A *channel* is one direction between one pair of ranks. Both kinds of message may share it (with
    two ranks and two chunks, activations and gradients both go from rank 1 to rank 0). A channel
    delivers in order and knows no tags. Two rules make that safe:

    1. SEND directly after the action that made the message; it never waits (asynchronous).
    2. RECVs of one channel stand in the sender's order, each as late as that order allows: directly
       before the action that uses the message, or before the one that uses a later message of the
       same channel, if that comes first.

    So messages match by position alone. Rule 2 cannot block anything that could run: when a RECV
    stands early, a later message of its channel is needed right there, and that one cannot arrive
    before it anyway. Hence the lowered list can run if and only if the order of F, B and W can.
    Every RECV being in the list, an executor may *post* several ahead (prefetch) without changing
    any order. Rejected: posting every RECV as early as possible in the list itself, which would
    hide from the simulator where a rank really waits.

Note: full backwards
    With `fuse_backward`, SEND_B of a B that is directly followed by its W stands after the W.
    Then, in every lowered list, "B directly followed by its W" means one full backward, which
    autograd does faster than two halves; and where the previous rank waits for the gradient under a
    zero-bubble schedule, SEND_B stands between the two and keeps them apart.

Note: parameters and gradients
    UNSHARD stands before the first action of a stage and before the RECV that it waits for, so that
    the gather runs during the wait; RESHARD after its last. A stage stays gathered in between:
    gathering for every microbatch would cost num_microbatches times the bytes. REDUCE stands as
    soon as the gradients of a stage are final: after its last W, or after each W with
    gradient_sync="microbatch", where `REDUCE` carries the microbatch. All data ranks of one stage
    run the same list, so their collectives meet in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from reparto.errors import CheckFailed
from reparto.schedule.actions import COMPUTE_OPS, Action, Op, Schedule

GradientSync = Literal["step", "microbatch"]
Row = tuple[Action, ...]
_RECV_OF = MappingProxyType({Op.F: Op.RECV_F, Op.B: Op.RECV_B})  # what brings an op its input


def lower(
    schedule: Schedule,
    *,
    shard_parameters: bool = False,
    gradient_sync: GradientSync = "step",
) -> Schedule:
    """`schedule` with SEND, RECV, UNSHARD, RESHARD and REDUCE in place.

    What an earlier `lower` inserted is dropped first, so a schedule can be lowered again with other
    options. Messages between stages of one rank are none: there the tensor is handed over.
    Raises `CheckFailed` when a message has no action that uses it (`check` says more).
    """
    rows = [tuple(a for a in row if a.op in COMPUTE_OPS) for row in schedule.ranks]
    sends = [_sends(schedule, row) for row in rows]
    recvs = _recvs(schedule, rows, sends)
    lowered = [
        _merge(row, sends[rank], recvs[rank], shard_parameters, gradient_sync == "microbatch")
        for rank, row in enumerate(rows)
    ]
    return replace(schedule, ranks=tuple(map(tuple, lowered)))


def _sends(schedule: Schedule, row: Row) -> dict[int, Action]:
    """Position in `row` -> the SEND that follows the action there."""
    owner = schedule.owners
    last_stage = schedule.num_stages - 1
    sends: dict[int, Action] = {}
    for position, action in enumerate(row):
        stage, op, microbatch = action.pipeline_stage, action.op, action.microbatch
        if op is Op.F and stage < last_stage and owner[stage + 1] != owner[stage]:
            sends[position] = Action(stage, Op.SEND_F, microbatch)
        elif op is Op.B and stage > 0 and owner[stage - 1] != owner[stage]:
            fused = schedule.fuse_backward and _followed_by_its_weight(row, position)
            sends[position + fused] = Action(stage, Op.SEND_B, microbatch)
    return sends


def _followed_by_its_weight(row: Row, position: int) -> bool:
    action, following = row[position], row[position + 1 : position + 2]
    return following == (Action(action.pipeline_stage, Op.W, action.microbatch),)


def _recvs(
    schedule: Schedule, rows: list[Row], sends: list[dict[int, Action]]
) -> list[dict[int, list[Action]]]:
    """For each rank: position in its row -> the RECVs that stand before the action there."""
    inbound: list[dict[int, list[Action]]] = [defaultdict(list) for _ in rows]
    for source, outbound in enumerate(sends):
        for _, send in sorted(outbound.items()):
            op = Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B
            recv = Action(send.peer_stage, op, send.microbatch)
            inbound[schedule.owners[recv.pipeline_stage]][source].append(recv)
    return [_placed(row, inbound[rank], rank) for rank, row in enumerate(rows)]


def _placed(row: Row, inbound: dict[int, list[Action]], rank: int) -> dict[int, list[Action]]:
    """Rule 2 of the note for one rank; `inbound` is source rank -> RECVs in the sender's order."""
    uses: dict[Op, dict[tuple[int, int], int]] = {Op.RECV_F: {}, Op.RECV_B: {}}
    for position, action in enumerate(row):
        if action.op in _RECV_OF:
            uses[_RECV_OF[action.op]][action.pipeline_stage, action.microbatch] = position
    placed: dict[int, list[Action]] = defaultdict(list)
    for _, recvs in sorted(inbound.items()):
        place = len(row)
        for recv in reversed(recvs):
            use = uses[recv.op].get((recv.pipeline_stage, recv.microbatch))
            if use is None:
                raise CheckFailed(f"rank {rank}: nothing uses the message {recv}")
            place = min(place, use)
            placed[place].append(recv)
    # every channel was walked backwards: turn its messages into the sender's order again
    return {place: recvs[::-1] for place, recvs in placed.items()}


def _merge(
    row: Row,
    sends: dict[int, Action],
    recvs: dict[int, list[Action]],
    shard_parameters: bool,
    every_microbatch: bool,
) -> list[Action]:
    left = Counter(action.pipeline_stage for action in row)
    weights_left = Counter(action.pipeline_stage for action in row if action.op is Op.W)
    unsharded: set[int] = set()
    merged: list[Action] = []
    for position, action in enumerate(row):
        stage = action.pipeline_stage
        if shard_parameters and stage not in unsharded:
            unsharded.add(stage)
            merged.append(Action(stage, Op.UNSHARD))
        merged += recvs.get(position, ())
        merged.append(action)
        if position in sends:
            merged.append(sends[position])
        if action.op is Op.W:
            weights_left[stage] -= 1
            if every_microbatch:
                merged.append(Action(stage, Op.REDUCE, action.microbatch))
            elif weights_left[stage] == 0:
                merged.append(Action(stage, Op.REDUCE))
        left[stage] -= 1
        if shard_parameters and left[stage] == 0:
            merged.append(Action(stage, Op.RESHARD))
    return merged
