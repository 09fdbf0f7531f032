"""When a gradient is ready: the only event that buckets and shards listen to.

A parameter gets one *contribution* from every microbatch and every chunk of layers that uses it:
autograd's accumulation node fires once a backward, after it has summed all uses of a tied weight.
`Readiness` counts contributions and tells a `Sink` two things:

    contributed(parameter)   its gradient of one microbatch lies in `parameter.grad`
    ready(parameter)         the last contribution of the window is in

The window is a whole step, or one microbatch under `gradient_sync=microbatch`. Parameters that the
loss never reached are not waited for: `end_window` reports them, so nothing hangs on a branch that
one rank did not take. They are named once to the user.

`WeightGradients` makes the weight gradients of matmuls. Where a schedule wants them later, a linear
layer queues (input, output gradient) in B, the queue is drained in W, and its contributions fire
then. Where nothing is put off, they are made in backward as ever, but straight into the memory they
are reduced from. Everything else (norms, biases of other layers, embeddings) has its gradient in B.
Under recompute the queue holds the input that was made again.

Rejected: a static graph learned in the first step, cheaper by a dictionary look-up, which dies in
the second step of a model with an unused branch; and running backward twice, once for inputs and
once for weights (torch.autograd.grad), which keeps the whole graph alive until W.

    N tokens of a microbatch   D in features   F out features
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional


class Sink(Protocol):
    """A strategy that reduces gradients."""

    def contributed(self, name: str, parameter: Tensor) -> None:
        """Take the gradient of one microbatch out of `parameter.grad`."""
        ...

    def place(self, name: str) -> tuple[Tensor, bool] | None:
        """Memory in which the gradient of one matmul may be made, and whether to add to what is
        there. It stands in `parameter.grad` afterwards. None: hand it over as autograd does.
        """
        ...

    def ready(self, name: str) -> None:
        """The window's last contribution of this parameter has been taken."""
        ...


Place = Callable[[], tuple[Tensor, bool] | None]


