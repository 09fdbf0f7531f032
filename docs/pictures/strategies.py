"""The pictures of the strategy pages, from the placement arithmetic: nothing in them is typed in.

    python docs/pictures/strategies.py [FOLDER]

| picture | shows | from |
|---|---|---|
| `data` | who reads which sequence; what travels when | `batch_slices`, `unit_layouts` |
| `sharding-rows` | who keeps which rows; how they lie in one buffer | `shard_rows`, `flat_layout` |
| `sharding-memory` | bytes of state a rank | `state_bytes` |
| `sharding-messages` | what travels when, by mode | `unit_layouts`, `wire_bytes` |

The timelines follow the rules of `parallel/data.py` and `parallel/zero.py` (what waits for what)
with made-up speeds: a block computes for as long as it has weights, a message takes as long as it
has bytes. They show order and overlap; the picture of a run shows seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from svg import Sheet

from reparto.config.model import ModelConfig, parameter_shapes, preset, tied_parameters
from reparto.config.plan import Plan
from reparto.partition.flat import FlatLayout, flat_layout
from reparto.partition.tensors import Rectangle, rows_and_columns, shard_rows
from reparto.partition.tokens import batch_slices
from reparto.partition.volume import Operation, state_bytes, unit_layouts, wire_bytes
from reparto.units import human_bytes

Words = Mapping[str, str]
Shape = tuple[int, ...]

WORDS: Mapping[str, Words] = MappingProxyType(
    {
        "en": MappingProxyType(
            {
                "point": ".",
                "rank": "rank {r}",
                "data": "Data parallelism: {n} ranks, every one with the whole model",
                "data desc": "Which sequences each rank reads, and when gradients travel",
                "batch": "A batch of {batch}: counts differ by one at most",
                "blocks": "The model's blocks, whole on every rank",
                "block key": "E embedding, 0 to 3 layers, N norm, H head (the same tensor as E)",
                "bucket": "bucket {i}",
                "unit": "{i}",
                "padding": "padding: ignored labels, no loss",
                "step none": "A step of every rank: a bucket leaves when its last gradient is in",
                "scale": "Order and overlap. Widths are weights and bytes, not seconds.",
                "compute": "compute",
                "weights": "weights",
                "gradients": "gradients",
                "forward": "forward",
                "backward": "backward",
                "update": "update",
                "message": "message, hidden",
                "wait": "message the step waits for",
                "rows": "Sharding: who keeps which rows ({n} ranks)",
                "rows desc": "Rows of three tensors by rank, and the flat buffer of the unit",
                "tensors": "Three tensors of one unit, cut by rows, longer runs first",
                "buffer": "The same unit in one buffer: a piece a rank, slots at equal places",
                "slot": "padding, less than one row a tensor",
                "one row": "one row",
                "memory": "Bytes of training state a rank keeps, by what is shared out",
                "memory desc": "Stacked bars: weights, gradients at their peak, moments",
                "case": "{model} model, {n} ranks, float32",
                "moments": "moments",
                "peak": "gradients, at their peak",
                "messages": "Sharding: what travels when ({n} ranks)",
                "messages desc": "A step's computation and messages for the three modes",
                "optimizer": "shard=optimizer: gradients are scattered, weights gathered after",
                "gradients mode": "shard=gradients: the same; a full gradient is freed once sent",
                "parameters": "shard=parameters: weights are gathered before each block, twice",
            }
        ),
        "es": MappingProxyType(
            {
                "point": ",",
                "rank": "rango {r}",
                "data": "Paralelismo de datos: {n} rangos, cada uno con el modelo entero",
                "data desc": "Qué secuencias lee cada rango y cuándo viajan los gradientes",
                "batch": "Un lote de {batch}: partes que difieren en una a lo sumo",
                "blocks": "Los bloques del modelo, enteros en cada rango",
                "block key": "E embedding, 0 a 3 capas, N norma, H cabeza (el mismo tensor que E)",
                "bucket": "cubeta {i}",
                "unit": "{i}",
                "padding": "relleno: etiquetas ignoradas, sin pérdida",
                "step none": "Un paso de cada rango: una cubeta sale con su último gradiente",
                "scale": "Orden y solapamiento. Los anchos son pesos y bytes, no segundos.",
                "compute": "cálculo",
                "weights": "pesos",
                "gradients": "gradientes",
                "forward": "hacia delante",
                "backward": "hacia atrás",
                "update": "actualización",
                "message": "mensaje oculto",
                "wait": "mensaje que el paso espera",
                "rows": "Fragmentación: quién guarda qué filas ({n} rangos)",
                "rows desc": "Filas de tres tensores por rango, y la memoria plana de la unidad",
                "tensors": "Tres tensores de una unidad, cortados por filas, de más a menos",
                "buffer": "La misma unidad en memoria plana: una pieza por rango, huecos alineados",
                "slot": "relleno, menos de una fila por tensor",
                "one row": "una fila",
                "memory": "Bytes de estado que guarda un rango, según lo que se reparte",
                "memory desc": "Barras apiladas: pesos, gradientes en su máximo, momentos",
                "case": "modelo {model}, {n} rangos, float32",
                "moments": "momentos",
                "peak": "gradientes, en su máximo",
                "messages": "Fragmentación: qué viaja y cuándo ({n} rangos)",
                "messages desc": "El cálculo y los mensajes de un paso en los tres modos",
                "optimizer": "shard=optimizer: se reparten gradientes y, al final, se reúnen pesos",
                "gradients mode": "shard=gradients: igual; cada gradiente se libera al enviarlo",
                "parameters": "shard=parameters: se reúnen pesos antes de cada bloque, dos veces",
            }
        ),
    }
)

WIDTH, LEFT, RIGHT = 900.0, 96.0, 24.0
RANKS = 4
#: what a byte on the wire takes, where a weight takes 1 forward: so that much hides and not all
_BYTE = 0.2


# --- a step in order ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that takes time on one lane."""

    lane: str
    "compute, weights or gradients"
    start: float
    end: float
    words: str
    colour: str


