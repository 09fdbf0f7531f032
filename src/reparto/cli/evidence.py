"""The five stage records of a training run, filled from what was planned and what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from reparto.evidence.record import Discarded, StageRecord
from reparto.partition.place import held_messages
from reparto.train.loop import LoopResult
from reparto.train.state import TrainState
from reparto.units import human_bytes


def stage_records(
    state: TrainState, result: LoopResult, *, saves_s: Sequence[float], first_step: int
) -> tuple[StageRecord, ...]:
    """Partition, compute, communicate, synchronize, recover: one record each."""
    run, parallel = state.run, state.parallel
    person = run.owner
    plan = run.partition
    expected = parallel.expected_state()
    weights, gradients = parallel.strategy.state_bytes()
    messages = held_messages(
        parallel.holding, plan,
        compute_dtype=run.compute.precision, master_dtype=run.compute.master,
    )  # fmt: skip
    steps = max(0, result.step - first_step + 1)
    sent = sum(one.total_wire_bytes for one in messages) * steps
    busy = max(0.0, result.seconds - result.exposed_s - result.data_wait_s)
    optimizer = state.trainer.optimizer
    split = state.loader.split
    return (
        StageRecord(
            stage="partition",
            owner="reparto.partition",
            person=person,
            input=f"plan `{plan.text}`, {plan.world_size} ranks, batch of "
            f"{run.data.batch_size} sequences of {run.data.sequence_length} tokens",
            output=f"{split.sequences} sequences a microbatch, {split.padding} of padding a step; "
            f"{human_bytes(expected.total)} of state a rank",
            test="state bytes held are within 2 % of partition/volume.py; every sample once an "
            "epoch (property tests)",
            uncertainty="working memory (activations, gathered units, messages) is not predicted "
            "by this stage",
            discarded=_other_shards(state),
            resources={
                "parameter_bytes": weights,
                "gradient_peak_bytes": gradients,
                "optimizer_bytes": optimizer.state_bytes() if optimizer else 0,
                "expected_state_bytes": expected.total,
                "data_wait_s": result.data_wait_s,
            },
            controls=("a plan that cannot run is refused before any process starts",),
        ),
        StageRecord(
            stage="compute",
            owner="reparto.model",
            person=person,
            input=f"{run.model.preset if run.model.config is None else run.model.config}, "
            f"{run.compute.precision}, recompute {plan.recompute}",
            output=f"loss {result.loss:.4f} at step {result.step}",
            test="reparto verify: loss 1e-12, gradients and weights 1e-10 relative in float64",
            uncertainty="compute seconds are step seconds less exposed communication and waiting "
            "for data, on rank 0; other load on the machine counts as compute",
            resources={"compute_s": busy, "tokens": result.tokens},
            controls=(f"threads a worker follow the cores; weights from seed {run.seed} by name",),
        ),
        StageRecord(
            stage="communicate",
            owner="reparto.comm",
            person=person,
            input=f"{len(messages)} kinds of message a step: "
            + ", ".join(sorted({f'{one.what} {one.operation}' for one in messages}) or ["none"]),
            output=f"{human_bytes(sent)} sent by rank 0 at the ideal algorithm",
            test="recorded payload equals partition/volume.py to the byte",
            uncertainty="exposed time is what the host of rank 0 waited for; hidden time is an "
            "upper bound, because a message that has ended is seen only when it is asked for",
            resources={"exposed_s": result.exposed_s, "ideal_wire_bytes": sent},
            controls=(f"timeout {run.communicate.timeout_s:g} s",
                      f"agreement check each {run.communicate.check}"),
        ),
        StageRecord(
            stage="synchronize",
            owner="reparto.parallel",
            person=person,
            input=f"shard={plan.shard}, gradient_sync={plan.gradient_sync}, "
            f"{plan.num_microbatches} microbatches",
            output=f"{state.trainer.updates} updates in all, {steps} steps in this run",
            test="losses are bitwise equal under the same plan, stopped and resumed or not",
            uncertainty="rounding differs between plans within the tolerances of verify",
            resources={"steps": steps, "step_s": result.seconds},
            controls=(f"clip_norm {run.synchronize.clip_norm:g}",
                      "a step that is not finite anywhere is skipped everywhere"),
        ),
        StageRecord(
            stage="recover",
            owner="reparto.checkpoint",
            person=person,
            input=f"checkpoint every {run.recover.checkpoint_every} steps, {run.recover.keep} kept",
            output=f"{len(saves_s)} checkpoints, the last at step {result.step}",
            test="digests of every file are checked before a weight is used",
            uncertainty="a checkpoint is as safe as the disk below it",
            resources={"save_s": sum(saves_s), "saves": len(saves_s)},
            controls=("manifest written last, folder renamed into place",),
        ),
    )  # fmt: skip


def _other_shards(state: TrainState) -> tuple[Discarded, ...]:
    """The other shard modes, with what they would have kept on a rank."""
    from reparto.partition.volume import state_bytes, unit_layouts

    plan = state.run.partition
    shapes = [{slot.name: slot.shape for slot in layout.slots} for layout in state.parallel.layouts]
    found = []
    for mode in ("none", "optimizer", "gradients", "parameters"):
        if mode == plan.shard or plan.num_shards == 1:
            continue
        other = plan.model_copy(update={"shard": mode})
        layouts = unit_layouts(shapes, plan=other, gradient_bytes=4)
        kept = state_bytes(
            layouts, plan=other, compute_dtype=state.run.compute.precision,
            master_dtype=state.run.compute.master,
        )  # fmt: skip
        found.append(
            Discarded(
                what=f"shard={mode}",
                reason=f"{human_bytes(kept.total)} of state a rank; "
                f"the plan of the run names {plan.shard}",
            )
        )
    return tuple(found)
