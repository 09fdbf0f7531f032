"""A foreign module trained under a plan, made from a function, a loss and a dataset.

Steps are those of `train/step.py`: the loader's microbatches, one word, one update. What is here is
what a loop over them needs, so that a script of the user's own has ten lines.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from reparto.api.agree import buffer_facts, compare
from reparto.api.keep import Keeper, persistent_buffers
from reparto.api.probe import checked_loss, evaluating
from reparto.api.share import Settings, build_equal, share
from reparto.data.dataset import MapDataset
from reparto.data.loader import Loader
from reparto.errors import Fault, UserError
from reparto.parallel.compose import Parallel
from reparto.parallel.flat import aliases, unique_parameters
from reparto.partition.tokens import evaluation_cells
from reparto.trace import Kind
from reparto.train.step import StepResult, Trainer

if TYPE_CHECKING:
    from reparto.api.session import Session

SampleT = TypeVar("SampleT")
BatchT = TypeVar("BatchT")

#: (module, batch) -> (sum of losses, how many were summed)
Loss = Callable[[nn.Module, BatchT], tuple[Tensor, Tensor | int]]


class ModuleTrainer(Generic[SampleT, BatchT]):
    """One rank's part of a training; `for result in trainer:` makes all steps that are left.

    Made by `Session.trainer`. Every method but the properties is called by every rank alike.
    """

    def __init__(
        self,
        session: Session,
        build: Callable[[], nn.Module],
        loss: Loss[BatchT],
        dataset: MapDataset[SampleT],
        settings: Settings,
        *,
        collate: Callable[[list[SampleT]], BatchT] | None,
        blocks: Callable[[nn.Module], Sequence[nn.Module]] | None,
        initial: Callable[[str], Tensor] | None,
        decays: Callable[[str], bool] | None,
        loader_workers: int,
    ) -> None:
        self._session, self._settings = session, settings
        self._loss, self._dataset, self._workers = loss, dataset, loader_workers
        self._collate = collate or cast("Callable[[list[SampleT]], BatchT]", default_collate)
        self.step = 0
        "the last step that was made"
        self.stopped_by: tuple[int, ...] = ()
        "ranks that were asked to stop, which ends the training early"
        self._named: set[str] = set()
        self._skipped_in_a_row = 0
        self._saved = -1
        if not isinstance(dataset, Sized):
            raise UserError("has no length", where="dataset", legal="len(dataset), dataset[i]")
        if settings.save_every and session.run_dir is None:
            raise UserError("needs a run_dir to write to", where="save_every", nearest="0")
        self._loader = self._loader_from(0)
        model = build_equal(
            build,
            mesh=session.mesh,
            settings=settings,
            num_samples=len(dataset),
            on_meta=initial is not None,
        )
        shared = share(
            model,
            mesh=session.mesh,
            plan=session.plan,
            precision=settings.precision,
            loss=loss,
            batches=self._probe_batches,
            blocks=blocks,
            initial=initial,
            decays=decays,
        )
        self._parallel = shared.parallel
        self._evaluates_with_graph = shared.evaluates_with_graph
        if session.rank == 0:
            for text in shared.warnings:
                warnings.warn(text, stacklevel=3)
        self._trainer: Trainer[BatchT] = Trainer(
            self._parallel,
            loss=self._training_loss,
            synchronize=settings.synchronize,
            steps=settings.steps,
        )
        optimizer = self._trainer.make_optimizer()
        self._keeper = None
        if session.run_dir is not None:
            self._keeper = Keeper(session.run_dir, self._parallel, optimizer)
            if session.resume:
                self._take_up(self._keeper)

    # -- making --------------------------------------------------------------------------------

    def _loader_from(self, position: int) -> Loader[SampleT, BatchT]:
        plan, mesh, settings = self._session.plan, self._session.mesh, self._settings
        return Loader(
            self._dataset,
            lambda samples, pad_to: self._collate(list(samples)),  # sums need no equal shapes
            seed=settings.seed,
            batch_size=settings.batch_size,
            data_degree=plan.data,
            data_rank=mesh.grid.batch_index(mesh.rank),
            num_microbatches=plan.num_microbatches,
            position=position,
            workers=self._workers,
        )

    def _probe_batches(self) -> list[BatchT]:
        """Two samples together, and each alone."""
        samples = [self._dataset[index] for index in range(min(2, len(self._dataset)))]
        alone = [self._collate([one]) for one in samples] if len(samples) == 2 else []
        return [self._collate(samples), *alone]

    def _training_loss(self, model: nn.Module, batch: BatchT) -> tuple[Tensor, Tensor]:
        total, count = checked_loss(self._loss, model, batch)
        if not total.requires_grad:
            raise UserError("does not depend on a trainable parameter", where="loss")
        return total, count

    # -- steps ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[StepResult]:
        return self

    def __next__(self) -> StepResult:
        """One step. Raises `Fault` if the training cannot go on."""
        if self.step >= self._settings.steps or self.stopped_by:
            self._finish()
            raise StopIteration
        number, mesh = self.step + 1, self._session.mesh
        position = self._loader.position
        mesh.ring.set_step(number)
        with mesh.ring.span(Kind.DATA_WAIT, "loader"):
            microbatches = next(self._loader)
        # the generator itself: `torch.manual_seed` looks at the stack each time, for 1 ms
        torch.default_generator.manual_seed(_seed_of_step(self._settings.seed, number, mesh.rank))
        result = self._trainer.step(
            microbatches, number=number, position=position, stop=self._session.asked_to_stop()
        )
        self.step = number
        self.stopped_by = result.agreed.stop
        self._name_untouched(result)
        self._count_skipped(result)
        every = self._settings.save_every
        if every and number % every == 0:
            self.save()
        return result

    def _finish(self) -> None:
        """The end of the loop: threads end; the last step is saved if steps were to be."""
        self._loader.close()
        if self._settings.save_every and self._saved != self.step:
            self.save()

    def _name_untouched(self, result: StepResult) -> None:
        fresh = [name for name in result.untouched if name not in self._named]
        if fresh:
            self._named.update(fresh)
            warnings.warn(
                f"step {self.step}: the loss of rank {self._session.rank} does not reach "
                f"{len(fresh)} parameters, whose gradient is taken as 0: {', '.join(fresh)}",
                stacklevel=3,
            )

    def _count_skipped(self, result: StepResult) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        most = self._settings.synchronize.max_skipped
        if self._skipped_in_a_row >= most:
            ranks = ", ".join(map(str, result.agreed.unfinite)) or "none: nothing was counted"
            raise Fault(
                f"step {self.step}: {most} steps in a row were not finite (rank {ranks}); lower "
                "synchronize.learning_rate"
            )

    # -- looking -------------------------------------------------------------------------------

    @property
    def parallel(self) -> Parallel:
        """The module as this rank holds it, with its placement table."""
        return self._parallel

    @property
    def position(self) -> int:
        """Samples consumed so far, over all ranks."""
        return self._loader.position

    def evaluate(
        self, dataset: MapDataset[SampleT], *, loss: Loss[BatchT] | None = None
    ) -> tuple[float, int]:
        """`(mean loss, count)` over every sample exactly once; equal on every rank.

        loss  another one than that of the training, with the same contract
        """
        chosen = loss or self._loss
        sums = torch.zeros(2, dtype=torch.float64)

        def add(cell: range, batch: BatchT) -> None:
            total, count = checked_loss(chosen, self._parallel.model, batch)
            if cell:
                sums.add_(torch.stack([total.double(), count.double()]).detach())

        self._run_over(dataset, add)
        self._session.mesh.group("batch").all_reduce(sums, tag="evaluation").wait()
        total, count = sums.tolist()
        return (total / count if count else 0.0), int(count)

    def per_sample(
        self, dataset: MapDataset[SampleT], function: Callable[[nn.Module, BatchT], Tensor]
    ) -> Tensor:
        """`function(module, batch)`, a value a sample, over the whole dataset and in its order.

        Returns (len(dataset),) float64, equal on every rank.
        """
        values = torch.zeros(len(dataset), dtype=torch.float64)

        def put(cell: range, batch: BatchT) -> None:
            found = function(self._parallel.model, batch).detach().double()
            if cell and found.shape != (len(cell),):
                raise UserError(
                    f"gave values of shape {list(found.shape)} for {len(cell)} samples",
                    where="function",
                    legal=f"[{len(cell)}]: one a sample",
                )
            values[cell.start : cell.stop] = found if cell else values[:0]

        self._run_over(dataset, put)
        self._session.mesh.group("batch").all_reduce(values, tag="per sample").wait()
        return values

    def _run_over(self, dataset: MapDataset[SampleT], use: Callable[[range, BatchT], None]) -> None:
        """Batches of a dataset, each sample on one rank; sharded ranks must run equally often.

        Where a rank has none left it sends sample 0 through and `use` gets an empty range.
        """
        if not len(dataset):
            raise UserError("has no samples", where="dataset", legal="at least one")
        mesh, strategy = self._session.mesh, self._parallel.strategy
        cells = evaluation_cells(
            len(dataset),
            self._session.plan.data,
            mesh.grid.batch_index(mesh.rank),
            self._loader.split.sequences,
        )
        with (
            evaluating(self._parallel.model),
            mesh.ring.span(Kind.EVALUATE, "dataset"),
            torch.set_grad_enabled(self._evaluates_with_graph),
        ):
            for cell in cells:
                samples = [dataset[index] for index in cell] or [dataset[0]]
                use(cell, self._collate(samples))
                strategy.end_microbatch()  # weights that were gathered ahead are given back

    def full_state_dict(self) -> dict[str, Tensor]:
        """All weights and buffers whole, for `build().load_state_dict(...)`, on rank 0.

        Weights come in the type of sums and updates, gathered one at a time. Other ranks take part
        and get an empty dictionary. Raises `Fault` if buffers differ between ranks.
        """
        self._compare_buffers()
        found: dict[str, Tensor] = {}
        for name in unique_parameters(self._parallel.model):
            whole = self._parallel.strategy.full_weight(name)
            if self._session.rank == 0:
                found[name] = whole.detach().to("cpu", copy=True)
        if self._session.rank == 0:
            for alias, name in aliases(self._parallel.model).items():
                found[alias] = found[name]
            for name, one in persistent_buffers(self._parallel.model).items():
                found[name] = one.detach().to("cpu", copy=True)
        return found

    def _compare_buffers(self) -> None:
        compare(
            self._session.mesh,
            buffer_facts(self._parallel.model),
            tag="buffers",
            differ=lambda text: Fault(
                f"step {self.step}: buffers have drifted apart, so no one state is right:\n{text}\n"
                "  next: keep buffers as they are while training over several data ranks"
            ),
        )

    # -- keeping -------------------------------------------------------------------------------

    def save(self) -> Path:
        """A checkpoint of the last step, under `run_dir/checkpoints`. Raises `SaveFailed`."""
        if self._keeper is None:
            raise UserError(
                "there is no folder to save in",
                where="run_dir",
                legal="a folder",
                nearest='launch(main, plan=..., run_dir="runs/mine")',
            )
        self._compare_buffers()
        self._saved = self.step
        return self._keeper.save(
            self.step,
            {
                "position": self._loader.position,
                "updates": self._trainer.updates,
                "settings": self._settings.fixed(),
            },
        )

    def _take_up(self, keeper: Keeper) -> None:
        step, state = keeper.load(self._settings.fixed())
        self.step = self._saved = step
        self._trainer.updates = int(str(state["updates"]))
        self._loader.close()
        self._loader = self._loader_from(int(str(state["position"])))


def _seed_of_step(seed: int, step: int, rank: int) -> int:
    """Random numbers of forward: other ones each step and rank, the same again after a resume."""
    digest = hashlib.sha256(f"reparto forward {seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
