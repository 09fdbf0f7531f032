"""`reparto train`: check everything, prepare the data, make the run folder, start the workers.

Nothing is written and no process is started before the whole run has been found possible.
"""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w
from rich.console import Console

from reparto.cli import rundir
from reparto.cli.console import Watcher, console, cost_lines, telling
from reparto.config.huggingface import hub_names
from reparto.config.model import parameter_shapes, tied_parameters
from reparto.config.run import Run, read_run
from reparto.errors import Fault, UserError
from reparto.partition.built import refuse_unbuilt
from reparto.partition.ceiling import refuse_above
from reparto.partition.legal import check_plan
from reparto.recover.decide import Attempt, decide
from reparto.recover.detect import Failure, Outcome
from reparto.recover.launcher import joined
from reparto.recover.nodes import Nodes
from reparto.units import human_seconds

#: seconds that workers get to end their step and save after a stop was asked for
_STOP_GRACE_S = 120.0


def train(
    *,
    run_file: str | None,
    plan: str | None,
    settings: Sequence[str],
    steps: int | None,
    stop_after: int | None,
    run_dir: str | None,
    resume: bool,
    accept_change: Sequence[str],
    nodes: Nodes | None,
    json_out: bool,
) -> None:
    """The verb. Raises `UserError` (2) before anything starts, `Fault` (4) when a run ended so."""
    os.umask(0o077)  # whatever is written from here on, by this process or a worker, is private
    out = console()
    settings = [*settings, *([f"steps={steps}"] if steps is not None else [])]
    if resume:
        run, path = _reopened(run_file, plan, settings, run_dir, accept_change)
    else:
        if accept_change:
            raise UserError("belongs to --resume", where="--accept-change")
        run = read_run(Path(run_file) if run_file else None, plan=plan, settings=settings)
        run = run.model_copy(update={"owner": run.owner or getpass.getuser()}).resolved()
        launcher = joined()
        if nodes is not None and run_dir is None:
            raise UserError(
                "several hosts need the folder that all of them see",
                where="--run-dir",
                legal="a folder on a shared file system",
            )
        name = launcher.job if launcher else time.strftime("%Y%m%d-%H%M%S")
        path = Path(run_dir) if run_dir else Path("runs") / f"{run.name}-{name}"
        first = (launcher is None or launcher.rank == 0) and (nodes is None or nodes.rank == 0)
        if first:
            rundir.refuse_existing(path)
    if stop_after is not None and not 1 <= stop_after <= run.steps:
        raise UserError(
            f"{stop_after} is no step of a training of {run.steps}",
            where="--stop-after",
            legal=f"1 to {run.steps}",
            nearest=str(min(max(1, stop_after), run.steps)),
        )
    _launch(
        run, path, stop_after=stop_after, resume=resume, nodes=nodes, json_out=json_out, out=out
    )


def _reopened(
    run_file: str | None,
    plan: str | None,
    settings: Sequence[str],
    run_dir: str | None,
    accept_change: Sequence[str],
) -> tuple[Run, Path]:
    if run_dir is None:
        raise UserError("--resume needs the folder of the run", where="--run-dir",
                        nearest="--run-dir runs/NAME --resume")  # fmt: skip
    path = Path(run_dir)
    wanted = None
    if run_file or plan or settings:
        base = Path(run_file) if run_file else path / "run.toml"
        if not run_file:
            rundir.reopen(path, None, [])
        wanted = read_run(base, plan=plan, settings=settings)
        wanted = wanted.resolved()
    run = rundir.reopen(path, wanted, accept_change)
    found = any((path / "checkpoints").glob("step-*"))
    if not found:
        raise UserError(
            f"{path} has no checkpoint to resume from",
            where="--resume",
            legal="a run that has saved at least once",
            nearest="start a new run in another folder",
        )
    return run, path


