"""Where a worker's rooms are wired: state, checkpoints, ledger, metrics.

Rank 0 writes; the other ranks take part in every collective and write only their own shards, ring
and trace.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from reparto.checkpoint.background import BackgroundSaver
from reparto.checkpoint.layout import Parent, moment_name, run_name
from reparto.checkpoint.load import Checkpoint, find_latest
from reparto.checkpoint.save import Saver, SaveReport
from reparto.checkpoint.share import writes
from reparto.checkpoint.snapshot import Piece, Snapshot
from reparto.cli.evidence import stage_records
from reparto.cli.rundir import cut_metrics, write_private
from reparto.comm.mesh import Mesh
from reparto.comm.traffic import Traffic, over_ranks
from reparto.config.run import Run
from reparto.data.prepare import Prepared
from reparto.evidence.ledger import Ledger, load_key
from reparto.evidence.provenance import collect
from reparto.recover.worker import StopRequest, memory_peak
from reparto.trace import Kind
from reparto.train.loop import LoopResult, Row, train_loop
from reparto.train.state import TrainState, build

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def _load_state(state: TrainState) -> dict[str, JsonValue]:
    balance = state.parallel.balance
    if not balance:
        return {}
    return {"experts": {name: [list(row) for row in rows]
                        for name, rows in balance.state().items()}}  # fmt: skip


class FileSink:
    """Rows to metrics.jsonl, events to the ledger; silent on every rank but 0."""

    def __init__(
        self, run_dir: Path, ledger: Ledger | None, *, tensorboard: bool = False, step: int = 0
    ) -> None:
        """`tensorboard` writes rows for it too; what it has of later steps than `step` is void."""
        self._ledger = ledger
        self._rows = None
        self._board: SummaryWriter | None = None
        if ledger is not None and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        if ledger is not None:
            self._rows = open(run_dir / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def row(self, row: Row) -> None:
        if self._rows is not None:
            self._rows.write(json.dumps(row) + "\n")
        if self._board is not None:
            step = row["step"]
            assert isinstance(step, int)
            for key, value in row.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"train/{key}", float(value), step)

    def event(self, kind: str, body: Mapping[str, object]) -> None:
        if self._ledger is not None:
            self._ledger.append(kind, body)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        if self._board is not None:
            self._board.close()


class Room:
    """One worker's run, from start or from a checkpoint."""

    def __init__(
        self,
        *,
        run_dir: Path,
        run: Run,
        mesh: Mesh,
        prepared: Prepared,
        start: Mapping[str, object],
    ) -> None:
        self._run_dir, self._run, self._mesh = run_dir, run, mesh
        self._prepared, self._start = prepared, start
        self._key = load_key(run_dir / "key")
        self._parent: Parent | None = None
        self._passed_over: tuple[str, ...] = ()
        self._saver = Saver(
            run_dir / "checkpoints",
            run=run_name(run_dir.name),
            key=self._key,
            rank=mesh.rank,
            exchange=self._save_exchange if run.recover.background else self._exchange,
            keep=run.recover.keep,
        )
        self._background = (
            BackgroundSaver(self._saver, when_busy=run.recover.when_busy, agree=self._exchange)
            if run.recover.background
            else None
        )
        self._first_step = 1
        checkpoint = self._find() if start["resume"] else None
        position = int(str(checkpoint.manifest.state["position"])) if checkpoint else 0
        self._ledger = self._open_ledger(checkpoint)
        self._rows_dropped = 0
        step = checkpoint.manifest.step if checkpoint else 0
        if mesh.rank == 0:  # before the sink opens the file; a restart from the start drops all
            self._rows_dropped = cut_metrics(run_dir / "metrics.jsonl", step)
        self._sink = FileSink(run_dir, self._ledger, tensorboard=run.tensorboard, step=step)
        self._state: TrainState = build(run, prepared, mesh, position=position)
        if checkpoint is not None:
            self._take_up(checkpoint)
        elif mesh.rank == 0:
            self._begin()
        self._result: LoopResult | None = None
        self._saves: list[float] = []

    # -- start ---------------------------------------------------------------------------------

    def _find(self) -> Checkpoint:
        """The newest whole checkpoint; all ranks take the same one, each having digested a part."""
        before = self._start.get("before")
        found = find_latest(
            self._run_dir / "checkpoints",
            key=self._key,
            before=int(str(before)) if before is not None else None,
            rank=self._mesh.rank,
            exchange=self._exchange,
        )
        self._passed_over = found.skipped
        return found.checkpoint

    def _exchange(self, row: bytes) -> list[bytes]:
        return self._mesh.world.exchange(row, tag="checkpoint")

    def _save_exchange(self, row: bytes) -> list[bytes]:
        """On a group of its own, because it is called from the thread that saves."""
        return self._mesh.group("save").exchange(row, tag="save")

    def _open_ledger(self, checkpoint: Checkpoint | None) -> Ledger | None:
        if self._mesh.rank != 0:
            return None
        known = checkpoint.manifest.state.get("ledger") if checkpoint else None
        path = self._run_dir / "ledger.jsonl"
        if isinstance(known, dict):
            return Ledger.open(
                path,
                self._key,
                known_count=int(str(known["count"])),
                known_head=str(known["head"]),
            )
        return Ledger.open(path, self._key)

    def _begin(self) -> None:
        state = self._state
        body = collect(
            digests={
                "corpus": self._prepared.corpus_digest,
                "tokenizer": self._prepared.tokenizer_digest,
                "tokens": self._prepared.tokens_digest,
                "config": hashlib.sha256(self._run.to_toml().encode()).hexdigest(),
                "initial_weights": state.weights_digest,
            },
            seeds={"run": self._run.seed},
            environment=os.environ,
            time_s=float(str(self._start["time_s"])),
        )
        text = json.dumps(body, indent=2, sort_keys=True)
        write_private(self._run_dir / "provenance.json", text + "\n")
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._sink.event("start", {"plan": self._run.partition.text, "provenance": digest})

    def _take_up(self, checkpoint: Checkpoint) -> None:
        """Weights, moments, position and counts as the checkpoint left them."""
        state = self._state
        optimizer = state.trainer.optimizer
        assert optimizer is not None
        parallel = state.parallel
        checkpoint.check_against(
            {name: one.shape for name, one in parallel.table.items() if one.tied_to is None}
        )
        updates = int(str(checkpoint.manifest.state["updates"]))
        for one in parallel.strategy.owned():
            one.weight.copy_(checkpoint.read(one.name, one.rectangle))
            optimizer.load(
                one.name,
                checkpoint.read(moment_name("exp_avg", one.name), one.rectangle),
                checkpoint.read(moment_name("exp_avg_sq", one.name), one.rectangle),
                updates,
            )
        parallel.strategy.publish()
        if parallel.balance and checkpoint.manifest.step:  # an imported step 0 has no load
            parallel.balance.load_state(checkpoint.load_of_experts())
        state.trainer.updates = updates
        self._first_step = checkpoint.manifest.step + 1
        self._parent = checkpoint.parent
        if self._mesh.rank == 0:
            self._sink.event(
                "resume",
                {"checkpoint": checkpoint.path.name, "step": checkpoint.manifest.step,
                 "written_by_plan": checkpoint.manifest.plan, "plan": self._run.partition.text,
                 "rows_dropped": self._rows_dropped, "passed_over": list(self._passed_over)},
            )  # fmt: skip

    # -- run -----------------------------------------------------------------------------------

    def train(self, stop: StopRequest) -> None:
        """Steps until the end, `--stop-after`, or a stop that a rank was asked for."""
        last = self._run.steps
        stop_after = self._start.get("stop_after")
        if stop_after is not None:
            last = min(last, int(str(stop_after)))
        self._result = train_loop(
            self._state,
            first_step=self._first_step,
            last_step=last,
            save=self._save,
            sink=self._sink,
            asked_to_stop=stop,
        )
        if self._background is not None:
            self._told(self._background.finish())

    def _save(self, step: int) -> None:
        state, mesh = self._state, self._mesh
        optimizer = state.trainer.optimizer
        assert optimizer is not None
        table = state.parallel.table
        mine = writes(table, mesh.grid, mesh.rank)  # of equal copies, each is written once
        pieces: list[Piece] = []
        for one in state.parallel.strategy.owned():
            if one.name not in mine:
                continue
            exp_avg, exp_avg_sq = optimizer.moments(one.name)
            for name, tensor in (
                (one.name, one.weight),
                (moment_name("exp_avg", one.name), exp_avg),
                (moment_name("exp_avg_sq", one.name), exp_avg_sq),
            ):
                pieces.append(
                    Piece(
                        name=name,
                        shape=table[one.name].shape,
                        rectangle=one.rectangle,
                        tensor=tensor,
                    )
                )
        snapshot = Snapshot(
            step=step,
            plan=self._run.partition.text,
            pieces=pieces,
            aliases={name: one.tied_to for name, one in table.items() if one.tied_to is not None},
            state={
                "position": state.loader.position,
                "updates": state.trainer.updates,
                **_load_state(state),
                "ledger": {"count": self._ledger.count, "head": self._ledger.head}
                if self._ledger
                else None,
            },
            parent=self._parent,
        )
        with mesh.ring.span(Kind.SAVE, f"step-{step}"):
            if self._background is None:
                self._told([self._saver.save(snapshot)])
                return
            started = self._background.save(snapshot)
        self._told(self._background.reports())
        if started.skipped_for is not None:
            self._sink.event(
                "checkpoint_skipped", {"step": step, "still_writing": started.skipped_for}
            )

    def _told(self, reports: Sequence[SaveReport]) -> None:
        """One ledger line for each save that has come to its end."""
        for report in reports:
            self._saves.append(report.seconds)
            self._sink.event(
                "checkpoint",
                {"step": report.step, "seconds": report.seconds, "bytes": report.num_bytes,
                 "deleted": list(report.deleted)},
            )  # fmt: skip

    # -- end -----------------------------------------------------------------------------------

    def finish(self, seconds: float) -> None:
        """Stage records and the result, by rank 0."""
        result = self._result
        assert result is not None
        self._state.loader.close()
        mine = [one.as_dict() for one in self._mesh.traffic()]
        told = self._exchange(
            json.dumps({"peak_memory_bytes": memory_peak(), "traffic": mine}).encode()
        )
        if self._mesh.rank == 0:
            for record in stage_records(
                self._state, result, saves_s=self._saves, first_step=self._first_step
            ):
                self._sink.event("stage", record.body())
            body = self._summary(result, seconds)
            body |= _over_ranks(told)
            self._sink.event("end", {"step": result.step, "loss": body["loss"],
                                     "validation_loss": body["validation_loss"]})  # fmt: skip
            write_private(self._run_dir / "control" / "result.json", json.dumps(body))
        self._sink.close()
        if self._ledger is not None:
            self._ledger.close()

    def _summary(self, result: LoopResult, seconds: float) -> dict[str, object]:
        seen = result.evaluation
        made = result.step >= self._first_step
        return {
            "step": result.step,
            "loss": result.loss if made else None,
            "validation_loss": seen.loss if seen else None,
            "by_group": {
                name: {"loss": loss, "num_tokens": count}
                for name, (loss, count) in (seen.by_group.items() if seen else ())
            },
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / result.seconds if result.seconds else 0.0,
            "steps_s": result.seconds,
            "exposed_comm_s": result.exposed_s,
            "data_wait_s": result.data_wait_s,
            "seconds": seconds,
            "stopped_by": list(result.stopped_by),
            "unigram_entropy": self._prepared.unigram_entropy_nats,
            "validation_unigram_entropy": self._prepared.validation_unigram_entropy_nats,
        }


def _over_ranks(told: Sequence[bytes]) -> dict[str, object]:
    """What every rank told at the end, as it stands in the result."""
    rows = [json.loads(one) for one in told]
    sent = over_ranks([[Traffic(**row) for row in one["traffic"]] for one in rows])
    return {
        "peak_memory_bytes": [int(one["peak_memory_bytes"]) for one in rows],
        "traffic": [one.as_dict() for one in sent],
    }
