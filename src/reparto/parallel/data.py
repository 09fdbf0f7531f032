"""Data parallelism: every rank has the whole model and a part of the batch.

Equation.  grad = (1 / T) sum over ranks r, microbatches i of  d(loss sum of (r, i)) / d weight,
           T = valid tokens of the whole batch. Sums are reduced; the division by T comes once, at
           the update, so no split of the batch can change the result.

| what | collective | when | bytes a step, a rank |
|---|---|---|---|
| gradients | all_reduce, in buckets | a bucket is ready | payload 4 W, wire 8 (n-1)/n W |

Hidden behind the rest of backward.
(W = number of weights; fp32.)

It pays while the reduction of one bucket takes less than the backward of the layers before it:
8 (n-1)/n W / bandwidth  <  4 W T_rank / speed,  that is  tokens a rank > 2 speed / bandwidth
(speed in FLOP/s, bandwidth in bytes/s). Source: the counts of Rajbhandari et al. 2020 (ZeRO),
section 3, and 4 FLOPs a weight and token in backward. Below that, use larger batches or more
accumulation, or shard the model instead.

Gradients live as views in bucket memory, so nothing is copied before it is sent. Buckets leave in a
fixed order, last layers first, whatever order gradients become ready in, so ranks cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from reparto.comm.collectives import Communicator, Handle
from reparto.comm.mesh import Mesh
from reparto.config.plan import Plan
from reparto.parallel.flat import Owned
from reparto.parallel.gradients import Readiness, WeightGradients
from reparto.partition.experts import EXPERT_COPIES
from reparto.partition.flat import FlatLayout, Slot
from reparto.partition.tensors import Table
from reparto.trace import Kind

Initial = Callable[[str], Tensor]

_REDUCED_OVER = ("replicas", "data", "context", EXPERT_COPIES)


def reduce_naively(parameters: Sequence[nn.Parameter], group: Communicator) -> None:
    """The naive twin: when backward is over, reduce the gradients one by one, and wait for each.

    The shortest correct version. It is the test oracle of `Buckets` and the baseline of benchmarks.
    """
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            group.all_reduce(parameter.grad, tag=f"gradient {index}").wait()


class Bucket:
    """Weights and gradients that are reduced together."""

    def __init__(
        self, layout: FlatLayout, *, group: Communicator, master: torch.dtype,
        device: torch.device, keep_sum: bool,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.gradient = group.buffer(layout.whole_numel, dtype=master, device=device)
        self.total = torch.zeros_like(self.gradient) if keep_sum else self.gradient
        "the sum over reduced windows; the same memory where there is one window a step"
        self.waiting = 0
        self.handle: Handle | None = None
        # asked for by every weight in every microbatch, and 10 us to make
        self._gradients = {slot.offset: self.view(slot, self.gradient) for slot in layout.slots}

    def gradient_of(self, slot: Slot) -> Tensor:
        return self._gradients[slot.offset]

    def view(self, slot: Slot, buffer: Tensor) -> Tensor:
        return buffer[slot.offset : slot.offset + slot.numel].view(slot.shape)


class Buckets:
    """Data parallelism with buckets that are reduced while backward goes on.

    A step, in the order of calls:

        begin_step       gradients are zero
        begin_window     -> contributed / ready fire during backward; a full bucket leaves
        close_window     whatever has not left yet leaves
        finish_window    waits for all buckets; with `gradient_sync=microbatch` adds them up
        owned            what the optimizer updates
        publish          weights of the compute type follow the master weights
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        layouts: Sequence[FlatLayout],
        mesh: Mesh,
        plan: Plan,
        table: Table,
        initial: Initial,
        compute: torch.dtype,
        master: torch.dtype,
        device: torch.device,
        label: str = "",
        groups: str = "",
    ) -> None:
        """`initial(name)` is what this rank computes with of the initial tensor.

        names    all parameters whose memory is made here, frozen ones included
        layouts  flat memory of the trainable ones, in model order (`partition/place.py`)
        compute  type of forward and backward; `master` that of sums, updates and moments
        label    stands in tags, where a rank has several of these
        groups   beginning of the name of the group they are reduced in (`Part.groups`)
        """
        self._group = mesh.group(f"{groups}reduce")
        self._coordinates = mesh.coordinates
        self._ring = mesh.ring
        self._label = label
        self._windows = plan.num_microbatches if plan.gradient_sync == "microbatch" else 1
        self._compute, self._master = compute, master
        self._table = table
        # last layers first: the order in which buckets fill, and the order in which they leave
        self.buckets = [
            Bucket(
                layout, group=self._group, master=master, device=device, keep_sum=self._windows > 1
            )
            for layout in reversed(layouts)
        ]
        self._bucket_of: dict[str, tuple[Bucket, Slot]] = {
            slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.layout.slots
        }
        self._masters: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        for name in names:
            self._masters[name] = initial(name).to(device=device, dtype=master, copy=True)
            same = compute == master
            self._weights[name] = self._masters[name] if same else self._masters[name].to(compute)
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._readiness: Readiness | None = None
        self._next = 0
        self._empty: set[str] = set()
        "parameters whose place in the bucket holds nothing of this window yet"

    def memory(self, name: str) -> Tensor:
        """The weight that forward and backward use."""
        return self._weights[name]

    def attach(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        uses: Mapping[str, int],
        deferred: WeightGradients,
    ) -> None:
        """Listen to the gradients of the parameters, which stand in the model now."""
        found = dict(model.named_parameters())
        self._parameters = {name: found[name] for name in self._weights}
        self._readiness = Readiness(self._parameters, self, uses=uses, deferred=deferred)

    def start_unshard(self, stage: int, names: Collection[str] | None = None) -> None:
        """Nothing to gather: weights are whole."""

    def finish_unshard(self, stage: int) -> None:
        """Nothing to wait for."""

    def reshard(self, stage: int) -> None:
        """Nothing to free."""

    # -- a step --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for bucket in self.buckets:
            if bucket.total is not bucket.gradient:
                bucket.total.zero_()

    def begin_window(self, num_microbatches: int) -> None:
        """Start collecting `num_microbatches` contributions for one reduction."""
        self._next = 0
        self._empty = set(self._bucket_of)
        for bucket in self.buckets:
            bucket.waiting = len(bucket.layout.slots)
        for name in self._bucket_of:
            self._parameters[name].grad = None
        assert self._readiness is not None, "attach comes first"
        self._readiness.begin_window(num_microbatches)

    def place(self, name: str) -> tuple[Tensor, bool] | None:
        """Where a gradient may be made, so that nothing is copied, and whether to add to it."""
        if self._compute != self._master:
            return None
        bucket, slot = self._bucket_of[name]
        add = name not in self._empty
        self._empty.discard(name)
        view = bucket.gradient_of(slot)
        self._parameters[name].grad = view
        return view, add

    def contributed(self, name: str, parameter: Tensor) -> None:
        """The first gradient of a window is written into the bucket, so nothing need be zeroed;
        in the master type, autograd adds the others there by itself.
        """
        gradient = parameter.grad
        bucket, slot = self._bucket_of[name]
        view = bucket.gradient_of(slot)
        assert gradient is not None
        if gradient.data_ptr() == view.data_ptr():
            return
        if name in self._empty:
            self._empty.discard(name)
            view.copy_(gradient)
        else:
            view.add_(gradient)  # fp32 sum of bf16 terms
        parameter.grad = view if self._compute == self._master else None

    def ready(self, name: str) -> None:
        bucket, slot = self._bucket_of[name]
        if name in self._empty:  # the loss did not reach it
            self._empty.discard(name)
            bucket.gradient_of(slot).zero_()
        bucket.waiting -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].waiting <= 0:
            bucket = self.buckets[self._next]
            tag = f"gradient {self._label}{self._next}"
            bucket.handle = self._group.all_reduce(bucket.gradient, tag=tag)
            self._next += 1

    def end_microbatch(self) -> None:
        """Nothing to free: weights and gradients stay where they are."""

    def close_window(self) -> tuple[str, ...]:
        """Let every bucket leave. Returns the names the loss did not reach."""
        assert self._readiness is not None
        return self._readiness.end_window()

    def finish_window(self) -> None:
        """Wait for every bucket."""
        with self._ring.span(Kind.REDUCE, "buckets"):
            for bucket in self.buckets:
                if bucket.handle is not None:
                    bucket.handle.wait()
                    bucket.handle = None
                if bucket.total is not bucket.gradient:
                    bucket.total.add_(bucket.gradient)

    # -- after it ------------------------------------------------------------------------------

    def owned(self) -> list[Owned]:
        """All trainable parameters, whole. The norm is counted by one rank of each parameter."""
        found = []
        for index, (name, (bucket, slot)) in enumerate(self._bucket_of.items()):
            placement = self._table[name]
            first = all(
                self._coordinates[axis] == 0
                for axis in placement.replicated_over
                if axis not in _REDUCED_OVER
            )
            found.append(
                Owned(
                    name=name,
                    rectangle=placement.held[0],
                    below=placement.held[1:],
                    weight=self._masters[name],
                    gradient=bucket.view(slot, bucket.total),
                    decays=placement.decays,
                    counts=first and index % self._group.size == self._group.index,
                )
            )
        return found

    def publish(self) -> None:
        """Give compute the updated weights."""
        if self._compute != self._master:
            for name, weight in self._weights.items():
                weight.copy_(self._masters[name])

    def full_weight(self, name: str) -> Tensor:
        """What this rank's tensor group computes with, in the master type."""
        return self._masters[name]

    def full_gradient(self, name: str) -> Tensor:
        """The reduced gradient of the same."""
        bucket, slot = self._bucket_of[name]
        return bucket.view(slot, bucket.total)

    def state_bytes(self) -> tuple[int, int]:
        """Bytes really held: `(weights, gradients at their peak)`."""
        weights = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                   for t in [*self._masters.values(), *self._weights.values()]}  # fmt: skip
        gradients = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                     for b in self.buckets for t in (b.gradient, b.total)}  # fmt: skip
        return sum(weights.values()), sum(gradients.values())
