"""The executor: runs the list of actions that `schedule/` made. There is no other training loop.

A run without pipeline is the one-stage schedule F0 B0 W0 F1 B1 W1 ...: gradient accumulation is
nothing else. A B directly followed by its W is one full backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from reparto.schedule.actions import Action, Op
from reparto.trace import Kind, Ring

Batch = TypeVar("Batch")
Batch_contra = TypeVar("Batch_contra", contravariant=True)


class Stage(Protocol[Batch_contra]):
    """What the executor asks of one virtual stage that holds the whole model."""

    def forward(self, microbatch: Batch_contra) -> tuple[Tensor, Tensor]:
        """`(loss sum, token count)` of one microbatch."""
        ...


class Reduction(Protocol):
    """What the executor asks of the strategy that reduces gradients (`data`, `zero`)."""

    def begin_window(self, num_microbatches: int) -> None: ...

    def end_microbatch(self) -> None: ...

    def end_window(self) -> tuple[str, ...]: ...


class Executor(Generic[Batch]):
    """Runs one rank's actions over one step's microbatches."""

    def __init__(
        self,
        actions: Sequence[Action],
        *,
        forward: Callable[[Batch], tuple[Tensor, Tensor]],
        reduction: Reduction,
        ring: Ring,
        num_microbatches: int,
        reduce_each: bool,
    ) -> None:
        """`reduce_each` reduces after every microbatch (`gradient_sync=microbatch`)."""
        self._actions = actions
        self._forward = forward
        self._reduction = reduction
        self._ring = ring
        self._num_microbatches = num_microbatches
        self._reduce_each = reduce_each

    def run(self, microbatches: Sequence[Batch]) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """One step's forward and backward.

        Returns the sum of losses, the sum of counts, and the parameters no loss reached.
        """
        assert len(microbatches) == self._num_microbatches
        losses: dict[int, Tensor] = {}
        sums: list[Tensor] = []
        counts: list[Tensor] = []
        untouched: set[str] | None = None
        if not self._reduce_each:
            self._reduction.begin_window(self._num_microbatches)
        for action in self._actions:
            index = action.microbatch
            self._ring.microbatch = index
            if action.op is Op.F:
                if self._reduce_each:
                    self._reduction.begin_window(1)
                with self._ring.span(Kind.ACTION, str(action)):
                    loss, count = self._forward(microbatches[index])
                losses[index] = loss
                sums.append(loss.detach())
                counts.append(count)
            elif action.op is Op.B:
                with self._ring.span(Kind.ACTION, str(action)):
                    losses.pop(index).backward()  # type: ignore[no-untyped-call]
                self._reduction.end_microbatch()
                if self._reduce_each:
                    missing = set(self._reduction.end_window())
                    untouched = missing if untouched is None else untouched & missing
        if not self._reduce_each:
            untouched = set(self._reduction.end_window())
        self._ring.microbatch = -1
        return sum_of(sums), sum_of(counts), tuple(sorted(untouched or ()))


def sum_of(values: Sequence[Tensor]) -> Tensor:
    """Left to right, so that the same plan gives the same bits."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
