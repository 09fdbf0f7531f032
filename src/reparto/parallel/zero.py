"""Sharding (ZeRO 1 to 3): data-parallel ranks keep only a part of what they would all keep equal.

Equation.  Rank r of n owns rows r of every tensor and of its moments;
           g_r = reduce_scatter(grad)_r;   w_r <- adamw(w_r, g_r);   w = all_gather(w_r).

| `shard` | kept in parts | messages a step | payload a step, a rank |
|---|---|---|---|
| optimizer | moments | reduce_scatter gradients, all_gather weights | 4 W + 4 W |
| gradients | and gradients | the same; a full gradient is freed when sent | 4 W + 4 W |
| parameters | and weights | reduce_scatter gradients, all_gather weights twice | 4 W + 8 W |

Gradients leave as soon as a unit's are ready and hide behind the rest of backward. Weights are
gathered after the update and hide behind nothing; under `parameters` they are gathered before a
block's forward and backward and hide behind the neighbouring block.

(W = number of weights; fp32; one microbatch.)

It pays when the state does not fit: `none` keeps 16 bytes a weight, `parameters` 16 / n and two
gathered blocks. It stops paying when a block's gather takes longer than the compute of its
neighbour: 4 w (n-1)/n / bandwidth  >  2 w T_rank / speed,  that is  tokens a rank < 2 speed /
bandwidth. Source: Rajbhandari et al. 2020, sections 5 and 7.

One state machine serves the three modes. A unit is what is gathered or reduced together:

    weights     SHARDED -> UNSHARDING -> UNSHARDED -> SHARDED      (`optimizer`, `gradients`: always
                                                                    UNSHARDED, refreshed by publish)
    gradients   EMPTY -> FILLING -> REDUCING -> (REPLICATING) -> REDUCED

Full weights of a sharded unit live in one storage that is emptied and filled again in place, so
that what autograd saved in forward is valid in backward. The rejected alternative, a pool of
buffers handed from block to block, saves page faults but needs a hook on every saved tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from reparto.comm.collectives import Handle
from reparto.comm.mesh import Mesh
from reparto.config.plan import Plan
from reparto.parallel.flat import (
    Owned,
    copy_in,
    copy_out,
    cut_rows,
    keeps_any,
    own_rows,
    tensors_in,
)
from reparto.parallel.gradients import Readiness, WeightGradients
from reparto.partition.flat import FlatLayout, Slot
from reparto.partition.tensors import Table
from reparto.trace import Kind

Initial = Callable[[str], Tensor]


class Weights(enum.Enum):
    """Where a unit's weights stand."""

    SHARDED = "only this rank's rows are in memory"
    UNSHARDING = "the rows of all ranks are on their way"
    UNSHARDED = "whole"


class Gradients(enum.Enum):
    """Where a unit's gradients stand within a window."""

    EMPTY = "no contribution yet"
    FILLING = "contributions are added into the unit's full buffer"
    REDUCING = "the reduce_scatter over the shard group is under way"
    REPLICATING = "the all_reduce over the replicas is under way"
    REDUCED = "this rank's rows hold the sum over all ranks"


class Unit:
    """Parameters that are gathered, reduced and freed together."""

    def __init__(self, name: str, layout: FlatLayout, *, shard: int, trainable: bool) -> None:
        self.name = name
        self.layout = layout
        self.shard = shard
        self.trainable = trainable
        self.slots: Mapping[str, Slot] = {slot.name: slot for slot in layout.slots}
        sizes = [slot.rows * slot.columns for slot in layout.slots]
        self._starts = dict(zip(self.slots, accumulate(sizes, initial=0), strict=False))
        self.weights = Weights.UNSHARDED
        self.gradients = Gradients.EMPTY
        self.piece: Tensor | None = None
        "this rank's master rows; None where they are rows of the full weights"
        self.full: Tensor | None = None
        "memory of the full weights, parameters one after another; emptied while SHARDED"
        self.gathered: Tensor | None = None
        "where the pieces arrive, (n, P)"
        self.buffer: Tensor | None = None
        "full gradients in the rank-major layout, (n, P)"
        self.gradient: Tensor | None = None
        "this rank's rows of the reduced gradient, (P)"
        self.arrival: Tensor | None = None
        "one window's reduced rows, where several windows are added up"
        self.unsharding: Handle | None = None
        self.reducing: Handle | None = None
        self.waiting = 0
        "parameters of the window that are not ready"
        self.pending = 0
        "parameters without a contribution in this microbatch"
        self.users: set[int] = set()
        "virtual stages that need the full weights, where a pipeline gathers them once a step"

    def view(self, name: str) -> Tensor:
        """A parameter inside the full weights."""
        assert self.full is not None
        slot, start = self.slots[name], self._starts[name]
        return self.full[start : start + slot.rows * slot.columns].view(slot.shape)

    @property
    def natural_numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(slot.rows * slot.columns for slot in self.layout.slots)


