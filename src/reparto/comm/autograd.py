"""Differentiable collectives: what crosses ranks in forward, and its transpose in backward.

| function | forward | backward |
|---|---|---|
| `all_reduce` | sum over the group | nothing |
| `all_reduce_gradient` | nothing | sum over the group |
| `all_gather` | pieces along `dim` -> whole | reduce_scatter |
| `reduce_scatter` | sum, then this rank's piece along `dim` | all_gather |
| `all_to_all` | rows to their ranks | the rows' gradients back |

The transpose of a sum whose result every rank uses alike is a copy, not a second sum: the loss is
computed by every rank of a tensor group and counted once. All of them wait before they return. Two
take *riders*: other tensors whose gradients are made by `Riders.gradients()` while the message of
backward travels, and go back through autograd like any gradient.

A tag has two forms, `activation ...` in forward and `activation-gradient ...` in backward, so that
records, bytes and hang reports tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from reparto.comm.collectives import Communicator

_FORWARD, _BACKWARD = "activation", "activation-gradient"


class Riders(Protocol):
    """Tensors whose gradients are made while a message travels."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    def gradients(self) -> Sequence[Tensor | None]:
        """One for each of `tensors`, None where there is nothing to add."""
        ...


def all_reduce(x: Tensor, group: Communicator, *, tag: str) -> Tensor:
    """The sum over the group; overwrites `x`, which nothing may have saved for backward."""
    if group.size == 1:
        return x
    out: Tensor = _AllReduce.apply(x, group, tag)  # type: ignore[no-untyped-call]
    return out


def all_reduce_gradient(
    x: Tensor, group: Communicator, *, tag: str, riders: Riders | None = None
) -> Tensor:
    """`x` itself; its gradient is summed over the group."""
    if group.size == 1:
        return x
    more = riders.tensors if riders else ()
    out: Tensor = _AllReduceGradient.apply(x, group, tag, riders, *more)  # type: ignore[no-untyped-call]
    return out


def all_gather(
    x: Tensor, group: Communicator, *, dim: int, tag: str, riders: Riders | None = None
) -> Tensor:
    """Equal pieces along `dim`, in group order, put together."""
    if group.size == 1:
        return x
    more = riders.tensors if riders else ()
    out: Tensor = _AllGather.apply(x, group, dim, tag, riders, *more)  # type: ignore[no-untyped-call]
    return out


def reduce_scatter(x: Tensor, group: Communicator, *, dim: int, tag: str) -> Tensor:
    """The sum over the group, of which this rank keeps its piece along `dim`.

    `dim` must be divisible by the group; who cuts activations refuses other sizes beforehand.
    """
    if group.size == 1:
        return x
    out: Tensor = _ReduceScatter.apply(x, group, dim, tag)  # type: ignore[no-untyped-call]
    return out


def all_to_all(
    rows: Tensor,
    group: Communicator,
    *,
    out_sizes: Sequence[int],
    in_sizes: Sequence[int],
    tag: str,
) -> Tensor:
    """Rows (dim 0) for every rank, `in_sizes` of them each, against `out_sizes` rows of each.

    The tag stands in records as it is, and with `-gradient` behind its first word in backward.
    """
    if group.size == 1:
        return rows
    out: Tensor = _AllToAll.apply(rows, group, out_sizes, in_sizes, tag)  # type: ignore[no-untyped-call]
    return out


def _exchanged(
    rows: Tensor, group: Communicator, out_sizes: Sequence[int], in_sizes: Sequence[int], tag: str
) -> Tensor:
    out = rows.new_empty(sum(out_sizes), *rows.shape[1:])
    group.all_to_all(out, rows.contiguous(), tag=tag, out_sizes=out_sizes, in_sizes=in_sizes).wait()
    return out


def _gathered(x: Tensor, group: Communicator, dim: int, tag: str) -> Tensor:
    pieces = torch.empty(group.size, *x.shape, dtype=x.dtype, device=x.device)
    group.all_gather(pieces, x.contiguous(), tag=tag).wait()
    return _joined(pieces, dim)