def _launch(
    run: Run,
    path: Path,
    *,
    stop_after: int | None,
    resume: bool,
    nodes: Nodes | None,
    json_out: bool,
    out: Console,
) -> None:
    launcher = joined()
    if nodes is not None:
        from reparto.cli.hosts import train_on_hosts

        result = train_on_hosts(run, path, nodes, stop_after=stop_after, resume=resume, out=out)
        if result is None:
            return  # only node 0 speaks
        _tell_end(run, path, result, out)
        _print_answer(run, path, result, json_out)
        return
    if launcher is not None:
        from reparto.cli.join import join

        result = join(run, path, launcher, stop_after=stop_after, resume=resume, out=out)
        if result is None:
            return  # only rank 0 speaks
    else:
        start = set_up(run, path, stop_after=stop_after, resume=resume, out=out)
        result = _until_done(run, path, start, stop_after=stop_after, out=out)
    _tell_end(run, path, result, out)
    _print_answer(run, path, result, json_out)


def _print_answer(run: Run, path: Path, result: Mapping[str, object], json_out: bool) -> None:
    if not json_out:
        return
    body = {"run_dir": str(path), "steps": result["step"]}
    for key in ("loss", "validation_loss", "tokens_per_s", "unigram_entropy", "exposed_comm_s",
                "stopped_by", "peak_memory_bytes", "traffic"):  # fmt: skip
        body[key] = result[key]
    body |= {"world_size": run.partition.world_size, "plan": run.partition.text}
    print(json.dumps(body))
    sys.stdout.flush()


def check_run(run: Run) -> None:
    """All that can be refused before data is read; the same on every rank of a launcher."""
    refuse_unbuilt(run.partition)
    if run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "the package tensorboard is not installed",
            where="tensorboard",
            legal="false, or true where it is installed",
            nearest="pip install 'reparto[tensorboard]'",
        )
    check_plan(
        run.partition, batch_size=run.data.batch_size, sequence_length=run.data.sequence_length
    )


