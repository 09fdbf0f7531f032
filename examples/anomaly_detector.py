"""Find the odd rows of a table: an autoencoder, trained over two workers, whole and sharded.

    python examples/anomaly_detector.py
    python examples/anomaly_detector.py --workers 1 --save detector.safetensors

The table is generated. Twelve sensors follow three hidden causes, so they move together. Two kinds
of odd row are mixed in: a *spike*, one sensor far off its range, which anybody can see; and a
*mismatch*, three sensors that show another row's values, each well within its range and together
impossible. The detector learns to rebuild rows from a bottleneck of three numbers, without being
told which rows are odd; what it rebuilds badly is odd. Two baselines stand beside it: the largest
z-score of a row, which looks at one sensor at a time, and the Mahalanobis distance, which knows
how sensors move together as far as straight lines can say it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from reparto import Session, Synchronize, launch

Rows = NDArray[np.float32]

SENSORS, CAUSES = 12, 3
KINDS = ("ordinary", "spike", "mismatch")


# --- the table -----------------------------------------------------------------------------------


class Table:
    """Rows of sensor values, scaled to mean 0 and deviation 1; `kinds` is what each row is."""

    def __init__(self, rows: int, *, odd: float, seed: int) -> None:
        """`odd` is the share of odd rows, half of each kind."""
        generator = np.random.default_rng(seed)
        plant = np.random.default_rng(0)  # the same machine stands behind every table
        bend, shift = plant.normal(0, 1.1, (CAUSES, SENSORS)), plant.normal(0, 1, SENSORS)
        causes = generator.normal(0, 1, (rows, CAUSES))
        values = np.tanh(causes @ bend + shift) + 0.3 * np.sin(2 * causes @ bend[:, ::-1])
        values += generator.normal(0, 0.05, values.shape)
        mean, deviation, clean = values.mean(0), values.std(0), values.copy()
        self.kinds = generator.choice(3, rows, p=(1 - odd, odd / 2, odd / 2))
        for row in np.flatnonzero(self.kinds == 1):
            values[row, generator.integers(SENSORS)] += generator.choice((-1, 1)) * 4
        for row in np.flatnonzero(self.kinds == 2):
            columns = generator.choice(SENSORS, 3, replace=False)
            values[row, columns] = clean[generator.integers(rows), columns]
        self.values: Rows = ((values - mean) / deviation).astype(np.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Rows:
        row: Rows = self.values[index]
        return row


# --- the detector --------------------------------------------------------------------------------


def funnel(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, bent between one another."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def build() -> nn.Module:
    """Twelve numbers through three and back to twelve; two blocks, so two gathers a pass."""
    return nn.Sequential(funnel(SENSORS, 64, 64, CAUSES), funnel(CAUSES, 64, 64, SENSORS))


def loss(model: nn.Module, rows_BF: Tensor) -> tuple[Tensor, int]:
    """Absolute errors: they let a few odd rows among those trained on weigh little."""
    return (model(rows_BF) - rows_BF).abs().sum(), rows_BF.numel()


def oddness(model: nn.Module, rows_BF: Tensor) -> Tensor:
    """A number a row: how badly it is rebuilt."""
    found: Tensor = (model(rows_BF) - rows_BF).square().mean(1)
    return found


# --- how good a detector is ----------------------------------------------------------------------


def roc_auc(scores: Sequence[float] | NDArray[np.float64], odd: NDArray[np.bool_]) -> float:
    """The chance that a random odd row scores above a random ordinary one; ties count half.

    Written from its definition by ranks (Mann and Whitney, 1947): the sum of the odd rows' ranks,
    less the smallest it could be, over the number of pairs.
    """
    values, odd = np.asarray(scores, dtype=np.float64), np.asarray(odd, dtype=bool)
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[group]  # rows of equal score share their middle rank
    num_odd, num_ordinary = int(odd.sum()), int((~odd).sum())
    least = num_odd * (num_odd + 1) / 2
    return float((ranks[odd].sum() - least) / (num_odd * num_ordinary))


def by_kind(scores: NDArray[np.float64], kinds: NDArray[np.int64]) -> dict[str, float]:
    """AUC of all odd rows, and of each kind against the ordinary ones."""
    found = {"all": roc_auc(scores, kinds > 0)}
    for kind in (1, 2):
        chosen = (kinds == 0) | (kinds == kind)
        found[KINDS[kind]] = roc_auc(scores[chosen], kinds[chosen] > 0)
    return found


def largest_z(table: Table) -> NDArray[np.float64]:
    """The naive baseline: the sensor that is furthest off its own mean."""
    found: NDArray[np.float64] = np.abs(table.values).max(1).astype(np.float64)
    return found


def mahalanobis(table: Table, fitted: Table) -> NDArray[np.float64]:
    """Distance from the mean, in units of how far the rows spread in that direction."""
    spread = np.linalg.inv(np.cov(fitted.values.T.astype(np.float64)))
    off = table.values - fitted.values.mean(0)
    found: NDArray[np.float64] = np.einsum("nf,fg,ng->n", off, spread, off)
    return found


# --- the run -------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rows", type=int, default=8000, help="to train on")
    parser.add_argument("--save", help="file for the trained weights (safetensors)")
    return parser.parse_args()


def tables(rows: int) -> tuple[Table, Table]:
    """One to train on, odd rows and all, and a fresh one to judge by."""
    return Table(rows, odd=0.02, seed=1), Table(4000, odd=0.06, seed=2)


def main(session: Session) -> dict[str, dict[str, float]]:
    """What every worker does: the same training twice, with weights whole and cut."""
    chosen, found = arguments(), {}
    known, fresh = tables(chosen.rows)
    for shard in ("none", "parameters"):
        plan = f"data={session.world_size},shard={shard}"
        trainer = Session(plan, mesh=session.mesh).trainer(
            build,
            loss,
            known,
            steps=chosen.steps,
            batch_size=250,
            synchronize=Synchronize(learning_rate=1.2e-2, weight_decay=0.01),
        )
        began = time.monotonic()
        for result in trainer:
            if session.rank == 0 and trainer.step % max(1, chosen.steps // 3) == 0:
                print(f"  {plan}: step {trainer.step}, error {result.loss:.4f}")
        seconds = time.monotonic() - began
        scores = trainer.per_sample(fresh, oddness).numpy()
        weights = trainer.full_state_dict()
        held, _ = trainer.parallel.strategy.state_bytes()
        found[plan] = {**by_kind(scores, fresh.kinds), "held": float(held), "seconds": seconds}
    if chosen.save and session.rank == 0:
        save_file(weights, chosen.save)
    return found


def show(name: str, found: dict[str, float], rest: str = "") -> None:
    """One line of the table."""
    print(f"{name:<38}" + "".join(f"{found[key]:>10.3f}" for key in ("all", *KINDS[1:])) + rest)


if __name__ == "__main__":
    asked = arguments()
    results = launch(main, plan=f"data={asked.workers}")
    known, fresh = tables(asked.rows)
    print(f"\n{'area under the ROC curve':<38}{'all odd':>10}{KINDS[1]:>10}{KINDS[2]:>10}"
          f"{'weights a rank':>18}{'training':>12}")  # fmt: skip
    show("largest z-score (naive)", by_kind(largest_z(fresh), fresh.kinds))
    show("Mahalanobis distance", by_kind(mahalanobis(fresh, known), fresh.kinds))
    for plan, found in results.items():
        rest = f"{found['held']:>16,.0f} B{found['seconds']:>10.1f} s"
        show(f"autoencoder, {plan}", found, rest)
