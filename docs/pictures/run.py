"""The picture of a run, from its own records: `python docs/pictures/run.py RUN_DIR [FOLDER]`.

Above, the loss of every step from metrics.jsonl, with the unigram entropy of the text as the line
that a model must come below to have learned more than which tokens are frequent. Below, one step
from trace/rank-N.json, both ranks on one clock: what the host did, and every message with the part
of it that the host did not wait for (hidden) and the part it did (exposed).

The step drawn is the one of median length in the second half of the run, so it is neither the best
nor the worst. Writes run.svg and run.es.svg.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from svg import Sheet

Event = Mapping[str, object]

WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "en": MappingProxyType(
            {
                "title": "A run: plan {plan}, {workers} processes",
                "desc": "Loss of every step, and one step's computation and communication",
                "loss": "loss, nats a token",
                "step": "optimizer step",
                "entropy": "unigram entropy {value}: knowing only how frequent each token is",
                "validation": "validation {value}",
                "timeline": "Step {step}, {ms} ms: rank 0 waits {share0} of it, rank 1 {share1}",
                "host": "compute",
                "weights": "weights",
                "gradients": "gradients",
                "word": "word",
                "rank": "rank",
                "forward": "forward",
                "backward": "backward",
                "update": "norm, update",
                "hidden": "message, hidden",
                "exposed": "waiting: exposed",
                "ms": "ms",
            }
        ),
        "es": MappingProxyType(
            {
                "title": "Una ejecución: plan {plan}, {workers} procesos",
                "desc": "Pérdida de cada paso, y el cálculo y la comunicación de un paso",
                "loss": "pérdida, nats por token",
                "step": "paso del optimizador",
                "entropy": "entropía de unigramas {value}: saber solo la frecuencia de cada token",
                "validation": "validación {value}",
                "timeline": "Paso {step}, {ms} ms: el rango 0 espera el {share0}; el 1, {share1}",
                "host": "cálculo",
                "weights": "pesos",
                "gradients": "gradientes",
                "word": "palabra",
                "rank": "rango",
                "forward": "hacia delante",
                "backward": "hacia atrás",
                "update": "norma, actualización",
                "hidden": "mensaje oculto",
                "exposed": "espera: expuesto",
                "ms": "ms",
            }
        ),
    }
)

WIDTH, LEFT, RIGHT = 900.0, 140.0, 24.0
PLOT = WIDTH - LEFT - RIGHT
LANES = ("host", "weights", "gradients", "word")


@dataclass(frozen=True, kw_only=True)
class Story:
    """What a run left behind, as far as the picture needs it."""

    plan: str
    losses: Sequence[tuple[int, float]]
    entropy: float
    validation: float | None
    step: int
    "the step whose timeline is drawn"
    traces: Sequence[Sequence[Event]]
    "events of that step, by rank; times in microseconds of one clock"


def read(run_dir: Path) -> Story:
    """Read a finished run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run_dir / "control" / "result.json").read_text())
    half = rows[len(rows) // 2 :]
    middle = statistics.median_low([row["step_s"] for row in half])
    step = next(row["step"] for row in half if row["step_s"] == middle)
    traces = []
    for path in sorted((run_dir / "trace").glob("rank-*.json")):
        events = json.loads(path.read_text())["traceEvents"]
        traces.append([e for e in events if e["ph"] == "X" and e["args"]["step"] == step])
    started = next(
        json.loads(line)["body"]
        for line in (run_dir / "ledger.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "start"
    )
    return Story(
        plan=started["plan"],
        losses=[(row["step"], row["loss"]) for row in rows],
        entropy=result["validation_unigram_entropy"],
        validation=result["validation_loss"],
        step=step,
        traces=traces,
    )


def draw(story: Story, language: str) -> Sheet:
    """The whole picture."""
    words = WORDS[language]
    lanes = LANES
    top_of_lanes, lane = 378.0, 20.0
    block = len(lanes) * lane + 16
    height = top_of_lanes + block * len(story.traces) + 76
    title = words["title"].format(plan=story.plan, workers=len(story.traces))
    sheet = Sheet(WIDTH, height, title=title, words=words["desc"])
    sheet.text(20, 30, title, size=16, bold=True)
    _losses(sheet, story, words, language, top=66, height=220)
    _timeline(sheet, story, words, language, top=top_of_lanes, lane=lane, block=block)
    sheet.key(
        LEFT,
        height - 16,
        [
            ("compute", words["forward"]),
            ("compute2", words["backward"]),
            ("other", words["update"]),
            ("hidden", words["hidden"]),
            ("exposed", words["exposed"]),
        ],
    )
    return sheet


def _losses(
    sheet: Sheet,
    story: Story,
    words: Mapping[str, str],
    language: str,
    *,
    top: float,
    height: float,
) -> None:
    steps = [step for step, _ in story.losses]
    values = [loss for _, loss in story.losses]
    low = min([*values, story.validation or values[-1], story.entropy])
    high = max([*values, story.entropy])
    floor, ceiling = int(low), -int(-high // 1)
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def at(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + PLOT * (step - first) / (last - first)
        return x, top + height * (ceiling - loss) / (ceiling - floor)

    for mark in range(floor, ceiling + 1):
        y = at(first, mark)[1]
        sheet.line([(LEFT, y), (LEFT + PLOT, y)])
        sheet.text(LEFT - 8, y + 4, str(mark), colour="pale", anchor="end")
    sheet.text(LEFT, top - 8, words["loss"], colour="pale")
    for mark in _marks(last, 6):
        if mark >= first:
            sheet.text(
                at(mark, floor)[0], top + height + 16, str(mark), colour="pale", anchor="middle"
            )
    sheet.text(LEFT + PLOT, top + height + 32, words["step"], colour="pale", anchor="end")
    y = at(first, story.entropy)[1]
    sheet.line([(LEFT, y), (LEFT + PLOT, y)], "exposed", width=1.6, dashed=True)
    told = words["entropy"].format(value=_number(story.entropy, 2, language))
    sheet.text(LEFT + PLOT, y - 6, told, anchor="end")
    sheet.line([at(*pair) for pair in story.losses], "compute", width=1.8)
    if story.validation is not None:
        x, y = at(last, story.validation)
        sheet.dot(x, y, 4, "compute")
        told = words["validation"].format(value=_number(story.validation, 2, language))
        sheet.text(x - 6, y - 12, told, anchor="end", bold=True)


def _timeline(
    sheet: Sheet,
    story: Story,
    words: Mapping[str, str],
    language: str,
    *,
    top: float,
    lane: float,
    block: float,
) -> None:
    begin = min(_start(event) for events in story.traces for event in events)
    end = max(_end(event) for events in story.traces for event in events)
    shares = [sum(_end(e) - _start(e) for e in events if e["name"] == "exposed") / (end - begin)
              for events in story.traces]  # fmt: skip
    told = words["timeline"].format(
        step=story.step,
        ms=_number((end - begin) / 1e3, 0, language),
        share0=_share(shares[0], language),
        share1=_share(shares[-1], language),
    )
    sheet.text(20, top - 34, told, size=14, bold=True)

    def x(time_us: float) -> float:
        return LEFT + PLOT * (time_us - begin) / (end - begin)

    bottom = top + block * len(story.traces) - 12
    for mark in _marks((end - begin) / 1e3, 8):
        at = x(begin + mark * 1e3)
        sheet.line([(at, top - 8), (at, bottom)])
        sheet.text(at, bottom + 16, f"{mark:g}", colour="pale", anchor="middle")
    sheet.text(LEFT + PLOT, bottom + 32, words["ms"], colour="pale", anchor="end")
    for rank, events in enumerate(story.traces):
        y = top + rank * block
        sheet.text(20, y + 14, f"{words['rank']} {rank}", bold=True)
        for index, name in enumerate(LANES):
            sheet.text(LEFT - 8, y + index * lane + 13, words[name],
                       colour="pale", anchor="end", size=10.5)  # fmt: skip
        _lanes(sheet, events, x, y, lane)


def _lanes(sheet: Sheet, events: Sequence[Event], x: object, y: float, lane: float) -> None:
    assert callable(x)
    high = lane - 5

    def box(event: Event, row: int, colour: str) -> None:
        tip = f"{event['name']}: {(_end(event) - _start(event)) / 1e3:.2f} ms"
        left = x(_start(event))
        sheet.rect(left, y + row * lane, x(_end(event)) - left, high, colour, tip=tip)

    messages = [e for e in events if e["cat"] == "communicate" and "op" in _args(e)]
    waits = [e for e in events if e["name"] == "exposed"]
    for event in events:
        name = str(event["name"])
        if event["cat"] == "compute":
            box(event, 0, "compute" if "F" in name else "compute2")
        elif name in ("norm", "adamw"):
            box(event, 0, "other")
    for event in waits:
        box(event, 0, "exposed")
    for event in messages:
        row = _LANE_OF.get(str(event["name"]).split()[0], 1)
        box(event, row, "hidden")
        until = _end(event)
        since = until - float(str(_args(event)["exposed_us"]))
        box({**event, "ts": since, "dur": until - since}, row, "exposed")


#: first word of a message's tag -> lane
_LANE_OF = {"weight": 1, "gradient": 2, "replica": 2, "word": 3}


def _args(event: Event) -> Mapping[str, object]:
    found = event["args"]
    assert isinstance(found, dict)
    return found


def _start(event: Event) -> float:
    return float(str(event["ts"]))


def _end(event: Event) -> float:
    return _start(event) + float(str(event["dur"]))


def _marks(most: float, about: int) -> list[int]:
    """Round numbers from 0 to `most`, about so many."""
    for unit in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000):
        if most / unit <= about:
            return list(range(0, int(most) + 1, unit))
    return [0]


def _number(value: float, digits: int, language: str) -> str:
    text = f"{value:.{digits}f}"
    return text.replace(".", ",") if language == "es" else text


def _share(value: float, language: str) -> str:
    return f"{value:.0%}" if language == "en" else f"{100 * value:.0f} %"


def main() -> None:
    """Read the run named on the command line and write both pictures."""
    run_dir = Path(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent
    story = read(run_dir)
    for language, name in (("en", "run.svg"), ("es", "run.es.svg")):
        draw(story, language).write(folder / name)


if __name__ == "__main__":
    main()
