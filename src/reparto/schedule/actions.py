"""A pipeline schedule as a value: for each rank, the list of what it does, in order.

An `Action` says *what* (`op`) happens for *which* virtual stage and microbatch: `2F0` is the
forward of stage 2 on microbatch 0. A `Schedule` is one list of actions for each rank. Everything
else in this room reads or writes these lists: one executor runs them and one simulator times them,
so a predicted and a measured timeline line up row by row.

Cost: the whole list exists at once (64 stages x 512 microbatches: 98,304 computing actions, about
10 MB). Rejected: one Python loop per schedule, which interleaves computing with communication and
can be neither drawn, checked nor timed without running it.

Words: a *virtual stage* (`pipeline_stage` of an action) is one chunk of consecutive layers,
numbered 0 .. num_ranks * num_chunks - 1 in the order in which a microbatch meets them. A rank is a
position on the pipeline axis and owns `num_chunks` virtual stages.

| op | text | does | needs |
|---|---|---|---|
| F | `2F0` | forward of stage 2 on microbatch 0 | `1F0` |
| B | `2B0` | gradient of the stage's input | `2F0`, `3B0` |
| W | `2W0` | gradient of the stage's weights | `2B0` |
| SEND_F | `2SEND_F0` | output of stage 2 leaves for the owner of stage 3 | `2F0` |
| RECV_F | `3RECV_F0` | the same message arrives, input of `3F0` | `2SEND_F0` |
| SEND_B | `3SEND_B0` | input gradient of stage 3 leaves for the owner of stage 2 | `3B0` |
| RECV_B | `2RECV_B0` | the same message arrives, input of `2B0` | `3SEND_B0` |
| UNSHARD | `2UNSHARD` | gathers the full parameters of stage 2 | |
| RESHARD | `2RESHARD` | frees them again | last action of stage 2 |
| REDUCE | `2REDUCE`, `2REDUCE0` | gradients of stage 2 meet across data ranks | last `2W`; `2W0` |

Messages carry their direction in the op (`_F` activations to the next stage, `_B` gradients to the
previous one), so that an action stays three fields and its peer follows: `Action.peer_stage`.
`pipeline_stage` is always a stage of the rank that executes the action.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from reparto.errors import UserError

#: the microbatch of an action that belongs to the whole step
WHOLE_STEP = -1


class Op(enum.StrEnum):
    """What an action does; see the table in the module docstring."""

    F = "F"
    B = "B"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"

    # Enum hashes through a Python call; actions are dictionary keys in every inner loop here
    __hash__ = str.__hash__


#: what `generate` emits; the other ops are inserted by `lower`
COMPUTE_OPS = frozenset({Op.F, Op.B, Op.W})
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B})
RECV_OPS = frozenset({Op.RECV_F, Op.RECV_B})
_TO_NEXT = frozenset({Op.SEND_F, Op.RECV_B})
#: what belongs to a stage, not to a microbatch; REDUCE may name one
WHOLE_STAGE_OPS = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE})
_ACTION = re.compile(r"([0-9]+)(" + "|".join(sorted(Op, key=len, reverse=True)) + r")([0-9]*)")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing one rank does. Text form `2F0`; `str()` and `parse` are inverse."""

    pipeline_stage: int
    """Virtual stage, 0 .. num_stages - 1, owned by the rank that executes the action."""
    op: Op
    """What is done."""
    microbatch: int = WHOLE_STEP
    """0 .. num_microbatches - 1, or `WHOLE_STEP` for UNSHARD, RESHARD and a REDUCE per step."""

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == WHOLE_STEP else self.microbatch
        return f"{self.pipeline_stage}{self.op.value}{microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """`"2F0"` -> `Action(2, Op.F, 0)`. Raises `UserError` on anything else."""
        found = _ACTION.fullmatch(text)
        if found is not None:
            op = Op(found[2])
            if found[3] or op in WHOLE_STAGE_OPS:
                return cls(int(found[1]), op, int(found[3]) if found[3] else WHOLE_STEP)
        raise UserError(
            f"{text!r} is not an action",
            where="schedule text",
            legal="stage, op, microbatch, as in 2F0, 2B0, 2W0, 2SEND_F0, 2RECV_B0, 2REDUCE",
        )

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a SEND or RECV; its owner is the peer rank."""
        assert self.op in SEND_OPS or self.op in RECV_OPS, f"{self} is no message"
        return self.pipeline_stage + (1 if self.op in _TO_NEXT else -1)