class Zero:
    """The three shard modes, with the same calls as `data.Buckets`."""

    def __init__(
        self,
        *,
        units: Sequence[FlatLayout],
        frozen_units: Sequence[FlatLayout] = (),
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
        """`initial(name)` is what the rank's tensor group computes with of the initial tensor.

        units         flat memory of the trainable parameters, in model order
        frozen_units  of those without a gradient; only `parameters` cuts them
        label         stands in tags, where a rank has several of these
        groups        beginning of the names of the groups they are cut over (`Part.groups`)
        """
        self._mesh, self._plan, self._table = mesh, plan, table
        self._reduce, self._gather = mesh.group(f"{groups}shard"), mesh.group(f"{groups}unshard")
        self._replicas = mesh.group("replicas")
        self._compute, self._master, self._device = compute, master, device
        self._windows = plan.num_microbatches if plan.gradient_sync == "microbatch" else 1
        self._sharded_weights = plan.shard == "parameters"
        self._free_buffers = plan.shard != "optimizer"
        shard = self._reduce.index
        trainable = [Unit(f"unit {label}{i}", one, shard=shard, trainable=True)
                     for i, one in enumerate(units)]  # fmt: skip
        frozen = [Unit(f"frozen {label}{i}", one, shard=shard, trainable=False)
                  for i, one in enumerate(frozen_units)]  # fmt: skip
        self.units = trainable
        "trainable units in model order"
        self._all_units = [*trainable, *frozen]
        self._unit_of = {name: unit for unit in self._all_units for name in unit.slots}
        self._leaving = list(reversed(trainable))  # the order in which gradients leave
        self._next = 0
        self._peak_gradient_bytes = 0
        self._by_block = self._sharded_weights and plan.pipeline == 1
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._readiness: Readiness | None = None
        self._place_weights(initial)

    def attach(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        uses: Mapping[str, int],
        deferred: WeightGradients,
    ) -> None:
        """Listen to the gradients of the parameters, which stand in the model now.

        `blocks` are called one after another: weights are gathered before and freed after each.
        """
        found = dict(model.named_parameters())
        self._parameters = {name: found[name] for name in self._unit_of}
        self._readiness = Readiness(self._parameters, self, uses=uses, deferred=deferred)
        if self._by_block:
            self._hook_blocks(model, blocks)

    # -- weights -------------------------------------------------------------------------------

    def _place_weights(self, initial: Initial) -> None:
        same = self._compute == self._master
        for unit in self._all_units:
            unit.full = torch.empty(unit.natural_numel, dtype=self._compute, device=self._device)
            cut = self._sharded_weights or (unit.trainable and not same)
            if cut:
                unit.piece = torch.zeros(
                    unit.layout.piece_numel, dtype=self._master, device=self._device
                )
            for name, slot in unit.slots.items():
                whole = initial(name)
                if unit.piece is not None and keeps_any(unit.layout, slot, unit.shard):
                    own_rows(unit.piece, unit.layout, slot, unit.shard).copy_(
                        cut_rows(whole, unit.layout, slot, unit.shard)
                    )
                if not self._sharded_weights:
                    unit.view(name).copy_(whole)
                del whole  # one full tensor at a time
            if self._sharded_weights:
                self._free_full(unit)

    def memory(self, name: str) -> Tensor:
        """The weight that forward and backward use."""
        unit = self._unit_of[name]
        if not self._sharded_weights:
            return unit.view(name)
        # `.data`: filling the storage again must not look like a change to autograd
        self._fill_storage(unit)
        view = unit.view(name).data
        self._free_full(unit)
        return view

    def _fill_storage(self, unit: Unit) -> None:
        assert unit.full is not None
        unit.full.untyped_storage().resize_(unit.natural_numel * self._compute.itemsize)

    def _free_full(self, unit: Unit) -> None:
        assert unit.full is not None
        unit.full.untyped_storage().resize_(0)
        unit.weights = Weights.SHARDED

    def _start_unit(self, unit: Unit) -> None:
        """SHARDED -> UNSHARDING: send this rank's rows, let the others' arrive."""
        if unit.weights is not Weights.SHARDED:
            return
        assert unit.piece is not None
        mine = unit.piece.to(self._compute)
        shards, piece = self._gather.size, unit.layout.piece_numel
        unit.gathered = torch.empty(shards, piece, dtype=self._compute, device=self._device)
        unit.unsharding = self._gather.all_gather(unit.gathered, mine, tag=f"weight {unit.name}")
        unit.weights = Weights.UNSHARDING

    def _finish_unit(self, unit: Unit) -> None:
        """-> UNSHARDED: the full weights are in place, whatever the state was."""
        if unit.weights is Weights.UNSHARDED:
            return
        self._start_unit(unit)
        assert unit.unsharding is not None and unit.gathered is not None
        with self._mesh.ring.span(Kind.UNSHARD, unit.name):
            unit.unsharding.wait()
            self._fill_storage(unit)
            with torch.no_grad():
                for name, slot in unit.slots.items():
                    copy_out(unit.view(name).data, unit.layout, slot, unit.gathered)
        unit.unsharding = unit.gathered = None
        unit.weights = Weights.UNSHARDED

    def reshard_unit(self, unit: Unit) -> None:
        """UNSHARDED -> SHARDED: give the full weights' memory back."""
        if unit.weights is Weights.UNSHARDED:
            self._free_full(unit)

    # -- pipeline stages -----------------------------------------------------------------------

    def start_unshard(self, stage: int, names: Collection[str] | None = None) -> None:
        """Begin to gather what a virtual stage needs: all units, or those of `names`."""
        if not self._sharded_weights or self._by_block:
            return
        for unit in self._all_units:
            if names is None or not unit.slots.keys().isdisjoint(names):
                unit.users.add(stage)
                self._start_unit(unit)

    def finish_unshard(self, stage: int) -> None:
        """Wait for them."""
        for unit in self._all_units:
            if stage in unit.users:
                self._finish_unit(unit)

    def reshard(self, stage: int) -> None:
        """The stage needs its weights no more; free what no other stage of this rank needs."""
        for unit in self._all_units:
            if stage in unit.users:
                unit.users.remove(stage)
                if not unit.users:
                    self._finish_unit(unit)
                    self.reshard_unit(unit)

    # -- blocks --------------------------------------------------------------------------------

    def _hook_blocks(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Gather before a block's forward and backward, free after; fetch one unit ahead."""
        needs: list[list[Unit]] = []
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for block in blocks:
            mine = [self._unit_of[names[id(one)]] for one in block.parameters() if id(one) in names]
            needs.append(list(dict.fromkeys(mine)))
        in_blocks = {names[id(one)] for block in blocks for one in block.parameters()
                     if id(one) in names}  # fmt: skip
        # parameters outside every block may be used at any time, so their units (which may hold
        # others too) stay from the beginning of forward to their last gradient
        always = [unit for unit in self._all_units if not unit.slots.keys() <= in_blocks]
        for needed in (needs[0], needs[-1]):
            needed += [unit for unit in always if unit not in needed]
        last_use = {id(unit): i for i, needed in enumerate(needs) for unit in needed
                    if unit not in always}  # fmt: skip
        reached = [True] * len(needs)  # whether backward will come to a block: not if frozen before
        for index, block in enumerate(blocks):
            self._hook_block(block, index, needs, last_use, reached)

        def before_model(module: nn.Module, inputs: object) -> None:
            for unit in always:
                self._finish_unit(unit)

        def after_model(module: nn.Module, inputs: object, output: object) -> None:
            if not torch.is_grad_enabled():
                for unit in always:
                    self.reshard_unit(unit)

        model.register_forward_pre_hook(before_model)
        model.register_forward_hook(after_model)

    def _hook_block(
        self,
        block: nn.Module,
        index: int,
        needs: list[list[Unit]],
        last_use: Mapping[int, int],
        reached: list[bool],
    ) -> None:
        final = len(needs) - 1

        def before_forward(module: nn.Module, inputs: object) -> None:
            for unit in needs[index]:
                self._finish_unit(unit)
            if index < final:
                for unit in needs[index + 1]:
                    self._start_unit(unit)

        def after_forward(module: nn.Module, inputs: object, output: object) -> None:
            grad = torch.is_grad_enabled()
            for unit in needs[index]:
                # backward begins with what the last block used, so that is kept
                if last_use.get(id(unit)) == index and not (grad and index == final):
                    self.reshard_unit(unit)
            outputs = [one for one in tensors_in(output) if one.requires_grad]
            reached[index] = grad and bool(outputs)
            if reached[index]:
                torch.autograd.graph.register_multi_grad_hook(outputs, before_backward, mode="any")

        def before_backward(gradient: Tensor) -> None:
            for unit in needs[index]:
                self._finish_unit(unit)
            if index and reached[index - 1]:
                for unit in needs[index - 1]:
                    self._start_unit(unit)

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)

    # -- a step --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        for unit in self.units:
            unit.gradient = None

    def begin_window(self, num_microbatches: int) -> None:
        """Start collecting `num_microbatches` contributions for one reduction."""
        self._next = 0
        for unit in self.units:
            unit.gradients = Gradients.EMPTY
            unit.waiting = unit.pending = len(unit.slots)
        assert self._readiness is not None, "attach comes first"
        self._readiness.begin_window(num_microbatches)

    def contributed(self, name: str, parameter: Tensor) -> None:
        """Add the microbatch's gradient into the unit's full buffer, and drop it."""
        unit = self._unit_of[name]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        buffer = self._buffer(unit)
        copy_in(buffer, unit.layout, unit.slots[name], gradient, add=True)
        unit.pending -= 1
        if unit.pending == 0:  # every weight of the unit has been used for the last time
            unit.pending = len(unit.slots)
            if self._by_block:
                self.reshard_unit(unit)

    def place(self, name: str) -> None:
        """Rows lie rank by rank in the buffer, so a matmul cannot write them there."""

    def _buffer(self, unit: Unit) -> Tensor:
        if unit.gradients is Gradients.EMPTY:
            unit.gradients = Gradients.FILLING
            shape = (self._reduce.size, unit.layout.piece_numel)
            if unit.buffer is None:
                unit.buffer = torch.zeros(shape, dtype=self._master, device=self._device)
            else:
                unit.buffer.zero_()
            self._note_gradient_bytes()
        assert unit.buffer is not None
        return unit.buffer

    def ready(self, name: str) -> None:
        self._unit_of[name].waiting -= 1
        while self._next < len(self._leaving) and self._leaving[self._next].waiting <= 0:
            if self._next and self._free_buffers:
                self._finish_reduce(self._leaving[self._next - 1])  # at most one buffer under way
            self._start_reduce(self._leaving[self._next])
            self._next += 1

    def _start_reduce(self, unit: Unit) -> None:
        buffer = self._buffer(unit)
        piece = torch.empty(unit.layout.piece_numel, dtype=self._master, device=self._device)
        unit.arrival = piece
        if unit.gradient is None:
            unit.gradient = piece
        self._note_gradient_bytes()
        unit.reducing = self._reduce.reduce_scatter(piece, buffer, tag=f"gradient {unit.name}")
        unit.gradients = Gradients.REDUCING

    def _finish_reduce(self, unit: Unit) -> None:
        if unit.gradients is Gradients.REDUCED:
            return
        assert unit.reducing is not None and unit.arrival is not None
        with self._mesh.ring.span(Kind.REDUCE, unit.name):
            unit.reducing.wait()
            unit.gradients = Gradients.REPLICATING
            self._replicas.all_reduce(unit.arrival, tag=f"replica {unit.name}").wait()
            assert unit.gradient is not None
            if unit.gradient is not unit.arrival:
                unit.gradient.add_(unit.arrival)
        unit.arrival = unit.reducing = None
        if self._free_buffers:
            unit.buffer = None
        unit.gradients = Gradients.REDUCED

    def end_microbatch(self) -> None:
        """Free weights that this microbatch's backward has not freed itself."""
        for unit in self._all_units:
            unit.pending = len(unit.slots)
            if self._by_block:
                if unit.weights is Weights.UNSHARDING:
                    self._finish_unit(unit)
                self.reshard_unit(unit)

    def close_window(self) -> tuple[str, ...]:
        """Let every unit's gradients leave. Returns the names the loss did not reach."""
        assert self._readiness is not None
        return self._readiness.end_window()

    def finish_window(self) -> None:
        """Wait for every reduction."""
        for unit in self.units:
            self._finish_reduce(unit)

    # -- after it ------------------------------------------------------------------------------

    def owned(self) -> list[Owned]:
        """This rank's rows of every trainable parameter. One replica counts for the norm."""
        found = []
        for unit in self.units:
            piece = unit.gradient
            for name, slot in unit.slots.items():
                if not keeps_any(unit.layout, slot, unit.shard):
                    continue
                found.append(
                    Owned(
                        name=name,
                        rectangle=self._table[name].held[0],
                        below=self._table[name].held[1:],
                        weight=self._own_weight(unit, name, slot),
                        gradient=None
                        if piece is None
                        else own_rows(piece, unit.layout, slot, unit.shard),
                        decays=self._table[name].decays,
                        counts=all(
                            self._mesh.coordinates[axis] == 0
                            for axis in self._table[name].replicated_over
                        ),
                    )
                )
        return found

    def _own_weight(self, unit: Unit, name: str, slot: Slot) -> Tensor:
        if unit.piece is not None:
            return own_rows(unit.piece, unit.layout, slot, unit.shard)
        return cut_rows(unit.view(name), unit.layout, slot, unit.shard)

    def publish(self) -> None:
        """Give compute the updated weights: gather them now, or before each block's forward."""
        if self._sharded_weights:
            return
        for unit in self.units:
            mine = self._send_piece(unit)
            gathered = torch.empty(
                self._gather.size, mine.numel(), dtype=self._compute, device=self._device
            )
            self._gather.all_gather(gathered, mine, tag=f"weight {unit.name}").wait()
            with torch.no_grad():
                for name, slot in unit.slots.items():
                    copy_out(unit.view(name), unit.layout, slot, gathered)

    def _send_piece(self, unit: Unit) -> Tensor:
        if unit.piece is not None:
            return unit.piece.to(self._compute)
        piece = torch.zeros(unit.layout.piece_numel, dtype=self._compute, device=self._device)
        for name, slot in unit.slots.items():
            if keeps_any(unit.layout, slot, unit.shard):
                own_rows(piece, unit.layout, slot, unit.shard).copy_(
                    cut_rows(unit.view(name), unit.layout, slot, unit.shard)
                )
        return piece

    def full_weight(self, name: str) -> Tensor:
        """What this rank's tensor group computes with, in the master type where that is kept.

        Gathered; call it on every rank of the shard group.
        """
        unit = self._unit_of[name]
        if unit.piece is None:
            return unit.view(name)
        return self._gather_slot(unit, name, unit.piece, "weight")

    def full_gradient(self, name: str) -> Tensor:
        """The reduced gradient of the same, gathered; call it on every rank of the shard group."""
        unit = self._unit_of[name]
        assert unit.gradient is not None
        return self._gather_slot(unit, name, unit.gradient, "gradient")

    def _gather_slot(self, unit: Unit, name: str, piece: Tensor, what: str) -> Tensor:
        slot = unit.slots[name]
        mine = piece[slot.offset : slot.offset + slot.numel]
        pieces = torch.empty(self._gather.size, slot.numel, dtype=piece.dtype, device=piece.device)
        self._gather.all_gather(pieces, mine, tag=f"inspect {what} {name}"[:60]).wait()
        alone = FlatLayout(
            num_shards=self._gather.size,
            slots=(Slot(name=name, shape=slot.shape, offset=0, numel=slot.numel),),
            piece_numel=slot.numel,
        )
        whole = torch.empty(slot.shape, dtype=piece.dtype, device=piece.device)
        copy_out(whole, alone, alone.slots[0], pieces)
        return whole

    # -- bytes ---------------------------------------------------------------------------------

    def _note_gradient_bytes(self) -> None:
        held = {
            one.data_ptr(): one.untyped_storage().nbytes()
            for unit in self.units
            for one in (unit.buffer, unit.gradient, unit.arrival)
            if one is not None
        }
        self._peak_gradient_bytes = max(self._peak_gradient_bytes, sum(held.values()))

    def state_bytes(self) -> tuple[int, int]:
        """Bytes really held: `(weights between steps, gradients at their peak)`."""
        weights = 0
        for unit in self._all_units:
            for one in (unit.piece, unit.full):
                if one is not None:
                    weights += one.untyped_storage().nbytes()
        return weights, self._peak_gradient_bytes
