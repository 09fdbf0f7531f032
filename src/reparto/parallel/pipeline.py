"""Pipeline parallelism: consecutive layers on different ranks, microbatches on their way through.

Equation.  rank r owns blocks f_s for its virtual stages s;  h_s = f_s(h_(s-1)) goes to the owner of
           stage s+1, d loss / d h_(s-1) comes back; weight gradients need no message at all.

| what | message | when | payload a microbatch and border, a rank |
|---|---|---|---|
| hidden state | send / recv | after F | c T D (T D / n under sequence parallelism) |
| its gradient | send / recv | after B (a full backward: after W) | the same |
| tied gradient, tied weight | send / recv | once a step | 4 x owned elements of the tied tensor |

Hidden behind other microbatches: receives are posted ahead of the action that needs them.
(T tokens of a microbatch, D hidden width, c bytes of the compute type, n tensor degree.)

It pays when the layers do not fit, and where messages are dear: a border carries 2 c T D bytes a
microbatch and a layer of tensor parallelism carries 8 times that. Its price is the bubble:
(p-1) / (m+p-1) of the step for 1F1B with p ranks and m microbatches, so m > 4 (p-1) for less than
a fifth. Source: Narayanan et al. 2021, section 2.2.1; the other schedules: `schedule/generate.py`.

There is one executor, and it runs the lists that `schedule/` made; there is no other training loop.
A run without pipeline is the one-stage schedule F0 B0 W0 F1 B1 W1 ...: gradient accumulation is
nothing else. A B directly followed by its W is one full backward. Rejected: a loop for each
schedule, which can be neither drawn, proved nor timed without running it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from reparto.comm.collectives import Communicator, Handle
from reparto.parallel.flat import places
from reparto.parallel.gradients import Deferred, WeightGradients
from reparto.schedule.actions import RECV_OPS, Action, Op, Schedule
from reparto.trace import Kind, Ring

Batch = TypeVar("Batch")
Cell = tuple[int, int]  # (virtual stage, microbatch)

#: receives that are posted before the action that waits for the first of them; each is one buffer
POSTED_AHEAD = 2


class Reduction(Protocol):
    """What the executor asks of the strategy that owns a stage's weights (`data`, `zero`)."""

    def begin_window(self, num_microbatches: int) -> None: ...

    def end_microbatch(self) -> None: ...

    def close_window(self) -> tuple[str, ...]: ...

    def finish_window(self) -> None: ...

    def start_unshard(self, stage: int, names: Sequence[str] | None = None) -> None: ...

    def finish_unshard(self, stage: int) -> None: ...

    def reshard(self, stage: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Stage(Generic[Batch]):
    """One virtual stage of this rank."""

    index: int
    "its number among all virtual stages"
    forward: Callable[[Tensor | None, Batch], Tensor]
    "hidden state (None at the first stage) -> hidden state, or the model's output"
    input_shape: Callable[[Batch], Sequence[int]] | None = None
    "shape of the hidden state that it receives; None at the first stage"
    output_shape: Callable[[Batch], Sequence[int]] | None = None
    "shape of the hidden state that it hands on; None at the last stage"
    loss: Callable[[Tensor, Batch], tuple[Tensor, Tensor]] | None = None
    "at the last stage: output -> (sum over tokens, their count)"
    reduction: Reduction
    "owns the weights"
    borrows: Mapping[int, Sequence[str]] = field(default_factory=dict)
    "stage of this rank -> names of parameters of its reduction that this stage uses too"


@dataclass(slots=True)
class _Saved:
    """What F leaves for B."""

    input: Tensor | None
    output: Tensor


class _Mail:
    """Messages of one step: receives posted ahead in list order, sends kept until they are gone."""

    def __init__(self, group: Communicator, owners: Sequence[int], row: Sequence[Action]) -> None:
        self._group, self._owners = group, owners
        self._coming = deque(action for action in row if action.op in RECV_OPS)
        self._posted: dict[Action, tuple[Handle, Tensor]] = {}
        self._sent: list[tuple[Handle, Tensor]] = []

    def post(self, make: Callable[[Action], Tensor]) -> None:
        """Post receives until `POSTED_AHEAD` are under way."""
        while self._coming and len(self._posted) < POSTED_AHEAD:
            action = self._coming.popleft()
            buffer, source = make(action), self._owners[action.peer_stage]
            handle = self._group.recv(buffer, source=source, tag=_tag(action))
            self._posted[action] = (handle, buffer)

    def take(self, action: Action) -> Tensor:
        """Wait for a message."""
        handle, buffer = self._posted.pop(action)
        handle.wait()
        return buffer

    def send(self, action: Action, tensor: Tensor) -> None:
        whole = tensor.contiguous()
        to = self._owners[action.peer_stage]
        self._sent.append((self._group.send(whole, to=to, tag=_tag(action)), whole))

    def finish(self) -> None:
        """Wait until everything has been taken."""
        for handle, _ in self._sent:
            handle.wait()
        self._sent.clear()


def _tag(action: Action) -> str:
    backward = action.op in (Op.SEND_B, Op.RECV_B)
    return f"{'activation-gradient' if backward else 'activation'} {action}"


@dataclass(kw_only=True)
class _Step(Generic[Batch]):
    """Everything that is under way in one step."""

    microbatches: Sequence[Batch]
    mail: _Mail
    inputs: dict[Cell, Tensor] = field(default_factory=dict)
    outputs: dict[Cell, Tensor] = field(default_factory=dict)
    gradients: dict[Cell, Tensor] = field(default_factory=dict)
    input_gradients: dict[Cell, Tensor] = field(default_factory=dict)
    saved: dict[Cell, _Saved] = field(default_factory=dict)
    queued: dict[Cell, Deferred] = field(default_factory=dict)
    sums: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    untouched: dict[int, set[str]] = field(default_factory=dict)
    gathered: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """What one rank's step came to."""

    loss: Tensor
    "sum over this rank's tokens; 0 where the last stage is elsewhere"
    count: Tensor
    "their number; likewise"
    untouched: tuple[str, ...]
    "parameters of this rank that no loss reached"


class Executor(Generic[Batch]):
    """Runs one rank's lowered actions over one step's microbatches."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        position: int,
        stages: Sequence[Stage[Batch]],
        group: Communicator,
        weight_gradients: WeightGradients,
        ring: Ring,
        dtype: torch.dtype,
        device: torch.device,
        reduce_each: bool,
    ) -> None:
        """`position` is this rank's place on the pipeline axis, `schedule` is lowered.

        reduce_each  gradients are reduced after every microbatch (`gradient_sync=microbatch`)
        """
        self._schedule, self._row = schedule, schedule.ranks[position]
        self._stages = {stage.index: stage for stage in stages}
        self._last = schedule.num_stages - 1
        self._position, self._group = position, group
        self._weights, self._ring = weight_gradients, ring
        self._dtype, self._device = dtype, device
        self._reduce_each = reduce_each
        # whose W each reduction must have seen before it may close
        self._users = {stage.index: {stage.index} for stage in stages}
        for stage in stages:
            for other in stage.borrows:
                self._users[other].add(stage.index)
        self._left: dict[int, int] = {}
        "REDUCE actions that are still to come, of all stages that add to a reduction"
        self._own_left: dict[int, int] = {}
        "of the reduction's own stage"
        self.peak_live = 0
        "most activations (stage, microbatch) that were held at once, from F until W"

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return self._last in self._stages

    # -- training ------------------------------------------------------------------------------

    def run(self, microbatches: Sequence[Batch]) -> StepSums:
        """One step's forward and backward; gradients are reduced when it returns."""
        assert len(microbatches) == self._schedule.num_microbatches
        mail = _Mail(self._group, self._schedule.owners, self._row)
        step = _Step(microbatches=microbatches, mail=mail)
        for stage in self._stages.values():
            self._begin_window(stage)
        reduces = Counter(a.pipeline_stage for a in self._row if a.op is Op.REDUCE)
        self._own_left = {index: reduces[index] for index in self._users}
        self._left = {index: sum(reduces[user] for user in users)
                      for index, users in self._users.items()}  # fmt: skip
        for position, action in enumerate(self._row):
            self._ring.microbatch = max(action.microbatch, -1)
            step.mail.post(lambda recv: self._buffer(recv, step))
            self._do(action, position, step)
        step.mail.finish()
        for stage in self._stages.values():
            stage.reduction.finish_window()
        self._ring.microbatch = -1
        nothing = torch.zeros((), dtype=torch.float64)
        return StepSums(
            loss=sum_of(step.sums) if step.sums else nothing,
            count=sum_of(step.counts) if step.counts else nothing,
            untouched=tuple(sorted(name for names in step.untouched.values() for name in names)),
        )

    def _do(self, action: Action, position: int, step: _Step[Batch]) -> None:
        stage, cell = (
            self._stages[action.pipeline_stage],
            (action.pipeline_stage, action.microbatch),
        )
        match action.op:
            case Op.F:
                self._forward(action, stage, step)
            case Op.B:
                following = self._row[position + 1 : position + 2]
                fused = following == (Action(stage.index, Op.W, action.microbatch),)
                self._backward(action, stage, step, fused=fused)
            case Op.W:
                if cell in step.queued:
                    with self._ring.span(Kind.ACTION, str(action)):
                        self._weights.make(step.queued.pop(cell))
                stage.reduction.end_microbatch()
            case Op.SEND_F:
                step.mail.send(action, step.outputs.pop(cell))
            case Op.SEND_B:
                step.mail.send(action, step.input_gradients.pop(cell))
            case Op.RECV_F:
                step.inputs[cell] = step.mail.take(action)
            case Op.RECV_B:
                step.gradients[cell] = step.mail.take(action)
            case Op.UNSHARD:
                self._start_unshard(stage)
            case Op.RESHARD:
                self._reshard(stage)
                step.gathered.discard(stage.index)
            case Op.REDUCE:
                self._reduced(stage, step)

    def _buffer(self, action: Action, step: _Step[Batch]) -> Tensor:
        stage = self._stages[action.pipeline_stage]
        shape = stage.input_shape if action.op is Op.RECV_F else stage.output_shape
        assert shape is not None
        whole = shape(step.microbatches[action.microbatch])
        return torch.empty(*whole, dtype=self._dtype, device=self._device)

    def _forward(self, action: Action, stage: Stage[Batch], step: _Step[Batch]) -> None:
        index, microbatch = action.pipeline_stage, action.microbatch
        hidden = step.inputs.pop((index, microbatch), None)
        if hidden is not None:
            hidden.requires_grad_()
        self._wait_for_weights(stage, step)
        with self._ring.span(Kind.ACTION, str(action)):
            output = stage.forward(hidden, step.microbatches[microbatch])
            if stage.loss is not None:
                output, count = stage.loss(output, step.microbatches[microbatch])
                step.sums.append(output.detach())
                step.counts.append(count)
        step.saved[index, microbatch] = _Saved(hidden, output)
        self.peak_live = max(self.peak_live, len(step.saved) + len(step.queued))
        if index == self._last:
            return
        if index + 1 in self._stages:  # the turn of a V: handed over, not sent
            step.inputs[index + 1, microbatch] = output.detach()
        else:
            step.outputs[index, microbatch] = output.detach()

    def _backward(
        self, action: Action, stage: Stage[Batch], step: _Step[Batch], *, fused: bool
    ) -> None:
        index, microbatch = action.pipeline_stage, action.microbatch
        saved = step.saved.pop((index, microbatch))
        gradient = step.gradients.pop((index, microbatch), None)
        self._wait_for_weights(stage, step)
        self._weights.put_off = not fused
        with self._ring.span(Kind.ACTION, str(action)):
            if saved.output.requires_grad:  # a stage of frozen layers behind the input has no B
                torch.autograd.backward(saved.output, gradient)
        self._weights.put_off = False
        if not fused:
            step.queued[index, microbatch] = self._weights.take()
        if index == 0:
            return
        assert saved.input is not None
        back = saved.input.grad
        if back is None:
            back = torch.zeros_like(saved.input)
        if index - 1 in self._stages:
            step.gradients[index - 1, microbatch] = back
        else:
            step.input_gradients[index, microbatch] = back

    # -- evaluation ----------------------------------------------------------------------------

    def outputs(self, batch: Batch) -> Tensor | None:
        """Forward alone: the model's output where the last stage is, None elsewhere.

        Every rank of the pipeline must call it, in the same order of batches.
        """
        output: Tensor | None = None
        sent: list[tuple[Handle, Tensor]] = []
        owners = self._schedule.owners
        for index, stage in sorted(self._stages.items()):
            hidden = output
            if index and index - 1 not in self._stages:
                assert stage.input_shape is not None
                hidden = torch.empty(
                    *stage.input_shape(batch), dtype=self._dtype, device=self._device
                )
                tag = f"evaluation {index}"
                self._group.recv(hidden, source=owners[index - 1], tag=tag).wait()
            self._start_unshard(stage)
            self._finish_unshard(stage)
            with torch.no_grad():
                output = stage.forward(hidden, batch)
            self._reshard(stage)
            if index < self._last and index + 1 not in self._stages:
                whole = output.contiguous()
                tag = f"evaluation {index + 1}"
                sent.append((self._group.send(whole, to=owners[index + 1], tag=tag), whole))
        for handle, _ in sent:
            handle.wait()
        return output if self.has_loss else None

    # -- weights and gradients of a stage ------------------------------------------------------

    def _start_unshard(self, stage: Stage[Batch]) -> None:
        stage.reduction.start_unshard(stage.index)
        for other, names in stage.borrows.items():
            self._stages[other].reduction.start_unshard(stage.index, names)

    def _wait_for_weights(self, stage: Stage[Batch], step: _Step[Batch]) -> None:
        if stage.index in step.gathered:
            return
        step.gathered.add(stage.index)
        self._finish_unshard(stage)

    def _finish_unshard(self, stage: Stage[Batch]) -> None:
        stage.reduction.finish_unshard(stage.index)
        for other in stage.borrows:
            self._stages[other].reduction.finish_unshard(stage.index)

    def _reshard(self, stage: Stage[Batch]) -> None:
        stage.reduction.reshard(stage.index)
        for other in stage.borrows:
            self._stages[other].reduction.reshard(stage.index)

    def _begin_window(self, stage: Stage[Batch]) -> None:
        if not self._reduce_each:
            stage.reduction.begin_window(self._schedule.num_microbatches)
        elif self._schedule.fuse_backward and len(self._users[stage.index]) == 1:
            stage.reduction.begin_window(1)
        else:
            # B of the next microbatch may come before W of this one, so contributions say nothing
            # about when a microbatch is complete: only REDUCE does, and never before
            stage.reduction.begin_window(self._schedule.num_microbatches + 1)

    def _reduced(self, stage: Stage[Batch], step: _Step[Batch]) -> None:
        """REDUCE: gradients leave as soon as no other stage of this rank adds to them."""
        for index, users in self._users.items():
            if stage.index not in users:
                continue
            own = stage.index == index
            self._left[index] -= 1
            self._own_left[index] -= own
            done = self._left[index] == 0
            if done or (self._reduce_each and own and self._own_left[index]):
                self._close(index, step, more=not done)

    def _close(self, index: int, step: _Step[Batch], *, more: bool) -> None:
        stage = self._stages[index]
        missing = set(stage.reduction.close_window())
        before = step.untouched.get(index)
        step.untouched[index] = missing if before is None else before & missing
        if more:
            stage.reduction.finish_window()
            self._begin_window(stage)


def keep_only(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Take away the parameters that no block of this rank uses; module paths stay as they are."""
    kept = {id(one) for block in blocks for one in block.parameters()}
    stay = {id(module) for block in blocks for module in block.modules()}
    for identity, where in places(model).items():
        for module, attribute in where:
            if identity not in kept or id(module) not in stay:
                module.register_parameter(attribute, None)


def sum_of(values: Sequence[Tensor]) -> Tensor:
    """Left to right, so that the same plan gives the same bits."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