class Readiness:
    """Counts contributions of every trainable parameter and fires `ready` once a window."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sink: Sink,
        *,
        uses: Mapping[str, int] | None = None,
        deferred: WeightGradients | None = None,
    ) -> None:
        """`uses`: chunks of this rank that use a parameter, where that is not 1."""
        self._sink = sink
        self._left: dict[str, int] = {}
        self._names = [name for name, one in parameters.items() if one.requires_grad]
        self._uses = {name: (uses or {}).get(name, 1) for name in self._names}
        self._touched: set[str] = set()
        self._deferred = deferred
        self._handles = [
            parameters[name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(name)
            )
            for name in self._names
        ]
        if deferred is not None:
            for name in self._names:
                deferred.listen(parameters[name], self._counted(name), self._place(name))

    def begin_window(self, num_microbatches: int) -> None:
        """Start a window of that many contributions a parameter and chunk."""
        self._left = {name: num_microbatches * self._uses[name] for name in self._names}
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

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        counted = self._counted(name)

        def accumulated(parameter: Tensor) -> None:
            if self._deferred is not None and self._deferred.waits_for(parameter):
                # W will fire the contribution. There is a gradient already only where the weight
                # has another use (a tied embedding); autograd fires this hook without one too
                if parameter.grad is not None:
                    self._sink.contributed(name, parameter)
            else:
                counted(parameter)

        return accumulated

    def _place(self, name: str) -> Place:
        return lambda: self._sink.place(name)

    def _counted(self, name: str) -> Callable[[Tensor], None]:
        def contributed(parameter: Tensor) -> None:
            self._touched.add(name)
            self._sink.contributed(name, parameter)
            self._left[name] -= 1
            if self._left[name] == 0:
                self._sink.ready(name)

        return contributed


@dataclass(slots=True)
class _Matmul:
    """A weight gradient that has not been made yet."""

    input: Tensor
    gradient: Tensor
    weight: nn.Parameter
    bias: nn.Parameter | None


#: what one B has queued for its W
Deferred = list[_Matmul]


class WeightGradients:
    """Makes weight gradients of matmuls, now or later. One for each rank."""

    def __init__(self, *, enabled: bool = True) -> None:
        """`enabled=False` leaves them to autograd, as compiled blocks need it."""
        self.enabled = enabled
        self.put_off = False
        "set during a B whose W comes later"
        self._queue: Deferred = []
        self._waiting: set[int] = set()
        self._listeners: dict[int, Callable[[Tensor], None]] = {}
        self._places: dict[int, Place] = {}

    def listen(
        self, parameter: nn.Parameter, contributed: Callable[[Tensor], None], place: Place
    ) -> None:
        """`contributed(parameter)` is called when W has put its gradient into `parameter.grad`;
        `place()` says where the gradient may be made.
        """
        self._listeners[id(parameter)] = contributed
        self._places[id(parameter)] = place

    def product(self, weight: Tensor, gradient_NF: Tensor, input_ND: Tensor) -> Tensor | None:
        """gradient^T input, (F, D): made where the strategy keeps it (then None), or returned.

        A gradient that autograd hands over is written by the matmul, then copied into its bucket:
        twice the weights' bytes more, 10 ms of a step of 700 at 10M weights and 512 tokens.
        """
        place = self._places.get(id(weight))
        found = place() if place is not None and weight.dtype == gradient_NF.dtype else None
        if found is None:
            return gradient_NF.t() @ input_ND
        memory, add = found
        if add:
            memory.addmm_(gradient_NF.t(), input_ND)
        else:
            torch.mm(gradient_NF.t(), input_ND, out=memory)
        return None

    def waits_for(self, parameter: Tensor) -> bool:
        """Whether a weight gradient of the current B is queued for this parameter."""
        return id(parameter) in self._waiting

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, during: During | None = None
    ) -> Tensor:
        """x (..., D), weight (F, D), bias (F) -> (..., F), as `nn.functional.linear`.

        during  where x entered a tensor region: weight gradients may be made while its own travels
        """
        if not torch.is_grad_enabled() or (during is None and not self.enabled):
            return functional.linear(x, weight, bias)
        out: Tensor = _Linear.apply(x, weight, bias, self, during)  # type: ignore[no-untyped-call]
        return out

    def put(self, matmul: _Matmul) -> None:
        """Queue the gradient of one matmul's weight (and bias)."""
        self._queue.append(matmul)
        self._waiting.update(id(one) for one in (matmul.weight, matmul.bias) if one is not None)

    def take(self) -> Deferred:
        """What this B queued; the queue starts anew."""
        taken, self._queue = self._queue, []
        self._waiting.clear()
        return taken

    def make(self, queued: Deferred) -> None:
        """W: make the queued gradients, oldest first, and fire one contribution a parameter."""
        touched: dict[int, nn.Parameter] = {}
        with torch.no_grad():
            for one in queued:
                gradient_NF = one.gradient.flatten(0, -2)
                if one.weight.requires_grad:
                    made = self.product(one.weight, gradient_NF, one.input.flatten(0, -2))
                    if made is not None:
                        _accumulate(one.weight, made)
                    touched[id(one.weight)] = one.weight
                if one.bias is not None and one.bias.requires_grad:
                    _accumulate(one.bias, gradient_NF.sum(0))
                    touched[id(one.bias)] = one.bias
        queued.clear()
        for key, parameter in touched.items():
            if key in self._listeners:
                self._listeners[key](parameter)


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class During:
    """Weight gradients that wait for the moment in which their input's gradient is on its way.

    A rider of `comm/autograd.py`: made for one entry into a tensor region, filled by the backward
    of the linear layers inside, emptied by the backward of the entry.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self.tensors: list[Tensor] = [
            one
            for module in modules
            for one in (module.weight, module.bias)
            if one is not None and one.requires_grad
        ]
        self._queue: list[tuple[_Matmul, WeightGradients]] = []

    def put(self, matmul: _Matmul, owner: WeightGradients) -> None:
        """Make the gradients of this one when `gradients` is called."""
        self._queue.append((matmul, owner))

    def gradients(self) -> list[Tensor | None]:
        """What autograd is to be handed for each parameter: the sum over all matmuls that used it
        since the entry, where it was not made in its place.
        """
        found: dict[int, Tensor] = {}
        for one, owner in self._queue:
            gradient_NF = one.gradient.flatten(0, -2)
            if one.weight.requires_grad:
                made = owner.product(one.weight, gradient_NF, one.input.flatten(0, -2))
                if made is not None:
                    _add(found, one.weight, made)
            if one.bias is not None and one.bias.requires_grad:
                _add(found, one.bias, gradient_NF.sum(0))
        self._queue.clear()
        return [found.get(id(one)) for one in self.tensors]


def _add(sums: dict[int, Tensor], parameter: nn.Parameter, gradient: Tensor) -> None:
    before = sums.get(id(parameter))
    sums[id(parameter)] = gradient if before is None else before + gradient


class _Linear(Function):
    """A linear layer whose weight gradient can be put off."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        owner: WeightGradients,
        during: During | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        # parameters are leaves and stay; saved, recompute would hand back nameless copies of them
        ctx.weight, ctx.bias = weight, bias  # type: ignore[attr-defined]
        ctx.owner, ctx.during = owner, during  # type: ignore[attr-defined]
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        weight: Tensor = ctx.weight  # type: ignore[attr-defined]
        bias: Tensor | None = ctx.bias  # type: ignore[attr-defined]
        owner: WeightGradients = ctx.owner  # type: ignore[attr-defined]
        during: During | None = ctx.during  # type: ignore[attr-defined]
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad_x = grad @ weight if need_x else None
        if not (need_weight or need_bias):
            return grad_x, None, None, None, None
        if owner.put_off or (during is not None and need_x):
            assert isinstance(weight, nn.Parameter)
            assert bias is None or isinstance(bias, nn.Parameter)
            matmul = _Matmul(x, grad, weight, bias)
            if owner.put_off:
                owner.put(matmul)
            elif during is not None:
                during.put(matmul, owner)
            return grad_x, None, None, None, None
        grad_NF = grad.flatten(0, -2)
        # autograd tells of the contribution even where it is handed no gradient
        grad_weight = owner.product(weight, grad_NF, x.flatten(0, -2)) if need_weight else None
        return grad_x, grad_weight, grad_NF.sum(0) if need_bias else None, None, None
