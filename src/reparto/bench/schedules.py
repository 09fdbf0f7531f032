"""`bench schedule`: measured steps of every schedule beside what `schedule/timing.py` says of them.

Two questions, so that a miss says where to look:

1. *Asleep.* p = 2, 4, 8 ranks, 2 p microbatches, stages that sleep. Given what a message takes, is
   a step as long, and as idle, as the schedule says? Only order and the executor's own time can be
   the reason if not.
2. *Awake.* p = 2 with a real model, m = 2, 4, 8 microbatches. Given what F, B and W really take on
   each stage, is the bubble the one that is computed from them?

A step goes from the first action on any rank to the end of the last one; the *bubble* is the share
of all ranks' time in it in which no F, B or W runs. Of all rounds the median stands.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from reparto.bench.measure import Load, Tell, ask, load_of
from reparto.bench.protocol import quartiles
from reparto.config.plan import Plan
from reparto.parallel.compose import schedule_of
from reparto.schedule.actions import COMPUTE_OPS, Action, Op, Schedule
from reparto.schedule.live import peaks_by_rank
from reparto.schedule.rules import NAMES
from reparto.schedule.timing import Timeline, simulate

#: seconds that F, B and W of a virtual stage sleep: far above the 0.1 ms that a wake-up takes
NAPS: Mapping[str, float] = MappingProxyType(
    {"forward_s": 0.060, "backward_s": 0.072, "weight_s": 0.048}
)
#: steps asleep; they differ by less than half a percent, so more would say nothing
ASLEEP_ROUNDS = 2
#: ranks of the sleeping pipelines
RANKS = (2, 4, 8)
#: microbatches of the real ones, whose p is 2
MICROBATCHES = (2, 4, 8)
#: sequences of 128 tokens in a microbatch of the real ones
_SEQUENCES = {"1m": 8, "10m": 2, "50m": 1}


@dataclass(frozen=True, kw_only=True)
class Found:
    """One step: measured, or computed."""

    step_s: float
    "seconds from the first action to the end of the last"
    bubble: float
    "idle share of all ranks' time in it, 0 to 1"


def bench_schedule(model: str, rounds: int, tell: Tell) -> dict[str, object]:
    """Every schedule asleep and awake."""
    sizes = {
        name: Load(model=name, sequences=count * max(MICROBATCHES), sequence_length=128,
                   num_microbatches=max(MICROBATCHES), steps=1, shared=True)
        for name, count in _SEQUENCES.items()
    }  # fmt: skip
    load = load_of(model, sizes)
    rows: list[dict[str, object]] = []
    ratios: dict[str, dict[str, float]] = {}
    again: list[float] = []
    for ranks in RANKS:
        plan = f"pipeline={ranks},num_microbatches={2 * ranks}"
        question = {"kind": "sleep", "plan": plan, "schedules": list(NAMES), "naps": dict(NAPS),
                    "rounds": min(rounds, ASLEEP_ROUNDS)}  # fmt: skip
        answers = ask(question, ranks, tell)
        for name in NAMES:
            schedule = _schedule(plan, name)
            steps = _steps(answers, name)
            message_s = latency_of(schedule, steps)
            expected = of_timeline(simulate(schedule, **NAPS, message_s=message_s))
            measured = [of_spans(step) for step in steps]
            live = [answer[name]["peak_live"] for answer in answers]
            rows.append(_row("asleep", schedule, measured, expected, live, message_s))
            ratios[f"{name} p={ranks}"] = quartiles([expected.step_s / m.step_s for m in measured])
            again += [measured[0].step_s / one.step_s for one in measured[1:]]
    for count in MICROBATCHES:
        plan = f"pipeline=2,num_microbatches={count}"
        question = {
            "kind": "training", "plan": plan, "schedules": list(NAMES), "rounds": rounds,
            "model": model, "sequences": _SEQUENCES[model] * count,
            "sequence_length": load.sequence_length, "num_microbatches": count,
        }  # fmt: skip
        answers = ask(question, 2, tell)
        for name in NAMES:
            schedule = _schedule(plan, name)
            steps = _steps(answers, name)
            measured = [of_spans(step) for step in steps]
            expected = of_timeline(simulate(schedule, **costs_of(schedule, steps)))
            live = [answer[name]["peak_live"] for answer in answers]
            rows.append(_row("awake", schedule, measured, expected, live))
    return {
        "name": "schedule",
        "model": model,
        "rounds": rounds,
        "ratios": ratios,
        "aa": quartiles(again),
        "workload": "ratios: computed over measured step of pipelines of 2 p microbatches, given "
        f"how long messages took; stages sleep {1e3 * NAPS['forward_s']:g} ms in F, "
        f"{1e3 * NAPS['backward_s']:g} in B and {1e3 * NAPS['weight_s']:g} in W; awake: {model}, "
        f"microbatches of {_SEQUENCES[model]} x {load.sequence_length} tokens, computed from the "
        "F, B and W that were measured",
        "figures": {
            "rows": rows,
            "asleep": _worst(rows, "asleep"),
            "awake": _worst(rows, "awake"),
        },
    }


def of_timeline(timeline: Timeline) -> Found:
    """What was computed, from the first action of the step."""
    return Found(step_s=timeline.step_s, bubble=timeline.bubble_share)


def of_spans(ranks: Sequence[Mapping[str, Any]]) -> Found:
    """What was measured: one step, the spans of each rank."""
    began = min(min(one["starts_s"]) for one in ranks)
    ended = max(max(one["ends_s"]) for one in ranks)
    busy = sum(
        end - start
        for one in ranks
        for start, end in zip(one["starts_s"], one["ends_s"], strict=True)
    )
    return Found(step_s=ended - began, bubble=1 - busy / ((ended - began) * len(ranks)))


def costs_of(
    schedule: Schedule, steps: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, list[float]]:
    """Seconds of F, B and W of each virtual stage: means over microbatches and steps.

    A full backward has one record, of its B; its W then counts nothing.
    """
    times: dict[tuple[int, Op], list[float]] = {}
    for step in steps:
        for one in step:
            for text, start, end in zip(
                one["actions"], one["starts_s"], one["ends_s"], strict=True
            ):
                action = Action.parse(text)
                times.setdefault((action.pipeline_stage, action.op), []).append(end - start)
    alone = expected_actions(schedule)
    counted = {(a.pipeline_stage, a.op, a.microbatch) for row in alone for a in row}
    m = schedule.num_microbatches

    def mean(stage: int, op: Op) -> float:
        found = times.get((stage, op), [])
        if op is Op.W:  # some of a stage's W may be within its B
            split = sum((stage, op, index) in counted for index in range(m))
            return statistics.fmean(found) * split / m if found else 0.0
        return statistics.fmean(found)

    stages = range(schedule.num_stages)
    return {
        "forward_s": [mean(stage, Op.F) for stage in stages],
        "backward_s": [mean(stage, Op.B) for stage in stages],
        "weight_s": [mean(stage, Op.W) for stage in stages],
    }


def latency_of(schedule: Schedule, steps: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Median seconds from the end of an action to the start of one on another rank that had nothing
    to do but to wait for its message.
    """
    waits: list[float] = []
    for step in steps:
        ended: dict[tuple[int, Op, int], float] = {}
        for one in step:
            for text, end in zip(one["actions"], one["ends_s"], strict=True):
                action = Action.parse(text)
                ended[action.pipeline_stage, action.op, action.microbatch] = end
        for rank, one in enumerate(step):
            free_s = 0.0
            for text, start, end in zip(
                one["actions"], one["starts_s"], one["ends_s"], strict=True
            ):
                action = Action.parse(text)
                back = -1 if action.op is Op.F else 1
                before = ended.get((action.pipeline_stage + back, action.op, action.microbatch))
                if action.op is not Op.W and before is not None:
                    elsewhere = schedule.owner(action.pipeline_stage + back) != rank
                    if elsewhere and free_s and free_s < before:
                        waits.append(start - before)
                free_s = end
    return statistics.median(waits) if waits else 0.0