@dataclass(kw_only=True)
class Step:
    """The bars of one step, built by following what waits for what."""

    bars: list[Bar] = field(default_factory=list)
    now: float = 0.0
    "until when the rank has computed or waited"
    free: dict[str, float] = field(default_factory=lambda: {"weights": 0.0, "gradients": 0.0})
    "until when each lane of messages is taken"

    def compute(self, length: float, words: str, colour: str) -> None:
        self.bars.append(
            Bar(lane="compute", start=self.now, end=self.now + length, words=words, colour=colour)
        )
        self.now += length

    def message(self, lane: str, length: float, words: str, *, issued: float) -> float:
        """A message that leaves at `issued`, or when its lane is free; returns when it ends."""
        start = max(issued, self.free[lane])
        self.free[lane] = start + length
        self.bars.append(
            Bar(lane=lane, start=start, end=start + length, words=words, colour="hidden")
        )
        return start + length

    def wait(self, until: float) -> None:
        """The rank stands still; what lies under the gap is exposed."""
        self.now = max(self.now, until)


def blocks_of(model: ModelConfig) -> list[list[str]]:
    """Names by block, as the decoder lists them: embedding, layers, norm, head."""
    names = list(parameter_shapes(model))
    blocks: list[list[str]] = [names[:1]]
    for layer in range(model.num_hidden_layers):
        blocks.append([name for name in names if name.startswith(f"model.layers.{layer}.")])
    blocks.append(["model.norm.weight"])
    blocks.append([tied_parameters(model).get("lm_head.weight", "lm_head.weight")])
    return blocks


def labels_of(model: ModelConfig) -> list[str]:
    """A short name for each block."""
    return ["E", *map(str, range(model.num_hidden_layers)), "N", "H"]


