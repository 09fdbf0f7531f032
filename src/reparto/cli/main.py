"""The command line: every verb and option, and nothing else. Verbs import their rooms when called,
so that `reparto --help` needs neither torch nor pydantic.

Human text goes to stderr; with `--json` the last line of stdout is one object.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from reparto.errors import RepartoError

app = typer.Typer(
    name="reparto",
    help="Plan, run, measure and recover distributed training. / Planificar, ejecutar, medir y "
    "recuperar el entrenamiento distribuido.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
schedule_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(schedule_app, name="schedule", help="Pipeline schedules as data.")
checkpoint_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(checkpoint_app, name="checkpoint", help="What is saved, and is it whole.")

RunFile = Annotated[
    str | None, typer.Argument(metavar="[RUN.toml]", help="Run file; without it, the demo.")
]
PlanText = Annotated[
    str | None, typer.Option("--plan", help="Plan, as data=2,shard=parameters or a file.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set one key: table.key=value. Repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")]


@app.command()
def train(
    run_file: RunFile = None,
    plan: PlanText = None,
    settings: Settings = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Length of the training, in optimizer steps.")
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option("--stop-after", help="End after this step, with a checkpoint.")
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", help="Folder of the run; must not exist yet.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Take up the run in --run-dir.")] = False,
    accept_change: Annotated[
        list[str] | None,
        typer.Option("--accept-change", help="A key that may differ on resume. Repeatable."),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", help="Hosts that train together.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", help="This host's number, from 0.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", help="HOST:PORT of host 0, where all meet.")
    ] = None,
    json_out: Json = False,
) -> None:
    """Train a model; starts its own workers. / Entrenar un modelo."""
    from reparto.cli import train as verb
    from reparto.recover.nodes import Nodes

    verb.train(
        run_file=run_file,
        plan=plan,
        settings=settings or [],
        steps=steps,
        stop_after=stop_after,
        run_dir=run_dir,
        resume=resume,
        accept_change=accept_change or [],
        nodes=Nodes.parse(nodes, node_rank, rendezvous),
        json_out=json_out,
    )


@app.command()
def verify(
    run_file: RunFile = None,
    plan: PlanText = None,
    against: Annotated[str, typer.Option("--against", help="The plan to compare with.")] = "data=1",
    steps: Annotated[int, typer.Option("--steps", help="Steps to compare.")] = 3,
    precision: Annotated[str, typer.Option("--precision", help="float64 or float32.")] = "float64",
    transport: Annotated[
        str, typer.Option("--transport", help="processes (real) or threads (quick).")
    ] = "processes",
    settings: Settings = None,
    json_out: Json = False,
) -> None:
    """Same steps under two plans: loss, gradients, weights. / Comprobar que un plan es exacto."""
    from reparto.cli import verify as verb

    verb.verify(
        run_file=run_file,
        plan=plan,
        against=against,
        steps=steps,
        precision=precision,
        transport=transport,
        settings=settings or [],
        json_out=json_out,
    )


@app.command()
def plan(
    show: Annotated[
        str | None, typer.Option("--show", help="A plan: who owns what, bytes, messages.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Preset, model name or config.json.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="<device>x<count>, or a cluster file.")
    ] = None,
    validate: Annotated[
        str | None, typer.Option("--validate", help="CSV of published runs to be judged on.")
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option("--what-if", help="A change to the question.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="With --show: only this rank.")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Sequences a step, over all ranks.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", help="Tokens of a sequence.")
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="time, cost, energy or memory.")
    ] = "time",
    forbid: Annotated[
        list[str] | None, typer.Option("--forbid", help="An axis not to use. Repeatable.")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="bf16, fp16, fp8, fp32.")] = "bf16",
    tokens: Annotated[
        float | None, typer.Option("--tokens", help="Tokens of the whole run, for its cost.")
    ] = None,
    svg: Annotated[
        str | None, typer.Option("--svg", help="Write the best plan's timeline here.")
    ] = None,
    settings: Settings = None,
    json_out: Json = False,
) -> None:
    """What a plan puts where, or which plan is best. / Qué pone cada plan en cada sitio."""
    from reparto.cli import plan as verb

    verb.plan(
        show=show,
        model=model,
        cluster=cluster,
        validate=validate,
        what_if=what_if or [],
        rank=rank,
        batch_size=batch_size,
        sequence_length=sequence_length,
        objective=objective,
        forbid=forbid or [],
        precision=precision,
        tokens=tokens,
        svg=svg,
        settings=settings or [],
        json_out=json_out,
    )


@schedule_app.command("draw")
def schedule_draw(
    name: Annotated[str, typer.Argument(help="gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v.")],
    stages: Annotated[int, typer.Option("--stages", help="Pipeline degree.")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", help="Microbatches.")] = 8,
    chunks: Annotated[int, typer.Option("--chunks", help="Chunks a rank; 0: the usual.")] = 0,
    svg: Annotated[
        str | None, typer.Option("--svg", help="Write the picture here; default: NAME.svg.")
    ] = None,
    json_out: Json = False,
) -> None:
    """Draw a pipeline schedule in the terminal and as SVG. / Dibujar un orden de trabajo."""
    from reparto.cli import schedule as verb

    verb.draw(
        name=name,
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        svg=svg,
        json_out=json_out,
    )


@app.command()
def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What to go on from.")],
    step: Annotated[int | None, typer.Option("--step", help="Checkpoint; default newest.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Most tokens to add.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0: the likeliest token each time.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Only the k likeliest; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Only the likeliest that reach this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the random choice.")] = 1,
    json_out: Json = False,
) -> None:
    """Sample text from a checkpoint. / Generar texto desde un punto de control."""
    from reparto.cli import generate as verb

    verb.generate(
        run_dir=run,
        text=text,
        step=step,
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        json_out=json_out,
    )


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(help="data, zero, tensor, pipeline, schedule, checkpoint or overhead."),
    ],
    model: Annotated[str, typer.Option("--model", help="1m, 10m or 50m.")] = "10m",
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved rounds.")] = 9,
    json_out: Json = False,
) -> None:
    """Side by side with torch's own, in one run. / Medir junto a lo propio de torch."""
    from reparto.cli import bench as verb

    verb.bench(name=name, model=model, rounds=rounds, json_out=json_out)


