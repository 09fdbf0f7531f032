"""Pipelines whose stages sleep: what a schedule costs by itself, on a machine with too few cores.

The executor, its messages and its records are those of training; only the compute of a stage is
replaced. F, B and W each sleep a given time around one product of tiny matrices, so that eight
ranks run at once on two cores and nothing but the order of actions decides how long a step takes.
That is then held against `schedule/timing.py`, which every plan and every ranking relies on.

Price: it says nothing of compute that slows its neighbour down; `spans_of_training` reads the same
records from real steps. Rejected: a simulated clock, with which a lost wake-up, a message sent too
late or a receive in the wrong place would cost nothing and be seen by nobody.

    N = 1 row   D = 4 hidden width
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from reparto.bench.contestants import Workload, batches, in_microbatches, our_trainer
from reparto.comm.mesh import Mesh
from reparto.config.plan import Plan
from reparto.parallel.gradients import WeightGradients
from reparto.parallel.pipeline import Executor, Stage
from reparto.schedule.actions import Schedule
from reparto.trace import Kind, Ring

_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Naps:
    """How long the actions of every virtual stage sleep."""

    forward_s: float
    "seconds of an F"
    backward_s: float
    "seconds of a B, input gradient alone"
    weight_s: float
    "seconds of a W"


@dataclass(frozen=True, kw_only=True)
class Spans:
    """When one rank computed in one step, from its ring."""

    actions: tuple[str, ...]
    "text of each F, B and W that has a record: a full backward is one B"
    starts_s: tuple[float, ...]
    "on the clock that all processes of a host share"
    ends_s: tuple[float, ...]
    "likewise"


def _sleep_until(moment_s: float) -> None:
    """The tiny products are part of the nap: an action is to take the time it was given."""
    time.sleep(max(0.0, moment_s - time.perf_counter()))


class _Nap(Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return grad, None


class _SleepyGradients(WeightGradients):
    """Weight gradients that take as long as they are told."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def product(self, weight: Tensor, gradient_NF: Tensor, input_ND: Tensor) -> Tensor | None:
        began = time.perf_counter()
        made = super().product(weight, gradient_NF, input_ND)
        _sleep_until(began + self._seconds)
        return made


class _Nobody:
    """The strategy of weights that nobody shares."""

    def begin_window(self, num_microbatches: int) -> None: ...

    def end_microbatch(self) -> None: ...

    def close_window(self) -> tuple[str, ...]:
        return ()

    def finish_window(self) -> None: ...

    def start_unshard(self, stage: int, names: Sequence[str] | None = None) -> None: ...

    def finish_unshard(self, stage: int) -> None: ...

    def reshard(self, stage: int) -> None: ...


def sleepy_executor(schedule: Schedule, mesh: Mesh, naps: Naps) -> Executor[int]:
    """The executor of training over stages that sleep. `schedule` is lowered; a microbatch is its
    number.
    """
    position = mesh.coordinates["pipeline"]
    gradients = _SleepyGradients(naps.weight_s)

    def stage(index: int) -> Stage[int]:
        weight = nn.Parameter(torch.eye(_WIDTH))

        def forward(hidden_ND: Tensor | None, microbatch: int) -> Tensor:
            began = time.perf_counter()
            if hidden_ND is None:
                hidden_ND = torch.full((1, _WIDTH), float(microbatch))
            out: Tensor = _Nap.apply(  # type: ignore[no-untyped-call]
                gradients.linear(hidden_ND, weight, None), naps.backward_s
            )
            _sleep_until(began + naps.forward_s)
            return out

        return Stage(
            index=index,
            forward=forward,
            input_shape=(lambda microbatch: (1, _WIDTH)) if index else None,
            output_shape=(lambda microbatch: (1, _WIDTH)) if index < last else None,
            loss=(lambda output, microbatch: (output.sum(), torch.ones(())))
            if index == last
            else None,
            reduction=_Nobody(),
        )

    last = schedule.num_stages - 1
    return Executor(
        schedule,
        position=position,
        stages=[stage(index) for index in schedule.stages(position)],
        group=mesh.group("pipeline"),
        weight_gradients=gradients,
        ring=mesh.ring,
        dtype=torch.float32,
        device=torch.device("cpu"),
        reduce_each=False,
    )


def spans_since(ring: Ring, sequence: int) -> Spans:
    """What a rank computed since a record."""
    found = [one for one in ring.records(since=sequence) if one.kind is Kind.ACTION]
    return Spans(
        actions=tuple(one.tag for one in found),
        starts_s=tuple(one.start_ns / 1e9 for one in found),
        ends_s=tuple(one.end_ns / 1e9 for one in found),
    )


def spans_of_sleep(
    schedule: Schedule, mesh: Mesh, naps: Naps, steps: int
) -> tuple[list[Spans], int]:
    """`steps` steps after one that warms up, and the most activations held at once."""
    executor = sleepy_executor(schedule, mesh, naps)
    microbatches = list(range(schedule.num_microbatches))
    found: list[Spans] = []
    for number in range(steps + 1):
        mesh.group("pipeline").barrier(tag="start together").wait()
        before = mesh.ring.sequence
        executor.run(microbatches)
        if number:
            found.append(spans_since(mesh.ring, before))
    return found, executor.peak_live


def spans_of_training(
    workload: Workload, mesh: Mesh, plan: Plan, steps: int
) -> tuple[list[Spans], int]:
    """The same of a real model under `plan`, whose microbatches have equal sizes."""
    trainer = our_trainer(workload, mesh, plan)
    source = batches(workload, 0)
    found: list[Spans] = []
    for number in range(1, steps + 2):
        parts = in_microbatches(next(source), workload.num_microbatches)
        mesh.group("pipeline").barrier(tag="start together").wait()
        before = mesh.ring.sequence
        trainer.step(parts, number=number, position=0)
        if number > 1:
            found.append(spans_since(mesh.ring, before))
    return found, trainer.peak_live