def play(model: ModelConfig, plan: Plan) -> Step:
    """One step of `plan`: the rules of `parallel/data.py` and `parallel/zero.py`, made-up speeds.

    A weight computes for 1 forward and 2 backward, a byte on the wire takes `_BYTE`. Messages are
    named as their tags are: buckets in the order they leave, units in the order of the model.
    """
    labels = labels_of(model)
    shapes = parameter_shapes(model)
    blocks = blocks_of(model)
    first_use: set[str] = set()
    owned: list[dict[str, Shape]] = []
    for names in blocks:
        owned.append({name: shapes[name] for name in names if name not in first_use})
        first_use.update(names)
    units = unit_layouts([one for one in owned if one], plan=plan, gradient_bytes=4)
    unit_of = {slot.name: index for index, unit in enumerate(units) for slot in unit.slots}
    needs = [list(dict.fromkeys(unit_of[name] for name in names)) for names in blocks]
    numel = [sum(_numel(shapes[name]) for name in names) for names in blocks]
    numel[0] = 0  # a look-up computes next to nothing
    sharded = plan.shard == "parameters"
    step = Step()
    arrived: dict[int, float] = {}

    def length(unit: int, operation: Operation) -> float:
        return _BYTE * wire_bytes(operation, units[unit].whole_numel * 4, RANKS)

    def gather(unit: int) -> None:
        if sharded and unit not in arrived:
            arrived[unit] = step.message(
                "weights", length(unit, "all_gather"), str(unit), issued=step.now
            )

    def need(block: int) -> None:
        for unit in needs[block]:
            gather(unit)
            step.wait(arrived.get(unit, 0.0))

    last = len(blocks) - 1
    last_use = {unit: block for block, wanted in enumerate(needs) for unit in wanted}
    for block in range(last + 1):
        need(block)
        for unit in needs[block + 1] if block < last else ():
            gather(unit)
        step.compute(numel[block], labels[block], "compute")
        for unit in needs[block]:
            if last_use[unit] == block and block != last:
                arrived.pop(unit, None)

    waiting = {unit: {slot.name for slot in one.slots} for unit, one in enumerate(units)}
    leaving, reduced = len(units) - 1, 0.0
    operation: Operation = "all_reduce" if plan.shard == "none" else "reduce_scatter"
    for block in range(last, -1, -1):
        need(block)
        for unit in needs[block - 1] if block else ():
            gather(unit)
        step.compute(2 * numel[block], labels[block], "compute2")
        if block < last or block == 0:
            for weight in owned[block]:
                waiting[unit_of[weight]].discard(weight)
        while leaving >= 0 and not waiting[leaving]:
            name = str(len(units) - 1 - leaving if plan.shard == "none" else leaving)
            reduced = step.message("gradients", length(leaving, operation), name, issued=step.now)
            leaving -= 1
    step.wait(reduced)
    owns = sum(one.whole_numel for one in units) / (1 if plan.shard == "none" else RANKS)
    step.compute(0.5 * owns, "", "other")
    if plan.shard in ("optimizer", "gradients"):
        for unit in range(len(units)):
            end = step.message("weights", length(unit, "all_gather"), str(unit), issued=step.now)
            step.wait(end)
    return step


def _numel(shape: Shape) -> int:
    rows, columns = rows_and_columns(shape)
    return rows * columns


def draw_step(
    sheet: Sheet,
    step: Step,
    words: Words,
    *,
    top: float,
    scale: float,
    lanes: Sequence[str],
    message: str,
) -> None:
    """Lanes of one step; the part of a message under which nothing is computed is `exposed`."""
    high, lane_height = 20.0, 26.0
    busy = [(bar.start, bar.end) for bar in step.bars if bar.lane == "compute"]
    for index, lane in enumerate(lanes):
        y = top + index * lane_height
        sheet.text(LEFT - 8, y + 14, words[lane], colour="pale", anchor="end")
        sheet.rect(LEFT, y, WIDTH - LEFT - RIGHT, high, "empty")
        for bar in (one for one in step.bars if one.lane == lane):
            x, width = LEFT + bar.start * scale, (bar.end - bar.start) * scale
            sheet.rect(x, y, width, high, bar.colour, edge="card")
            if lane != "compute":
                for start, end in _uncovered(bar.start, bar.end, busy):
                    sheet.rect(
                        LEFT + start * scale, y, (end - start) * scale, high, "exposed", edge="card"
                    )
            told = bar.words if lane == "compute" else words[message].format(i=bar.words)
            if bar.words and width > 8 + 5.5 * len(told):
                sheet.text(x + width / 2, y + 14, told, size=11, colour="card", anchor="middle")