def set_up(
    run: Run,
    path: Path,
    *,
    stop_after: int | None,
    resume: bool,
    out: Console,
    local_world_size: int = 0,
    supervisor_pid: int = 0,
) -> Mapping[str, object]:
    """Check the run, prepare its data, make or reopen its folder; returns what workers are told.

    local_world_size  workers on this host; 0: all of them
    supervisor_pid    0: this process
    """
    from reparto.data.cache import default_cache_dir
    from reparto.data.prepare import prepare

    plan = run.partition
    check_run(run)
    prepared = prepare(run.data, default_cache_dir(os.environ), telling(out))
    model = run.model.resolved(prepared.vocab_size)
    if run.model.weights is not None and not resume:
        from reparto.model.weights import open_weights

        shapes = parameter_shapes(model)
        open_weights(
            Path(run.model.weights), shapes,
            tied=tied_parameters(model), names=hub_names(model, shapes),
        )  # fmt: skip
    warnings = [
        *prepared.warnings,
        *check_plan(
            plan,
            model=model,
            batch_size=run.data.batch_size,
            sequence_length=run.data.sequence_length,
        ),
        *_machine_warnings(run, local_world_size or plan.world_size),
    ]
    if run.compute.memory_gb:
        refuse_above(
            run.compute.memory_bytes,
            plan,
            model,
            batch_size=run.data.batch_size,
            sequence_length=run.data.sequence_length,
            compute=run.compute.precision,
            master=run.compute.master,
        )
    for warning in warnings:
        out.print(f"warning: {warning}", style="yellow")

    if resume:
        rundir.write_private(path / "run.toml", run.to_toml())
        rundir.write_private(path / "plan.toml", tomli_w.dumps(plan.model_dump(mode="json")))
    else:
        rundir.create(path, run)
        rundir.write_private(
            path / "tokenizer.json", prepared.tokenizer_file.read_text(encoding="utf-8")
        )
    threads = run.compute.threads or max(1, _cores() // (local_world_size or plan.world_size))
    control = path / "control"
    for old in [*control.glob("error-*.json"), *control.glob("*.pid"), control / "result.json"]:
        old.unlink(missing_ok=True)
    start: Mapping[str, object] = {
        "prepared": str(prepared.folder),
        "resume": resume,
        "stop_after": stop_after,
        "threads": threads,
        "supervisor_pid": supervisor_pid or os.getpid(),
        "time_s": time.time(),
    }
    rundir.write_private(control / "start.json", json.dumps(start))
    out.print(
        f"run {path}: plan `{plan.text}`, {plan.world_size} worker"
        f"{'s' if plan.world_size > 1 else ''} of {threads} "
        f"thread{'s' if threads > 1 else ''}, {prepared.num_train_samples} samples an epoch; "
        f"unigram entropy {prepared.unigram_entropy_nats:.3f} nats a token"
    )
    return start


def _until_done(
    run: Run, path: Path, start: Mapping[str, object], *, stop_after: int | None, out: Console
) -> Mapping[str, object]:
    """Supervise, and start again after a fault while that makes sense (`recover/decide.py`)."""
    attempts: list[Attempt] = []
    while True:
        outcome, asked = watch(run, path, start, stop_after=stop_after, out=out)
        if outcome.ok:
            result: Mapping[str, object] = json.loads(
                (path / "control" / "result.json").read_text()
            )
            return result
        cause = outcome.failures[0]
        if cause.exit_code == 2 and cause.where:
            raise UserError(**{key: cause.where.get(key, "") for key in
                               ("what", "where", "legal", "nearest")})  # fmt: skip
        saved = _newest_step(path)
        lines = _fault_lines(path, outcome.failures, saved, asked_twice=asked > 1)
        _record_fault(path, lines, cause)
        attempts.append(Attempt(step=cause.step, saved=saved, exit_code=cause.exit_code))
        decision = decide(attempts, max_restarts=run.recover.max_restarts)
        if asked or not decision.restart:
            end = [] if asked else [f"  not started again: {decision.reason}"]
            raise Fault("\n".join([*lines, *end]))
        out.print("\n".join(lines[:-1]), style="red")
        out.print(f"restart {len(attempts)} of {run.recover.max_restarts}: {decision.reason}")
        start = {**start, "resume": saved > 0, "before": decision.before}
        for old in (path / "control").glob("error-*.json"):
            old.unlink()
        rundir.write_private(path / "control" / "start.json", json.dumps(start))


def watch(
    run: Run,
    path: Path,
    start: Mapping[str, object],
    *,
    stop_after: int | None,
    out: Console,
    interface: str = "lo",
    node: int = 0,
    nodes: int = 1,
    store: object = None,
) -> tuple[Outcome, int]:
    """Start this host's workers, show progress, pass a stop on, until they have ended."""
    from reparto.recover.supervise import Supervisor

    supervisor = Supervisor(
        path.absolute(),
        world_size=run.partition.world_size,
        arguments=["-m", "reparto.cli.worker", str(path.absolute())],
        environment={
            "OMP_NUM_THREADS": str(start["threads"]),
            "GLOO_SOCKET_IFNAME": interface,
            "REPARTO_SUPERVISOR": str(os.getpid()),
            "REPARTO_PLACEMENT": run.communicate.placement,
            **_allocator(run),
        },
        node=node,
        nodes=nodes,
        store=store,
        placement=run.communicate.placement,
    )
    asked: list[float] = []

    def stop(number: int, frame: object) -> None:
        asked.append(time.monotonic())
        if len(asked) > 1:
            supervisor.kill()
        else:
            out.print("stopping after this step, with a checkpoint (again to end at once)")
            supervisor.ask_to_stop()

    handlers = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    done = rundir.last_metrics_step(path / "metrics.jsonl")
    try:
        supervisor.start()
        with Watcher(
            path / "metrics.jsonl", total=stop_after or run.steps, done=done, out=out
        ) as watcher:
            while supervisor.alive:
                supervisor.wait(0.1)
                watcher.poll()
                if len(asked) == 1:  # workers that had not come up yet when it was asked
                    supervisor.ask_to_stop()
                if asked and time.monotonic() - asked[0] > _STOP_GRACE_S:
                    supervisor.kill()
            watcher.poll()
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    return supervisor.outcome(), len(asked)


def _allocator(run: Run) -> Mapping[str, str]:
    """How a worker's C library deals with freed memory.

    Without a limit it keeps it: a step asks for the same sizes again, and fresh pages are slow.
    Under a limit what is kept in the wrong sizes is missing elsewhere, so it goes back.
    """
    if run.compute.memory_gb:
        return {"MALLOC_ARENA_MAX": "1"}
    return {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


def _newest_step(path: Path) -> int:
    """Step of the newest published checkpoint, 0 if there is none."""
    steps = [one.name.removeprefix("step-") for one in (path / "checkpoints").glob("step-*")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def _fault_lines(
    path: Path, failures: Sequence[Failure], saved: int, *, asked_twice: bool
) -> list[str]:
    """The one message of a run that did not end well: cause first, consequences under it."""
    cause, others = failures[0], failures[1:]
    what = "ended at once, as asked" if asked_twice else cause.message
    lines = [f"rank {cause.rank}, step {cause.step}, {cause.doing}: {what}"]
    if others:
        followed = ", ".join(f"rank {one.rank}" for one in others)
        lines.append(f"  followed by {followed}")
    lines.append(f"  last checkpoint: {f'step-{saved}' if saved else 'none'}")
    lines.append(
        f"  next: reparto train --run-dir {path} --resume" if saved else
        f"  next: look at {path}/logs, then start a new run"
    )  # fmt: skip
    return lines


def _record_fault(path: Path, lines: Sequence[str], cause: Failure) -> None:
    from reparto.evidence.ledger import Ledger, load_key

    with Ledger.open(path / "ledger.jsonl", load_key(path / "key")) as ledger:
        ledger.append(
            "fault",
            {"rank": cause.rank, "step": cause.step, "doing": cause.doing, "message": lines[0]},
        )


def _tell_end(run: Run, path: Path, result: Mapping[str, object], out: Console) -> None:
    step, loss = result["step"], result["loss"]
    told = [f"done: step {step} of {run.steps}"]
    if isinstance(loss, float):
        told.append(f"loss {loss:.4f}")
    validation = result["validation_loss"]
    if isinstance(validation, float):
        entropy = float(str(result["validation_unigram_entropy"]))
        told.append(f"validation loss {validation:.4f} (unigram entropy {entropy:.3f})")
    out.print(", ".join(told))
    goal = run.objective.at_most
    value = validation if run.objective.metric == "validation_loss" else loss
    if goal is not None and isinstance(value, float) and step == run.steps:
        verdict = "reached" if value <= goal else "not reached"
        out.print(f"objective: {run.objective.metric} at most {goal:g}: {verdict} ({value:.4f})")
    stopped = result["stopped_by"]
    if isinstance(stopped, list) and stopped:
        ranks = ", ".join(map(str, stopped))
        out.print(f"stopped by a signal to rank {ranks}; all ranks saved step {step} and left")
    numbers = {key: float(str(result[key])) for key in
               ("tokens", "steps_s", "exposed_comm_s", "data_wait_s")}  # fmt: skip
    for line in cost_lines(numbers, run.partition.world_size):
        out.print(line)
    out.print(f"time: {human_seconds(float(str(result['seconds'])))} in the workers")
    if int(str(step)) < run.steps:
        out.print(f"resume: reparto train --run-dir {path} --resume")
    out.print(f"look: {path}/metrics.jsonl, ledger.jsonl, trace/ (open in chrome://tracing)")


def _machine_warnings(run: Run, workers: int) -> list[str]:
    found = []
    cores = _cores()
    if workers > cores:
        found.append(
            f"{workers} workers share {cores} cores and will wait for each other; "
            f"data={max(1, cores)} would use them as well"
        )
    if run.compute.precision == "bfloat16" and not _fast_bfloat16():
        found.append(
            "this processor has no bfloat16 arithmetic (avx512_bf16 or amx): bfloat16 will be "
            "many times slower than float32 here"
        )
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _fast_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "avx512_bf16" in flags or "amx_bf16" in flags
