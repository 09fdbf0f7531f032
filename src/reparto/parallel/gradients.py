"""When a gradient is ready: the only event that buckets and shards listen to.

A parameter gets one *contribution* from every microbatch whose loss depends on it: autograd's
accumulation node fires once a backward, after it has summed all uses of a tied weight. `Readiness`
counts contributions and tells a `Sink` two things:

    contributed(parameter)   its gradient of one microbatch lies in `parameter.grad`
    ready(parameter)         the last contribution of the window is in

The window is a whole step, or one microbatch under `gradient_sync=microbatch`. Parameters that the
loss never reached are not waited for: `end_window` reports them, so nothing hangs on a branch that
one rank did not take. They are named once to the user.

The rejected alternative, a static graph learned in the first step, is cheaper by a dictionary
look-up and dies in the second step of a model with an unused branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class Sink(Protocol):
    """A strategy that reduces gradients."""

    def contributed(self, name: str, parameter: Tensor) -> None:
        """Take the gradient of one microbatch out of `parameter.grad`."""
        ...

    def ready(self, name: str) -> None:
        """The window's last contribution of this parameter has been taken."""
        ...


class Readiness:
    """Counts contributions of every trainable parameter and fires `ready` once a window."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], sink: Sink) -> None:
        self._sink = sink
        self._left: dict[str, int] = {}
        self._names = [name for name, one in parameters.items() if one.requires_grad]
        self._touched: set[str] = set()
        self._handles = [
            parameters[name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(name)
            )
            for name in self._names
        ]

    def begin_window(self, num_microbatches: int) -> None:
        """Start a window of that many contributions a parameter."""
        self._left = dict.fromkeys(self._names, num_microbatches)
        self._touched.clear()

    def end_window(self) -> tuple[str, ...]:
        """Fire what did not fire by itself, in model order.

        Returns the names that got no contribution at all.
        """
        untouched = []
        for name in self._names:
            if self._left.get(name, 0) > 0:
                self._left[name] = 0
                if name not in self._touched:
                    untouched.append(name)
                self._sink.ready(name)
        return tuple(untouched)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> object:
        def contributed(parameter: Tensor) -> None:
            self._touched.add(name)
            self._sink.contributed(name, parameter)
            self._left[name] -= 1
            if self._left[name] == 0:
                self._sink.ready(name)

        return contributed
