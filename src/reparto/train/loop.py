"""The loop: data, step, record, save, stop. What decides is agreed by all ranks in the step's word.

The loop knows nothing of files for evidence or of a terminal: it hands rows and events to a `Sink`,
and calls `save` when a checkpoint is due. Both are given by whoever wires the rooms.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from reparto.errors import Fault
from reparto.model.transformer import Decoder
from reparto.trace import Kind
from reparto.train.evaluate import Evaluation, evaluate
from reparto.train.state import TrainState
from reparto.train.step import StepResult

Row = Mapping[str, float | int | bool | str | None]


class Sink(Protocol):
    """Where a rank's records go. Only rank 0's is ever given rows."""

    def row(self, row: Row) -> None:
        """One row of metrics.jsonl."""
        ...

    def event(self, kind: str, body: Mapping[str, object]) -> None:
        """Something worth keeping: an evaluation, a skipped step, a save, a stop."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """How a loop ended; equal on every rank but the times."""

    step: int
    "last step that was made"
    loss: float
    "its loss, nats a token"
    evaluation: Evaluation | None
    "of the last weights; None when a signal ended the run"
    tokens: int
    "tokens trained on by this loop"
    seconds: float
    "of the steps themselves"
    exposed_s: float
    "this rank's exposed communication within them"
    data_wait_s: float
    "this rank's waiting for data within them"
    stopped_by: tuple[int, ...]
    "ranks that were asked to stop; empty if the loop came to its end"


def train_loop(
    state: TrainState,
    *,
    first_step: int,
    last_step: int,
    save: Callable[[int], None],
    sink: Sink,
    asked_to_stop: Callable[[], bool],
) -> LoopResult:
    """Steps `first_step` to `last_step`, both included. Raises `Fault` if the run cannot go on."""
    run, mesh = state.run, state.parallel.mesh
    every, look_every = run.recover.checkpoint_every, run.recover.evaluate_every
    tokens, seconds, exposed, waited = 0, 0.0, 0.0, 0.0
    skipped_in_a_row = 0
    step = first_step - 1
    loss = float("nan")
    stopped: tuple[int, ...] = ()
    named: set[str] = set()
    saved = step
    for step in range(first_step, last_step + 1):
        began, exposed_before = time.monotonic(), mesh.exposed_s
        mesh.ring.set_step(step)
        position = state.loader.position
        with mesh.ring.span(Kind.DATA_WAIT, "loader") as data_wait:
            microbatches = next(state.loader)
        if isinstance(state.model, Decoder):  # who has dropout
            state.model.set_step(run.seed, step)
        result = state.trainer.step(
            microbatches, number=step, position=position, stop=asked_to_stop()
        )
        took, hung = time.monotonic() - began, mesh.exposed_s - exposed_before
        tokens, seconds = tokens + result.num_tokens, seconds + took
        exposed, waited = exposed + hung, waited + data_wait.seconds
        loss = result.loss
        _tell_untouched(result, named, sink)
        if mesh.rank == 0:
            sink.row(_row(step, result, took, hung, data_wait.seconds, state.loader.position))
        skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            _tell_skipped(state, step, result, skipped_in_a_row, sink)
        if result.agreed.stop:
            stopped = result.agreed.stop
            break
        if look_every and step % look_every == 0 and step < last_step:
            seen = evaluate(state)
            sink.event("evaluation", _told(step, seen))
        if every and step % every == 0:
            save(step)
            saved = step
    if step >= first_step and saved != step:
        save(step)
    evaluation = None
    if not stopped:
        state.loader.close()
        evaluation = evaluate(state)
        sink.event("evaluation", _told(step, evaluation))
    return LoopResult(
        step=step,
        loss=loss,
        evaluation=evaluation,
        tokens=tokens,
        seconds=seconds,
        exposed_s=exposed,
        data_wait_s=waited,
        stopped_by=stopped,
    )


def _row(
    step: int, result: StepResult, took: float, hung: float, waited: float, position: int
) -> Row:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
    return {
        "step": step,
        "loss": result.loss,
        "num_tokens": result.num_tokens,
        "tokens_per_s": result.num_tokens / took if took else 0.0,
        "step_s": took,
        "exposed_comm_s": hung,
        "data_wait_s": waited,
        "grad_norm": result.norm,
        "learning_rate": result.learning_rate,
        "skipped": result.skipped,
        "position": position,
        "peak_rss_bytes": peak,
        **_load(result),
    }


def _load(result: StepResult) -> Row:
    """The load of experts, flat, as every row is; nothing for a dense model."""
    load = result.load
    if load is None:
        return {}
    by_expert = {
        f"expert_load/{layer}/{expert}": count
        for layer, row in enumerate(load.counts)
        for expert, count in enumerate(row)
    }
    return {
        "balance_loss": load.balance_loss,
        "router_z_loss": load.z_loss,
        "expert_load_max_over_mean": load.worst,
        "idle_experts": load.idle,
        **by_expert,
    }


def _tell_untouched(result: StepResult, named: set[str], sink: Sink) -> None:
    fresh = [name for name in result.untouched if name not in named]
    if fresh:
        named.update(fresh)
        sink.event("untouched_parameters", {"names": fresh})


def _tell_skipped(
    state: TrainState, step: int, result: StepResult, in_a_row: int, sink: Sink
) -> None:
    ranks = ", ".join(map(str, result.agreed.unfinite)) or "none: the batch had no valid token"
    samples = state.loader.sample_ids
    sink.event(
        "skipped_step",
        {"step": step, "ranks": list(result.agreed.unfinite), "in_a_row": in_a_row,
         "samples_of_this_rank": [list(one) for one in samples]},
    )  # fmt: skip
    most = state.run.synchronize.max_skipped
    if in_a_row >= most:
        raise Fault(
            f"step {step}: {in_a_row} steps in a row were not finite (rank {ranks}); lower "
            f"synchronize.learning_rate, or raise synchronize.max_skipped above {most}"
        )


def _told(step: int, seen: Evaluation) -> Mapping[str, object]:
    return {
        "step": step,
        "validation_loss": seen.loss,
        "num_tokens": seen.num_tokens,
        "by_group": {name: {"loss": a, "num_tokens": n} for name, (a, n) in seen.by_group.items()},
    }