def _joined(pieces: Tensor, dim: int) -> Tensor:
    """(n, ..., d, ...) -> (..., n * d, ...)."""
    shape = list(pieces.shape[1:])
    shape[dim] *= pieces.shape[0]
    return pieces.movedim(0, dim).reshape(shape)


def _apart(x: Tensor, parts: int, dim: int) -> Tensor:
    """(..., n * d, ...) -> contiguous (n, ..., d, ...)."""
    assert x.shape[dim] % parts == 0, f"{x.shape[dim]} along dim {dim} in {parts} pieces"
    shape = [*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :]]
    return x.reshape(shape).movedim(dim, 0).contiguous()


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Communicator, tag: str) -> Tensor:
        whole = x.contiguous()
        if whole is x:
            ctx.mark_dirty(x)
        group.all_reduce(whole, tag=f"{_FORWARD} {tag}").wait()
        return whole

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _AllReduceGradient(Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        group: Communicator,
        tag: str,
        riders: Riders | None,
        *more: Tensor,
    ) -> Tensor:
        ctx.group, ctx.tag, ctx.riders = group, tag, riders  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        group: Communicator = ctx.group  # type: ignore[attr-defined]
        riders: Riders | None = ctx.riders  # type: ignore[attr-defined]
        if not ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            return None, None, None, None, *(riders.gradients() if riders else ())
        total = grad.clone(memory_format=torch.contiguous_format)  # autograd may share `grad`
        handle = group.all_reduce(total, tag=f"{_BACKWARD} {ctx.tag}")  # type: ignore[attr-defined]
        made = riders.gradients() if riders else ()
        handle.wait()
        return total, None, None, None, *made


class _AllGather(Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        group: Communicator,
        dim: int,
        tag: str,
        riders: Riders | None,
        *more: Tensor,
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.tag = group, dim, tag  # type: ignore[attr-defined]
        ctx.riders = riders  # type: ignore[attr-defined]
        return _gathered(x, group, dim, f"{_FORWARD} {tag}")

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        group: Communicator = ctx.group  # type: ignore[attr-defined]
        riders: Riders | None = ctx.riders  # type: ignore[attr-defined]
        if not ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            return None, None, None, None, None, *(riders.gradients() if riders else ())
        pieces = _apart(grad, group.size, ctx.dim)  # type: ignore[attr-defined]
        mine = torch.empty_like(pieces[0])
        handle = group.reduce_scatter(mine, pieces, tag=f"{_BACKWARD} {ctx.tag}")  # type: ignore[attr-defined]
        made = riders.gradients() if riders else ()
        handle.wait()
        return mine, None, None, None, None, *made


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Communicator, dim: int, tag: str) -> Tensor:
        ctx.group, ctx.dim, ctx.tag = group, dim, tag  # type: ignore[attr-defined]
        pieces = _apart(x, group.size, dim)
        mine = torch.empty_like(pieces[0])
        group.reduce_scatter(mine, pieces, tag=f"{_FORWARD} {tag}").wait()
        return mine

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        whole = _gathered(grad, ctx.group, ctx.dim, f"{_BACKWARD} {ctx.tag}")  # type: ignore[attr-defined]
        return whole, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: Tensor,
        group: Communicator,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        tag: str,
    ) -> Tensor:
        ctx.group, ctx.sizes, ctx.tag = group, (out_sizes, in_sizes), tag  # type: ignore[attr-defined]
        return _exchanged(rows, group, out_sizes, in_sizes, tag)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        out_sizes, in_sizes = ctx.sizes  # type: ignore[attr-defined]
        what, _, path = ctx.tag.partition(" ")  # type: ignore[attr-defined]
        tag = f"{what}-gradient {path}"
        return _exchanged(grad, ctx.group, in_sizes, out_sizes, tag), None, None, None, None  # type: ignore[attr-defined]
