"""The six schedules, one small function each: who computes what, in which order.

Every generator returns one list of F, B and W for each rank. Notation in the docstrings: p ranks, v
chunks a rank, m microbatches; F, B, W the time of one forward, input gradient and weight gradient
of everything a *rank* owns (a chunk takes 1/v of it). *Bubble* is a rank's idle time in one step,
from the first forward on rank 0 to the last action anywhere, for m >= p and messages that take no
time. *Memory* is the peak number of live activations on the worst rank, counted in chunks: one is
live from its F until its W ends.

| schedule | bubble | F=B=W=1, p=4 | memory in chunks | of a rank's layers |
|---|---|---|---|---|
| gpipe | (p-1)(F+B+W) | 9 | m | m |
| 1f1b | (p-1)(F+B+W) | 9 | p | p |
| interleaved | (p-1)(F+B+W)/v | 4.5 (v=2) | (v-1)p + 2(p-1) + 1 | p + (p-1)/v |
| zb-h1 | (p-1)(F+B-W) | 3 | p | p |
| zb-v | (p-1)F/2, all before the first F | 1.5 | 2p | p |
| dualpipe-v | as zb-v | 1.5 | 2p + 1 | p + 1/2 |

The first three bubbles hold for any F, B and W. zb-h1's holds for W up to F and B; for any times it
is (p-1) max(F, B, F+B-W). The last two hold for F = B = W, and from m = 2p-1 on also for F = B and
W from F/2 to F. All this is tested.

How the last three are made: the published orders are kept for F and B only, and the weight
gradients, which nothing waits for, are laid into the gaps by one rule (`place_weights`). This gives
the published bubble at m >= 2p and less than the published order below that (p=4, m=4: 27 slots
instead of 30). Rejected: a greedy list scheduler for F, B and W together (zb-v at p=8, m=16: 10
slots of bubble instead of 7), and weights laid by measured times instead of equal ones (simulated
at F:B:W from 1:0.8:1.2 to 1:1.5:0.7 it is at best 1 % faster and at worst 10 % slower).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import MappingProxyType

from reparto.schedule.actions import Action, Op, Placement, Schedule
from reparto.schedule.rules import check_request
from reparto.schedule.weights import place_weights

Row = tuple[Action, ...]
Rows = tuple[Row, ...]


def generate(name: str, *, pipeline: int, chunks: int, num_microbatches: int) -> Schedule:
    """The schedule `name` for p=pipeline ranks, v=chunks and m=num_microbatches, not yet lowered.

    With one rank every schedule is plain gradient accumulation: F0 B0 W0 F1 B1 W1 ...
    Raises `UserError` for a request that `rules.check_request` refuses.
    """
    check_request(name, pipeline=pipeline, chunks=chunks, num_microbatches=num_microbatches)
    generator = _GENERATORS[name] if pipeline > 1 else accumulation
    return generator(name, pipeline, chunks, num_microbatches)


def accumulation(name: str, p: int, v: int, m: int) -> Schedule:
    """One rank: each microbatch goes forward through all chunks and comes straight back.

    Bubble: none. Memory: v chunks, one microbatch.
    """
    row: list[Action] = []
    for microbatch in range(m):
        row += (Action(stage, Op.F, microbatch) for stage in range(v))
        for stage in reversed(range(v)):
            row += _full_backward(stage, microbatch)
    return _schedule(name, p, v, m, (tuple(row),), fuse=True)


def gpipe(name: str, p: int, v: int, m: int) -> Schedule:
    """All forwards, then all backwards. Huang et al. 2019, GPipe, arXiv 1811.06965.

    Bubble (p-1)(F+B+W); memory m. Backwards run in ascending order, as in every other schedule
    here, so that gradients are summed in one order and stay bitwise equal between schedules.
    """

    def row(rank: int) -> Iterator[Action]:
        for microbatch in range(m):
            yield Action(rank, Op.F, microbatch)
        for microbatch in range(m):
            yield from _full_backward(rank, microbatch)

    return _schedule(name, p, v, m, _rows(p, row), fuse=True)


def one_f_one_b(name: str, p: int, v: int, m: int) -> Schedule:
    """One forward, one backward. Narayanan et al. 2019, PipeDream; with a flush as in Narayanan et
    al. 2021, arXiv 2104.04473, section 2.2.1.

    Rank r runs p-1-r forwards ahead, then alternates. Bubble (p-1)(F+B+W) as GPipe, but memory p-r.
    """
    return _schedule(name, p, v, m, _with_full_backward(_alternating(p, m)), fuse=True)


def interleaved(name: str, p: int, v: int, m: int) -> Schedule:
    """1F1B over v chunks a rank. Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2.

    Microbatches go in groups: a rank runs one chunk for the whole group, then its next chunk.
    Bubble (p-1)(F+B+W)/v for m >= p; memory, with G microbatches in the first group,
    (v-1)G + 2(p-1-r) + 1 chunks. v times the messages of 1F1B.

    The paper needs p to divide m and has groups of p. Here m is cut into floor(m/p) groups that
    differ by at most one, so that each has at least p microbatches: by the time a group comes round
    for its next chunk, the other ranks have passed its first microbatch on, and the bubble stays
    exactly the paper's for every m >= p. A short last group instead costs up to 11 slots at p=4 and
    deadlocks for p=5, m=7.
    """
    num_groups = max(1, m // p)
    starts = [m * group // num_groups for group in range(num_groups + 1)]
    largest = max(end - start for start, end in pairwise(starts))
    forwards: list[tuple[int, int]] = []  # (chunk, microbatch), the same order on every rank
    backwards: list[tuple[int, int]] = []
    for start, end in pairwise(starts):
        for chunk in range(v):
            forwards += ((chunk, microbatch) for microbatch in range(start, end))
        for chunk in reversed(range(v)):
            backwards += ((chunk, microbatch) for microbatch in range(start, end))

    def row(rank: int) -> Iterator[Action]:
        ahead = min(m * v, (v - 1) * largest + 2 * (p - 1 - rank))
        for chunk, microbatch in forwards[:ahead]:
            yield Action(chunk * p + rank, Op.F, microbatch)
        for turn, (chunk, microbatch) in enumerate(backwards):
            if ahead + turn < m * v:
                next_chunk, next_microbatch = forwards[ahead + turn]
                yield Action(next_chunk * p + rank, Op.F, next_microbatch)
            yield from _full_backward(chunk * p + rank, microbatch)

    return _schedule(name, p, v, m, _rows(p, row), fuse=True)


def zb_h1(name: str, p: int, v: int, m: int) -> Schedule:
    """1F1B with the weight gradients moved into the bubble. Qi et al. 2023, Zero Bubble Pipeline
    Parallelism, arXiv 2401.10241, section 2.

    The order of F and B is 1F1B's. A rank may hold p activations instead of p-r, so rank r puts r
    weight gradients off and does them while it would wait at the end.
    Bubble (p-1)(F+B-W); memory p, 1F1B's worst rank.
    """
    order = _schedule(name, p, v, m, _alternating(p, m), fuse=False)
    return place_weights(order, max_live=p)


def zb_v(name: str, p: int, v: int, m: int) -> Schedule:
    """Two chunks a rank, folded to a V. Qi et al. 2023, arXiv 2401.10241, section 6 (ZB-V).

    Rank r owns stage r on the way down and 2p-1-r on the way back, so the microbatch that has gone
    through rank r last returns to it first, and the loss is on rank 0. Once its first forward has
    come, no rank waits again (F=B=W, m >= 2p-1); the bubble that remains is the way of the first
    forward, (p-1)F/2. Memory 2p chunks, as much as 1F1B's p whole ranks.
    """

    def row(rank: int) -> Iterator[tuple[str, int]]:
        below = p - rank  # ranks from here to the turn, this one included
        yield "f", 2 * below - 1  # until the first one is back from the turn
        yield "Ff", rank  # until the first backward is back from the loss
        yield "FB", below
        yield "fbFB", padded - p
        yield "bB", rank
        yield "b", below

    padded = max(m, 2 * p - 1)
    order = _schedule(name, p, v, m, _folded(p, m, padded, row), fuse=False)
    return place_weights(order, max_live=2 * p)


def dualpipe_v(name: str, p: int, v: int, m: int) -> Schedule:
    """DualPipe cut in half. DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, in the V form of
    Sea AI Lab, 2025.

    The same V. In the steady state every forward stands beside a backward of the *other* chunk, so
    that an executor can hide the messages of one (all-to-all of experts) behind the computing of
    the other; that costs one more live activation than ZB-V: memory 2p+1 chunks.
    Published bubble, in chunks and with F&B one overlapped pair: (p-1)(F&B + B - 2W) where B is the
    input gradient. Without overlap (F&B = F+B+W) and with the weights laid into the gaps it is
    ZB-V's.
    """

    def row(rank: int) -> Iterator[tuple[str, int]]:
        ahead = p - 1 - rank  # ranks between here and the turn
        yield "f", 2 * ahead
        yield "fF", rank + 1
        yield "BF", ahead
        yield "fBFb", padded - p - ahead
        yield "BFb", ahead
        yield "Bb", rank + 1
        yield "b", ahead

    padded = max(m, 2 * p)
    order = _schedule(name, p, v, m, _folded(p, m, padded, row), fuse=False)
    return place_weights(order, max_live=2 * p + 1)


_GENERATORS: MappingProxyType[str, Callable[[str, int, int, int], Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zb-h1": zb_h1,
        "zb-v": zb_v,
        "dualpipe-v": dualpipe_v,
    }
)


def _schedule(name: str, p: int, v: int, m: int, rows: Rows, *, fuse: bool) -> Schedule:
    folded = name in ("zb-v", "dualpipe-v") and p > 1
    return Schedule(
        name=name,
        num_ranks=p,
        num_chunks=v,
        num_microbatches=m,
        placement=Placement.V if folded else Placement.LOOP,
        fuse_backward=fuse,
        ranks=rows,
    )


def _rows(p: int, row: Callable[[int], Iterator[Action]]) -> Rows:
    return tuple(tuple(row(rank)) for rank in range(p))


def _full_backward(stage: int, microbatch: int) -> Iterator[Action]:
    yield Action(stage, Op.B, microbatch)
    yield Action(stage, Op.W, microbatch)


def _with_full_backward(rows: Rows) -> Rows:
    """Every B followed by its W."""

    def row(rank: int) -> Iterator[Action]:
        for action in rows[rank]:
            yield action
            if action.op is Op.B:
                yield Action(action.pipeline_stage, Op.W, action.microbatch)

    return _rows(len(rows), row)


def _alternating(p: int, m: int) -> Rows:
    """F and B of 1F1B: rank r stays p-1-r forwards ahead of its backwards."""

    def row(rank: int) -> Iterator[Action]:
        ahead = min(m, p - 1 - rank)
        for microbatch in range(ahead):
            yield Action(rank, Op.F, microbatch)
        for microbatch in range(m):
            if ahead + microbatch < m:
                yield Action(rank, Op.F, ahead + microbatch)
            yield Action(rank, Op.B, microbatch)

    return _rows(p, row)


def _folded(
    p: int, m: int, padded: int, phases: Callable[[int], Iterator[tuple[str, int]]]
) -> Rows:
    """F and B of a V from its phases: (letters, times), `f b` the chunk before the turn, `F B` the
    one after it; each letter takes its next microbatch.

    The phases need at least `padded` microbatches. For fewer, the order for `padded` is written
    down and the microbatches from m on are left out: an order without some of its microbatches is
    still an order, so nothing can deadlock.
    """

    def row(rank: int) -> Iterator[Action]:
        meaning = {
            "f": (rank, Op.F),
            "b": (rank, Op.B),
            "F": (2 * p - 1 - rank, Op.F),
            "B": (2 * p - 1 - rank, Op.B),
        }
        counts = dict.fromkeys(meaning, 0)
        for letters, times in phases(rank):
            for letter in letters * times:
                stage, op = meaning[letter]
                if counts[letter] < m:
                    yield Action(stage, op, counts[letter])
                counts[letter] += 1
        assert min(counts.values()) >= padded, (rank, counts)

    return _rows(p, row)