def _uncovered(
    start: float, end: float, busy: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The parts of [start, end) outside all of `busy`, which is sorted."""
    found = []
    for first, last in busy:
        if first > start and start < end:
            if min(first, end) - start > 1:
                found.append((start, min(first, end)))
            start = max(start, last)
        else:
            start = max(start, last) if last > start else start
    if end - start > 1:
        found.append((start, end))
    return found


# --- pictures -------------------------------------------------------------------------------------


def data_picture(words: Words) -> Sheet:
    """Sequences by rank above, one step below."""
    batch = 10
    split = batch_slices(batch, RANKS, 1)
    plan = Plan(data=RANKS, bucket_bytes=1024 * 1024)
    model = preset("1m").with_vocab_size(1024)
    step = play(model, plan)
    title = words["data"].format(n=RANKS)
    sheet = Sheet(WIDTH, 420, title=title, words=words["data desc"])
    sheet.text(20, 30, title, size=16, bold=True)
    sheet.text(20, 62, words["batch"].format(batch=batch), bold=True)
    cell, gap = 44.0, 4.0
    for rank, cells in enumerate(split.cells):
        y = 78 + rank * 34
        sheet.text(LEFT - 8, y + 18, words["rank"].format(r=rank), colour="pale", anchor="end")
        for place in range(split.sequences):
            x = LEFT + place * (cell + gap)
            if place < len(cells[0]):
                sheet.rect(x, y, cell, 26, f"rank{rank}", round_=3)
                sheet.text(
                    x + cell / 2, y + 17, str(cells[0][place]), colour="card", anchor="middle"
                )
            else:
                sheet.rect(x, y, cell, 26, "empty", round_=3, hatched=True)
        for index, name in enumerate(labels_of(model)):
            x = 430 + index * (cell + gap)
            sheet.rect(x, y, cell, 26, "compute", round_=3)
            sheet.text(x + cell / 2, y + 17, name, colour="card", anchor="middle")
    sheet.text(430, 62, words["blocks"], bold=True)
    sheet.text(430, 232, words["block key"], colour="pale")
    sheet.key(LEFT, 232, [("hatch", words["padding"])])
    sheet.text(20, 264, words["step none"], bold=True)
    scale = (WIDTH - LEFT - RIGHT) / step.now
    draw_step(
        sheet, step, words, top=280, scale=scale, lanes=("compute", "gradients"), message="bucket"
    )
    sheet.text(LEFT, 354, words["scale"], colour="pale")
    _legend(sheet, words, 398)
    return sheet


def rows_picture(words: Words) -> Sheet:
    """Three tensors by rows, and the flat buffer of their unit."""
    shapes: dict[str, Shape] = {"w": (10, 6), "v": (7, 3), "b": (5,)}
    layout = flat_layout(shapes, num_shards=RANKS)
    title = words["rows"].format(n=RANKS)
    sheet = Sheet(WIDTH, 470, title=title, words=words["rows desc"])
    sheet.text(20, 30, title, size=16, bold=True)
    sheet.text(20, 62, words["tensors"], bold=True)
    x, cell = 40.0, 20.0
    for name, shape in shapes.items():
        _, columns = rows_and_columns(shape)
        sheet.text(x, 90, f"{name}  {' x '.join(map(str, shape))}", mono=True)
        for rank in range(RANKS):
            for box in shard_rows(Rectangle.whole(shape), RANKS, rank):
                for row in range(box.start[0], box.stop[0]):
                    sheet.rect(
                        x, 100 + row * cell, columns * cell, cell, f"rank{rank}", edge="card"
                    )
                middle = 100 + (box.start[0] + box.stop[0]) / 2 * cell + 4
                told = f"{box.start[0]}..{box.stop[0] - 1}"
                if box.size[0] == 1:
                    told = str(box.start[0])
                sheet.text(x + columns * cell + 8, middle, told, colour="pale", mono=True)
        x += columns * cell + 110
    sheet.key(
        600, 120, [("rank0", words["rank"].format(r=0)), ("rank1", words["rank"].format(r=1))]
    )
    sheet.key(
        600, 144, [("rank2", words["rank"].format(r=2)), ("rank3", words["rank"].format(r=3))]
    )
    sheet.key(600, 168, [("hatch", words["slot"])])
    _buffer(sheet, layout, words, top=336)
    return sheet


def _buffer(sheet: Sheet, layout: FlatLayout, words: Words, *, top: float) -> None:
    sheet.text(20, top, words["buffer"], bold=True)
    cell = (WIDTH - 60) / layout.whole_numel
    for shard in range(layout.num_shards):
        x = 30 + shard * layout.piece_numel * cell
        told = words["rank"].format(r=shard)
        sheet.text(
            x + layout.piece_numel * cell / 2, top + 26, told, colour="pale", anchor="middle"
        )
        for slot in layout.slots:
            _, rows = layout.rows_of(slot, shard)
            used = rows * slot.columns
            left = x + slot.offset * cell
            sheet.rect(left, top + 36, slot.numel * cell, 44, "empty", hatched=True, edge="card")
            for row in range(rows):
                sheet.rect(
                    left + row * slot.columns * cell, top + 36, slot.columns * cell, 44,
                    f"rank{shard}", edge="card", tip=f"{slot.name}: {words['one row']}",
                )  # fmt: skip
            if used:
                sheet.text(left + slot.numel * cell / 2, top + 98, slot.name, anchor="middle",
                           colour="pale", mono=True, size=11)  # fmt: skip
        if shard:
            sheet.line([(x, top + 16), (x, top + 104)], "ink", width=1.5)


def memory_picture(words: Words) -> Sheet:
    """Stacked bars for two cases."""
    sheet = Sheet(WIDTH, 400, title=words["memory"], words=words["memory desc"])
    sheet.text(20, 30, words["memory"], size=16, bold=True)
    _bars(sheet, words, model="10m", ranks=2, top=66)
    _bars(sheet, words, model="1b", ranks=8, top=216)
    sheet.key(
        LEFT + 30,
        380,
        [("compute", words["weights"]), ("hidden", words["peak"]), ("other", words["moments"])],
    )
    return sheet


def _bars(sheet: Sheet, words: Words, *, model: str, ranks: int, top: float) -> None:
    config = preset(model)
    shapes = parameter_shapes(config)
    seen: set[str] = set()
    blocks = []
    for block in blocks_of(config):
        blocks.append({name: shapes[name] for name in block if name not in seen})
        seen.update(block)
    sheet.text(20, top, words["case"].format(model=model, n=ranks), bold=True)
    found = []
    for mode in ("none", "optimizer", "gradients", "parameters"):
        plan = Plan.parse(f"data={ranks},shard={mode}")
        layouts = unit_layouts([one for one in blocks if one], plan=plan, gradient_bytes=4)
        found.append((mode, state_bytes(layouts, plan=plan)))
    most = max(state.total for _, state in found)
    left, width = LEFT + 30, WIDTH - LEFT - 140
    for index, (mode, state) in enumerate(found):
        y, x = top + 14 + index * 28, left
        sheet.text(left - 8, y + 15, mode, anchor="end", mono=True)
        parts = (
            ("compute", state.parameters),
            ("hidden", state.gradients),
            ("other", state.optimizer),
        )
        for colour, size in parts:
            sheet.rect(x, y, width * size / most, 22, colour, edge="card")
            x += width * size / most
        sheet.text(x + 8, y + 15, human_bytes(state.total).replace(".", words["point"]))


def messages_picture(words: Words) -> Sheet:
    """The three modes, one step each."""
    model = preset("1m").with_vocab_size(1024)
    title = words["messages"].format(n=RANKS)
    sheet = Sheet(WIDTH, 470, title=title, words=words["messages desc"])
    sheet.text(20, 30, title, size=16, bold=True)
    steps = [
        (name, play(model, Plan.parse(f"data={RANKS},shard={mode},bucket_bytes=1048576")))
        for mode, name in (
            ("optimizer", "optimizer"),
            ("gradients", "gradients mode"),
            ("parameters", "parameters"),
        )
    ]
    scale = (WIDTH - LEFT - RIGHT) / max(step.now for _, step in steps)
    for index, (name, step) in enumerate(steps):
        top = 70 + index * 120
        sheet.text(20, top - 10, words[name], bold=True)
        lanes = ("compute", "weights", "gradients")
        draw_step(sheet, step, words, top=top, scale=scale, lanes=lanes, message="unit")
    sheet.text(LEFT, 418, words["scale"], colour="pale")
    _legend(sheet, words, 450)
    return sheet


def _legend(sheet: Sheet, words: Words, y: float) -> None:
    sheet.key(
        LEFT,
        y,
        [
            ("compute", words["forward"]),
            ("compute2", words["backward"]),
            ("other", words["update"]),
            ("hidden", words["message"]),
            ("exposed", words["wait"]),
        ],
    )


PICTURES: Mapping[str, Callable[[Words], Sheet]] = MappingProxyType(
    {
        "data": data_picture,
        "sharding-rows": rows_picture,
        "sharding-memory": memory_picture,
        "sharding-messages": messages_picture,
    }
)


def main() -> None:
    """Write every picture in both languages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, picture in PICTURES.items():
        for language, ending in (("en", ".svg"), ("es", ".es.svg")):
            picture(WORDS[language]).write(folder / f"{name}{ending}")


if __name__ == "__main__":
    main()
