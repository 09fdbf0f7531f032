"""The strategies of all chunks of a rank as one, and what crosses pipeline and tensor ranks between
reduction and update.

A rank has one strategy (`data.Buckets` or `zero.Zero`) for each of its chunks. The optimizer, the
checkpoint and `verify` see one list of owned rows. Two sums are left when the strategies are done:

    partial gradients  of what the tensor group does not cut but sees in parts (norms, row biases)
    tied gradients     of a weight whose places are on two pipeline positions

Note: tied copies
    The copy is reduced over data like any weight, so that its owner gets one finished sum. What
    crosses is therefore only the owned rows: 1 / n of the tensor with n shards, where adding before
    the reduction would send the whole gradient of every data rank. The owner counts it once in the
    norm, holds the moments, updates, and sends the same rows back before weights are published, so
    both places hold equal bits after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from reparto.comm.collectives import Communicator, Handle
from reparto.comm.mesh import Mesh
from reparto.parallel.flat import Owned
from reparto.parallel.gradients import WeightGradients
from reparto.partition.experts import EXPERT_COPIES
from reparto.partition.place import Holding
from reparto.partition.tensors import Placement, Rectangle


class Strategy(Protocol):
    """What `data.Buckets` and `zero.Zero` have in common, after backward."""

    def begin_step(self) -> None: ...

    def end_microbatch(self) -> None: ...

    def owned(self) -> list[Owned]: ...

    def publish(self) -> None: ...

    def full_weight(self, name: str) -> Tensor: ...

    def full_gradient(self, name: str) -> Tensor: ...

    def state_bytes(self) -> tuple[int, int]: ...


class Reducer(Strategy, Protocol):
    """What `data.Buckets` and `zero.Zero` have in common."""

    def attach(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        uses: Mapping[str, int],
        deferred: WeightGradients,
    ) -> None: ...

    def memory(self, name: str) -> Tensor: ...

    def begin_window(self, num_microbatches: int) -> None: ...

    def close_window(self) -> tuple[str, ...]: ...

    def finish_window(self) -> None: ...

    def start_unshard(self, stage: int, names: Collection[str] | None = None) -> None: ...

    def finish_unshard(self, stage: int) -> None: ...

    def reshard(self, stage: int) -> None: ...


class Both:
    """Two strategies of one chunk as one: of what all ranks have, and of shared-out experts.

    They reduce in different groups, so each keeps its own order of messages.
    """

    def __init__(self, parts: Sequence[tuple[Reducer, Sequence[str]]]) -> None:
        """The strategies and the names of the parameters that each keeps."""
        self._all = [one for one, _ in parts]
        self._keeper = {name: one for one, names in parts for name in names}

    def attach(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        uses: Mapping[str, int],
        deferred: WeightGradients,
    ) -> None:
        for one in self._all:
            one.attach(model, blocks, uses=uses, deferred=deferred)

    def memory(self, name: str) -> Tensor:
        return self._keeper[name].memory(name)

    def begin_step(self) -> None:
        for one in self._all:
            one.begin_step()

    def begin_window(self, num_microbatches: int) -> None:
        for one in self._all:
            one.begin_window(num_microbatches)

    def end_microbatch(self) -> None:
        for one in self._all:
            one.end_microbatch()

    def close_window(self) -> tuple[str, ...]:
        return tuple(name for one in self._all for name in one.close_window())

    def finish_window(self) -> None:
        for one in self._all:
            one.finish_window()

    def start_unshard(self, stage: int, names: Collection[str] | None = None) -> None:
        for one in self._all:
            one.start_unshard(stage, names)

    def finish_unshard(self, stage: int) -> None:
        for one in self._all:
            one.finish_unshard(stage)

    def reshard(self, stage: int) -> None:
        for one in self._all:
            one.reshard(stage)

    def owned(self) -> list[Owned]:
        return [owned for one in self._all for owned in one.owned()]

    def publish(self) -> None:
        for one in self._all:
            one.publish()

    def full_weight(self, name: str) -> Tensor:
        return self._keeper[name].full_weight(name)

    def full_gradient(self, name: str) -> Tensor:
        return self._keeper[name].full_gradient(name)

    def state_bytes(self) -> tuple[int, int]:
        sizes = [one.state_bytes() for one in self._all]
        return sum(weights for weights, _ in sizes), sum(gradients for _, gradients in sizes)


class Joined:
    """All strategies of a rank."""

    def __init__(
        self,
        strategies: Mapping[int, Strategy],
        *,
        names: Mapping[int, Sequence[str]],
        held: Holding,
        stored: Callable[[str], str],
        mesh: Mesh,
        master: torch.dtype,
    ) -> None:
        """`strategies` and the `names` they keep by virtual stage; `stored` undoes aliases."""
        self._strategies = dict(strategies)
        self._keeper = {name: strategies[stage] for stage, mine in names.items() for name in mine}
        self._held, self._stored, self._mesh, self._master = held, stored, mesh, master
        self._pipeline = mesh.group("pipeline")
        self._local = {stored(name): name for name in self._keeper}

    # -- a step --------------------------------------------------------------------------------

    def end_microbatch(self) -> None:
        """After a forward that no backward follows: give back weights that were gathered ahead."""
        for one in self._strategies.values():
            one.end_microbatch()

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for one in self._strategies.values():
            one.begin_step()

    def settle(self) -> None:
        """After all reductions: the sums that are left, so that owned gradients are final."""
        everything = [one for each in self._strategies.values() for one in each.owned()]
        sum_partial(everything, self._held.table, self._mesh.group("tensor"))
        self._exchange(everything, back=False)

    def publish(self) -> None:
        """Give compute the updated weights, tied copies first."""
        everything = [one for each in self._strategies.values() for one in each.owned()]
        self._exchange(everything, back=True)
        for one in self._strategies.values():
            one.publish()

    def _exchange(self, everything: Sequence[Owned], *, back: bool) -> None:
        """Tied gradients from copies to owners, or (`back`) tied weights from owners to copies."""
        held = self._held
        if not held.copies and not held.copied_to:
            return
        owned = {one.name: one for one in everything}
        going: list[tuple[Handle, Tensor]] = []
        coming: list[tuple[Handle, Tensor, Tensor]] = []
        what = "tied-weight" if back else "tied-gradient"
        pairs = [(name, name, held.copied_to[name], True) for name in sorted(held.copied_to)]
        pairs += [(self._stored(name), name, (held.copied_from[name],), False)
                  for name in sorted(held.copies, key=self._stored)]  # fmt: skip
        for stored, local, peers, is_owner in pairs:
            one = owned.get(local)
            if one is None or (not back and one.gradient is None):
                continue  # this shard has no rows of it, and neither has the peer's
            mine = one.weight if back else one.gradient
            assert mine is not None
            for peer in peers:
                tag = f"{what} {stored}"
                if is_owner == back:
                    sent = mine.detach().contiguous()
                    going.append((self._pipeline.send(sent, to=peer, tag=tag), sent))
                else:
                    buffer = torch.empty_like(mine, memory_format=torch.contiguous_format)
                    handle = self._pipeline.recv(buffer, source=peer, tag=tag)
                    coming.append((handle, buffer, mine))
        with torch.no_grad():
            for handle, arrived, mine in coming:
                handle.wait()
                mine.copy_(arrived) if back else mine.add_(arrived)
        for handle, _ in going:
            handle.wait()

    # -- views ---------------------------------------------------------------------------------

    def owned(self) -> list[Owned]:
        """Every part of a parameter that this rank updates; tied copies belong to their owner."""
        return [
            one
            for each in self._strategies.values()
            for one in each.owned()
            if one.name not in self._held.copies
        ]

    def full_weight(self, name: str) -> Tensor:
        """The whole master weight under its global name. Call it on every rank of the job."""
        return self._whole(name, lambda keeper, local: keeper.full_weight(local))

    def full_gradient(self, name: str) -> Tensor:
        """The whole reduced gradient. Call it on every rank of the job."""
        return self._whole(name, lambda keeper, local: keeper.full_gradient(local))

    def _whole(self, name: str, read: Callable[[Strategy, str], Tensor]) -> Tensor:
        stored = self._stored(name)
        local = self._local.get(stored)
        placement = self._held.tensor_held[stored]
        part = None if local is None else read(self._keeper[local], local)
        group = self._mesh.group("weights")
        if group.size == 1:
            assert part is not None
            return part
        whole = torch.zeros(placement.shape, dtype=self._master)
        if part is not None and local not in self._held.copies and self._speaks(placement):
            _paste(whole, placement.held, part)
        group.all_reduce(whole, tag=f"inspect {name}"[:60]).wait()
        return whole

    def _speaks(self, placement: Placement) -> bool:
        here = self._mesh.coordinates
        if EXPERT_COPIES not in placement.replicated_over and here.get("expert", 0):
            return False
        return "tensor" not in placement.replicated_over or here["tensor"] == 0

    def state_bytes(self) -> tuple[int, int]:
        """Bytes really held: `(weights between steps, gradients at their peak)`."""
        sizes = [one.state_bytes() for one in self._strategies.values()]
        return sum(weights for weights, _ in sizes), sum(gradients for _, gradients in sizes)


def sum_partial(
    owned: Sequence[Owned], table: Mapping[str, Placement], group: Communicator
) -> None:
    """Sum the gradients of which each tensor rank has a term: norm weights, row biases.

    After the reduction over data, on owned rows: the same rows on every rank of the group. One
    message for all of them.
    """
    if group.size == 1:
        return
    partial = [
        one.gradient
        for one in owned
        if "tensor" in table[one.name].partial_over and one.gradient is not None
    ]
    if not partial:
        return
    flat = torch.cat([one.reshape(-1) for one in partial])
    group.all_reduce(flat, tag="partial gradients").wait()
    start = 0
    for one in partial:
        one.copy_(flat[start : start + one.numel()].view_as(one))
        start += one.numel()


def cut_local(whole: Tensor, held: Sequence[Rectangle]) -> Tensor:
    """What a tensor rank computes with: the held rectangles one below the other."""
    parts = [_box(whole, one) for one in held]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _paste(whole: Tensor, held: Sequence[Rectangle], part: Tensor) -> None:
    first = 0
    for box in held:
        rows = box.size[0] if box.size else 1
        _box(whole, box).copy_(part if len(held) == 1 else part[first : first + rows])
        first += rows


def _box(tensor: Tensor, box: Rectangle) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