CheckpointPath = Annotated[
    str, typer.Argument(metavar="DIR", help="A run, its checkpoints folder, or one step-N.")
]
Step = Annotated[int | None, typer.Option("--step", help="Which checkpoint; default newest.")]


@checkpoint_app.command("list")
def checkpoint_list(path: CheckpointPath, json_out: Json = False) -> None:
    """What is there, and where each came from. / Qué hay y de dónde viene."""
    from reparto.cli import checkpoint as verb

    verb.list_all(path, json_out=json_out)


@checkpoint_app.command("check")
def checkpoint_check(path: CheckpointPath, json_out: Json = False) -> None:
    """Whether every byte is as it was written. / Comprobar cada byte."""
    from reparto.cli import checkpoint as verb

    verb.check(path, json_out=json_out)


@checkpoint_app.command("convert")
def checkpoint_convert(
    path: CheckpointPath,
    to: Annotated[str, typer.Argument(metavar="TO", help="Folder that gets the new step-N.")],
    plan: Annotated[str, typer.Option("--plan", help="The plan to lay it out for.")],
    step: Step = None,
    json_out: Json = False,
) -> None:
    """The same checkpoint in another layout. / El mismo punto con otro reparto."""
    from reparto.cli import checkpoint as verb

    verb.convert(path, to, plan=plan, step=step, json_out=json_out)


@checkpoint_app.command("export")
def checkpoint_export(
    path: CheckpointPath,
    to: Annotated[str, typer.Argument(metavar="TO", help="New Hugging Face folder.")],
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16, float16; default as stored.")
    ] = None,
    json_out: Json = False,
) -> None:
    """To a Hugging Face folder. / A una carpeta de Hugging Face."""
    from reparto.cli import checkpoint as verb

    verb.export(path, to, step=step, dtype=dtype, json_out=json_out)


@checkpoint_app.command("import")
def checkpoint_import(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Hugging Face folder.")],
    run_dir: Annotated[str, typer.Argument(metavar="RUN", help="New run folder.")],
    settings: Settings = None,
    json_out: Json = False,
) -> None:
    """From a Hugging Face folder. / Desde una carpeta de Hugging Face."""
    from reparto.cli import checkpoint as verb

    verb.import_(source, run_dir, settings=settings or [], json_out=json_out)


_UNBUILT = {
    "probe": "Measure this machine or cluster into a cluster file.",
    "drill": "Inject faults into a small run and score the recovery.",
    "diagnose": "Find the first stage whose assumption did not hold.",
    "compare": "Compare two runs.",
    "ledger": "Check the evidence of a run.",
    "approve": "Sign a run.",
    "claim": "Thresholds sealed before, verdict after.",
    "report": "One offline page about a run.",
}


def _add_unbuilt(name: str, what: str) -> None:
    @app.command(
        name,
        help=f"Not built yet: {what[0].lower()}{what[1:]}",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        rich_help_panel=None,
    )
    def unbuilt(context: typer.Context) -> None:
        from reparto.errors import UserError

        raise UserError(
            f"`reparto {name}` is not built yet",
            legal="train, verify, plan, schedule draw, generate, checkpoint, bench",
        )


for _name, _what in _UNBUILT.items():
    _add_unbuilt(_name, _what)


def main() -> None:
    """Entry point: runs a verb and turns its errors into a message and an exit status."""
    try:
        app(standalone_mode=False)
    except RepartoError as error:
        print(f"reparto: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        print("reparto: stopped", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        print(f"reparto: {message()}", file=sys.stderr)  # an unknown option or verb
        sys.exit(2)


if __name__ == "__main__":
    main()
