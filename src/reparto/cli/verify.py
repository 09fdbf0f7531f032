"""`reparto verify`: the same steps under two plans, on real processes or on threads."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from reparto.cli.console import console
from reparto.config.plan import Plan
from reparto.config.run import Run, read_run
from reparto.errors import CheckFailed, Fault, UserError
from reparto.partition.built import refuse_unbuilt
from reparto.partition.legal import check_plan


def verify(
    *,
    run_file: str | None,
    plan: str | None,
    against: str,
    steps: int,
    precision: str,
    transport: str,
    settings: Sequence[str],
    json_out: bool,
) -> None:
    """The verb. Raises `CheckFailed` (3) when the plans depart, naming the first tensor."""
    if plan is None:
        raise UserError("is missing", where="--plan", legal="data=2,shard=parameters")
    for value, where, legal in (
        (precision, "--precision", ("float64", "float32")),
        (transport, "--transport", ("processes", "threads")),
    ):
        if value not in legal:
            raise UserError(f"`{value}` is not known", where=where, legal=", ".join(legal))
    if steps < 1:
        raise UserError(f"{steps} steps compare nothing", where="--steps", legal=">= 1")
    tested, base = Plan.parse(plan), Plan.parse(against, where="--against")
    run = None
    if run_file or settings:
        run = read_run(Path(run_file) if run_file else None, settings=settings)
    out = console()
    question = _question_of(run, tested, base, steps, precision, out.print)
    found = _compare(question, tested, base, transport)
    first = found["first_departure"]
    body = {
        "passed": first is None,
        "plan": tested.text,
        "against": base.text,
        "steps": steps,
        "precision": precision,
        "loss_rel": found["loss_rel"],
        "grad_rel": found["grad_rel"],
        "weight_rel": found["weight_rel"],
        "bitwise": found["bitwise"],
        "route_flips": found["route_flips"],
        "first_departure": first,
    }
    out.print(
        f"{'holds' if first is None else 'DEPARTS'}: `{tested.text}` against `{base.text}`, "
        f"{steps} steps in {precision}: loss {found['loss_rel']:.1e}, gradients "
        f"{found['grad_rel']:.1e}, weights {found['weight_rel']:.1e} relative"
        + (", bitwise equal" if found["bitwise"] else "")
        + (f"; {found['route_flips']} route flips" if found["route_flips"] else "")
    )
    if json_out:
        print(json.dumps(body))
        sys.stdout.flush()
    if isinstance(first, dict):
        raise CheckFailed(
            f"first departure: tensor {first['tensor']} in step {first['step']}, stage "
            f"{first['stage']}, collective `{first['collective']}`"
        )


def _question_of(
    run: Run | None, tested: Plan, base: Plan, steps: int, precision: str, tell: object
) -> dict[str, object]:
    """The question as JSON, checked before anything starts, so that workers can read it."""
    from reparto.data.cache import default_cache_dir
    from reparto.data.prepare import prepare
    from reparto.train.compare import DEFAULT_MODEL

    prepared = None
    if run is None:
        run, model, batch_size, sequence_length = Run(), DEFAULT_MODEL, 16, 64
    else:
        found = prepare(run.data.absolute(), default_cache_dir(os.environ))
        model, prepared = run.model.resolved(found.vocab_size), str(found.folder)
        batch_size, sequence_length = run.data.batch_size, run.data.sequence_length
    for one in (tested, base):
        refuse_unbuilt(one)
        warnings = check_plan(
            one, model=model, batch_size=batch_size, sequence_length=sequence_length
        )
        assert callable(tell)
        for warning in warnings:
            tell(f"warning: {warning}", style="yellow")
    return {
        "model": model.model_dump(mode="json"),
        "source": run.model.source,
        "prepared": prepared,
        "sequence_length": sequence_length,
        "batch_size": batch_size,
        "steps": steps,
        "seed": run.seed,
        "precision": precision,
        "synchronize": run.synchronize.model_dump(mode="json"),
    }


def _compare(
    question: dict[str, object], tested: Plan, base: Plan, transport: str
) -> dict[str, object]:
    from reparto.cli import verify_rank

    folder = Path(tempfile.mkdtemp(prefix="reparto-verify-"))
    try:
        (folder / "question.json").write_text(json.dumps(question))
        for role, plan in (("reference", base), ("tested", tested)):
            if transport == "threads" or plan.world_size == 1:
                verify_rank.run_here(folder, plan, role)
            else:
                _run_processes(folder, plan, role)
        found: dict[str, object] = json.loads((folder / "result.json").read_text())
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_processes(folder: Path, plan: Plan, role: str) -> None:
    from reparto.recover.supervise import Supervisor

    run_dir = folder / role
    for name in ("control", "logs"):
        (run_dir / name).mkdir(parents=True, mode=0o700)
    threads = max(1, len(os.sched_getaffinity(0)) // plan.world_size)
    (run_dir / "control" / "start.json").write_text(
        json.dumps(
            {"plan": plan.text, "role": role, "supervisor_pid": os.getpid(), "threads": threads}
        )
    )
    supervisor = Supervisor(
        run_dir,
        world_size=plan.world_size,
        arguments=["-m", "reparto.cli.verify_rank", str(folder), role],
        environment={"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"},
    )
    supervisor.start()
    try:
        while supervisor.alive:
            supervisor.wait(0.2)
    except BaseException:
        supervisor.kill()
        raise
    outcome = supervisor.outcome()
    if not outcome.ok:
        cause = outcome.failures[0]
        raise Fault(
            f"verify, plan `{plan.text}`: rank {cause.rank}, step {cause.step}, {cause.doing}: "
            f"{cause.message}"
        )