class Placement(enum.StrEnum):
    """Which rank owns which virtual stage.

    LOOP  stage s on rank s mod p: 0 1 2 3 0 1 2 3. Every neighbour is on another rank.
    V     every second pass runs backwards: 0 1 2 3 3 2 1 0. The turn stays on one rank, and the
          first and last stage share rank 0, so a tied embedding and head need no message.
    """

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What every rank of a pipeline does in one optimizer step, in order."""

    name: str
    """gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipe-v; another name for a list of your own."""
    num_ranks: int
    """p: positions on the pipeline axis."""
    num_chunks: int
    """v: virtual stages of each rank."""
    num_microbatches: int
    """m: microbatches of one step; also the number of gradient accumulations."""
    placement: Placement
    """Which rank owns which virtual stage."""
    fuse_backward: bool
    """True: a B directly followed by its W is one full backward, and its gradient leaves after W.
    False: the gradient leaves right after B, so that the previous stage need not wait for W."""
    ranks: tuple[tuple[Action, ...], ...]
    """One list of actions for each rank, in order of execution."""

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline, p * v."""
        return self.num_ranks * self.num_chunks

    def owner(self, pipeline_stage: int) -> int:
        """The rank that owns a virtual stage."""
        turn, position = divmod(pipeline_stage, self.num_ranks)
        if self.placement is Placement.V and turn % 2:
            return self.num_ranks - 1 - position
        return position

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """`owner` of every virtual stage, for inner loops."""
        return tuple(map(self.owner, range(self.num_stages)))

    def chunk(self, pipeline_stage: int) -> int:
        """Which of its rank's chunks a virtual stage is, 0 .. num_chunks - 1."""
        return pipeline_stage // self.num_ranks

    def stages(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of a rank, in the order in which a microbatch meets them."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    @cached_property
    def lowered(self) -> bool:
        """True when the lists hold more than computing: `lower` or an author put it there."""
        return any(action.op not in COMPUTE_OPS for row in self.ranks for action in row)

    def dump(self) -> str:
        """The schedule as text: one line of facts, then one line for each rank."""
        head = (
            f"schedule={self.name} pipeline={self.num_ranks} chunks={self.num_chunks} "
            f"num_microbatches={self.num_microbatches} placement={self.placement.value} "
            f"fuse_backward={'yes' if self.fuse_backward else 'no'}"
        )
        rows = (
            f"{rank}: {' '.join(map(str, row))}".rstrip() for rank, row in enumerate(self.ranks)
        )
        return "\n".join([head, *rows]) + "\n"

    @classmethod
    def load(cls, text: str) -> Schedule:
        """The inverse of `dump`. Raises `UserError` naming the line that cannot be read.

        Only the form is read here; whether the lists make a correct step is `check`'s question.
        """
        head, *lines = [line for line in text.splitlines() if line.strip()] or [""]
        facts = dict(word.partition("=")[::2] for word in head.split())
        if set(facts) != _FACTS:
            raise UserError(
                f"the first line is {head!r}",
                where="schedule text",
                legal="one word each of " + ", ".join(f"{name}=..." for name in sorted(_FACTS)),
            )
        num_ranks = _positive(facts, "pipeline")
        rows = tuple(_row(line, rank) for rank, line in enumerate(lines))
        if len(rows) != num_ranks:
            raise UserError(
                f"{len(rows)} lines of actions for pipeline={num_ranks}",
                where="schedule text",
                legal=f"{num_ranks} lines, the first starting with '0:'",
            )
        return cls(
            name=facts["schedule"],
            num_ranks=num_ranks,
            num_chunks=_positive(facts, "chunks"),
            num_microbatches=_positive(facts, "num_microbatches"),
            placement=Placement(_one_of(facts, "placement", [each.value for each in Placement])),
            fuse_backward=_one_of(facts, "fuse_backward", ["yes", "no"]) == "yes",
            ranks=rows,
        )


_FACTS = frozenset(
    {"schedule", "pipeline", "chunks", "num_microbatches", "placement", "fuse_backward"}
)


def _row(line: str, rank: int) -> tuple[Action, ...]:
    number, colon, actions = line.partition(":")
    if not colon or number.strip() != str(rank):
        raise UserError(
            f"line {line[:40]!r} should start with '{rank}:'",
            where="schedule text",
            legal="one line for each rank, '0: 0F0 0B0 0W0', ranks in order",
        )
    return tuple(Action.parse(word) for word in actions.split())


def _positive(facts: dict[str, str], name: str) -> int:
    value = facts[name]
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"{name}={value}", where="schedule text", legal="a whole number from 1")
    return int(value)


def _one_of(facts: dict[str, str], name: str, legal: Iterable[str]) -> str:
    value = facts[name]
    if value not in legal:
        raise UserError(f"{name}={value}", where="schedule text", legal=" or ".join(legal))
    return value
