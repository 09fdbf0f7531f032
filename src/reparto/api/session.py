"""A session: one rank's place in a plan, from which trainers are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from reparto.api.module import Loss, ModuleTrainer
from reparto.api.share import Settings
from reparto.comm.mesh import Mesh, single_mesh
from reparto.config.plan import Plan
from reparto.config.run import Synchronize
from reparto.data.dataset import MapDataset
from reparto.errors import UserError
from reparto.partition.grid import Grid
from reparto.partition.legal import check_plan

SampleT = TypeVar("SampleT")
BatchT = TypeVar("BatchT")

#: axes that cut a module itself, for which a foreign one would need a table of rules
_CUT_AXES = ("tensor", "pipeline", "context", "expert")


def read_plan(plan: Plan | str) -> Plan:
    """A plan that any module can be shared out by. Raises `UserError` for the others."""
    found = Plan.parse(plan, where="plan") if isinstance(plan, str) else plan
    check_plan(found)
    for axis in _CUT_AXES:
        if getattr(found, axis) > 1:
            raise UserError(
                f"{axis}={getattr(found, axis)} cuts the module itself, which takes rules that "
                "only our own models carry",
                where="plan",
                legal="data, shard, replicas, num_microbatches, recompute, gradient_sync",
                nearest=found.model_copy(update={axis: 1}).text,
            )
    return found


def _sizes(grid: Grid) -> str:
    return f"replicas {grid.replicas} x data {grid.data}"


class Session:
    """This process among those that a plan asks for.

    `launch` makes one for every worker. Make one yourself for a single process, `Session()`, or
    give it the mesh of ranks that are there already.
    """

    def __init__(
        self,
        plan: Plan | str = "data=1",
        *,
        mesh: Mesh | None = None,
        run_dir: Path | None = None,
        resume: bool = False,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """plan           its text form, a TOML file or a `Plan`
        mesh           the ranks; None for the only one
        run_dir        folder of key and checkpoints; without it nothing can be saved
        resume         whether trainers go on from the newest whole checkpoint there
        asked_to_stop  true once this process has been asked to end

        Raises `UserError` if plan and ranks do not fit together.
        """
        self.plan = read_plan(plan)
        self.mesh = mesh or single_mesh()
        here, wanted = self.mesh.grid, Grid.of(self.plan)
        if here != wanted:
            raise UserError(
                f"the plan `{self.plan.text}` is for {wanted.world_size} ranks "
                f"({_sizes(wanted)}), the mesh has {here.world_size} ({_sizes(here)})",
                where="Session",
                legal="a mesh of the plan's own sizes",
                nearest=f'launch(main, plan="{self.plan.text}"), which starts the ranks',
            )
        if resume and run_dir is None:
            raise UserError("is where checkpoints lie", where="run_dir", legal="a folder")
        self.run_dir = run_dir
        self.resume = resume
        self.asked_to_stop = asked_to_stop

    @property
    def rank(self) -> int:
        """Number of this process, from 0. Rank 0 is the one that should print and write."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.plan.world_size

    def trainer(
        self,
        build: Callable[[], nn.Module],
        loss: Loss[BatchT],
        dataset: MapDataset[SampleT],
        *,
        steps: int,
        batch_size: int,
        collate: Callable[[list[SampleT]], BatchT] | None = None,
        seed: int = 1,
        synchronize: Synchronize | None = None,
        precision: str = "float32",
        save_every: int = 0,
        blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        initial: Callable[[str], Tensor] | None = None,
        decays: Callable[[str], bool] | None = None,
        loader_workers: int = 1,
    ) -> ModuleTrainer[SampleT, BatchT]:
        """Share a module out and make everything that trains it. Every rank calls it alike.

        build        makes the module; called once on every rank with torch's generator started
                     from `seed`, and its weights must come out equal everywhere
        loss         (module, batch) -> (sum of losses, how many were summed)
        dataset      `len(dataset)` and `dataset[i]`, the same at every call
        steps        length of the training, for which learning rates are made
        batch_size   samples a step, over all ranks
        collate      samples to a batch; None stacks tensors, arrays, numbers, tuples and dicts
        seed         of weights, order of samples and random numbers of forward
        synchronize  optimizer, learning rate, clipping
        precision    of forward and backward: float32, bfloat16 (sums and updates stay float32) or
                     float64; batches are the caller's to convert
        save_every   steps between checkpoints, and one at the end; 0 saves only when asked
        blocks       modules that are gathered together; None finds them by watching one forward
        initial      global name -> initial weight, for a module that `build` makes on `meta`
        decays       global name -> whether weight decay applies; None: tensors of two dims or more
        loader_workers  threads that read ahead; 0 reads when a step asks

        Raises `UserError` for what cannot be shared out, alike on every rank.
        """
        return ModuleTrainer(
            self,
            build,
            loss,
            dataset,
            Settings(
                steps=steps,
                batch_size=batch_size,
                seed=seed,
                synchronize=synchronize or Synchronize(),
                precision=precision,
                save_every=save_every,
            ),
            collate=collate,
            blocks=blocks,
            initial=initial,
            decays=decays,
            loader_workers=loader_workers,
        )