def expected_actions(schedule: Schedule) -> list[list[Action]]:
    """The computing actions that leave a record of their own, for each rank in order."""
    found = []
    for row in schedule.ranks:
        kept: list[Action] = []
        for before, action in zip((None, *row), row, strict=False):
            full = before == replace(action, op=Op.B) and action.op is Op.W
            if action.op in COMPUTE_OPS and not full:
                kept.append(action)
        found.append(kept)
    return found


def _schedule(plan: str, name: str) -> Schedule:
    return schedule_of(Plan.parse(f"{plan},schedule={name}"))


def _steps(answers: Sequence[Mapping[str, Any]], name: str) -> list[list[Mapping[str, Any]]]:
    """Of each step, the spans of each rank."""
    return [list(step) for step in zip(*(one[name]["steps"] for one in answers), strict=True)]


def _row(
    kind: str,
    schedule: Schedule,
    measured: Sequence[Found],
    expected: Found,
    live: Sequence[int],
    message_s: float = 0.0,
) -> dict[str, object]:
    step_s = statistics.median(one.step_s for one in measured)
    bubble = statistics.median(one.bubble for one in measured)
    proved = [int(one.live) for one in peaks_by_rank(schedule)]
    return {
        "stages": kind,
        "schedule": schedule.name,
        "p": schedule.num_ranks,
        "m": schedule.num_microbatches,
        "step_s": round(step_s, 4),
        "computed_s": round(expected.step_s, 4),
        "message_ms": round(1e3 * message_s, 2),
        "step_off_pct": round(100 * (step_s / expected.step_s - 1), 2),
        "bubble": round(bubble, 4),
        "computed_bubble": round(expected.bubble, 4),
        "bubble_off_points": round(100 * (bubble - expected.bubble), 2),
        "live": list(live),
        "live_as_proved": list(live) == proved,
    }


def _worst(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[str, object]:
    mine = [row for row in rows if row["stages"] == kind]
    return {
        "worst_step_off_pct": max((row["step_off_pct"] for row in mine), key=abs),
        "worst_bubble_off_points": max((row["bubble_off_points"] for row in mine), key=abs),
        "live_as_proved": all(row["live_as_proved"] for row in mine),
    }
