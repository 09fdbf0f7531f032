"""The pictures of the strategies that cut the model: tensor and pipeline.

    python docs/pictures/model_axes.py [FOLDER]

| picture | shows | from |
|---|---|---|
| `tensor` | which part of every matrix a rank holds; what crosses, and where | `holding` |
| `pipeline` | which blocks stand on which stage, cut by cost | `stage_cuts`, `decoder_costs` |
| `schedule-NAME` | when each rank does what | `generate`, `draw_svg` |
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from svg import Sheet

from reparto.config.model import parameter_shapes, preset
from reparto.config.plan import Plan
from reparto.partition.place import holding, stage_cuts
from reparto.partition.show import decoder_map
from reparto.schedule.generate import generate
from reparto.schedule.rules import default_chunks
from reparto.schedule.svg import Language, draw_svg

Words = Mapping[str, str]

WORDS: Mapping[Language, Words] = MappingProxyType(
    {
        "en": MappingProxyType(
            {
                "tensor": "Tensor parallelism: {n} ranks share every matrix of a layer",
                "tensor desc": "The matrices of one decoder layer, cut by rank, and the messages",
                "rank": "rank {r}",
                "shape": "weights as (out, in): rows are outputs, columns are inputs",
                "attention": "attention",
                "feed-forward": "feed-forward",
                "plain": "plain",
                "sequence": "sequence_parallel",
                "sum": "all_reduce",
                "back": "(backward: all_reduce)",
                "gather": "all_gather",
                "scatter": "reduce_scatter",
                "pipeline": "Pipeline: which blocks stand on which rank ({model} model)",
                "pipeline desc": "Blocks by relative cost, grouped by stage",
                "cost": "widths are the cost of a block; the slowest rank sets the pace",
                "by cost": "{p} ranks, cut by cost",
                "slowest": "slowest {share}",
                "blocks": "E embedding, 0 to {last} layers, N norm, H head",
                "point": ".",
            }
        ),
        "es": MappingProxyType(
            {
                "tensor": "Paralelismo tensorial: {n} rangos se reparten cada matriz de una capa",
                "tensor desc": "Las matrices de una capa, cortadas por rango, y los mensajes",
                "rank": "rango {r}",
                "shape": "pesos como (salida, entrada): filas, salidas; columnas, entradas",
                "attention": "atención",
                "feed-forward": "red intermedia",
                "plain": "normal",
                "sequence": "sequence_parallel",
                "sum": "all_reduce",
                "back": "(a la vuelta: all_reduce)",
                "gather": "all_gather",
                "scatter": "reduce_scatter",
                "pipeline": "Cadena: qué bloques están en qué rango (modelo {model})",
                "pipeline desc": "Bloques según su coste relativo, agrupados por etapa",
                "cost": "los anchos son el coste de un bloque; el rango más lento marca el ritmo",
                "by cost": "{p} rangos, cortado por coste",
                "slowest": "el más lento, {share}",
                "blocks": "E embedding, 0 a {last} capas, N norma, H cabeza",
                "point": ",",
            }
        ),
    }
)

WIDTH = 900.0
#: the matrices of a layer, in the order data meets them, with where they stand
MATRICES = (
    ("q", "self_attn.q_proj", 60),
    ("k", "self_attn.k_proj", 140),
    ("v", "self_attn.v_proj", 220),
    ("o", "self_attn.o_proj", 340),
    ("gate", "mlp.gate_proj", 480),
    ("up", "mlp.up_proj", 560),
    ("down", "mlp.down_proj", 680),
)


def tensor_picture(words: Words) -> Sheet:
    """One layer of the 10m model over four tensor ranks."""
    ranks, scale, top = 4, 0.19, 120.0
    config = preset("10m")
    shapes = parameter_shapes(config)
    plan = Plan.parse(f"tensor={ranks}")
    model = decoder_map(config)
    title = words["tensor"].format(n=ranks)
    sheet = Sheet(WIDTH, 440, title=title, words=words["tensor desc"])
    sheet.text(20, 30, title, size=16, bold=True)
    sheet.text(20, 56, words["shape"], colour="pale")
    sheet.key(20, 80, [(f"rank{r}", words["rank"].format(r=r)) for r in range(ranks)])
    for rank in range(ranks):
        table = holding(model, plan, rank).table
        for _, path, x in MATRICES:
            for box in table[f"model.layers.0.{path}.weight"].held:
                sheet.rect(
                    x + box.start[1] * scale,
                    top + box.start[0] * scale,
                    box.size[1] * scale,
                    box.size[0] * scale,
                    f"rank{rank}",
                    edge="card",
                )
    for label, path, x in MATRICES:
        rows, columns = shapes[f"model.layers.0.{path}.weight"]
        sheet.text(x, top - 8, label, mono=True)
        sheet.text(
            x, top + rows * scale + 14, f"{rows} x {columns}", size=10, colour="pale", mono=True
        )
    sheet.text(60, 320, words["attention"], bold=True)
    sheet.text(480, 320, words["feed-forward"], bold=True)
    _messages(sheet, words)
    return sheet


def _messages(sheet: Sheet, words: Words) -> None:
    """Where messages stand in forward: at the entry and the exit of each half of a layer."""
    for row, (name, entry, leave) in enumerate(
        (("plain", "back", "sum"), ("sequence", "gather", "scatter"))
    ):
        y = 352 + row * 50
        sheet.text(20, y - 12, words[name], colour="pale", size=11)
        sheet.line([(60, y), (870, y)], "line", width=2)
        for first, last in ((60, 400), (480, 838)):
            sheet.dot(first, y, 5, "hidden" if entry == "gather" else "pale")
            sheet.text(first + 10, y + 16, words[entry], size=11, colour="pale")
            sheet.dot(last, y, 5, "exposed")
            sheet.text(last + 8, y + 16, words[leave], size=11, anchor="end")


def pipeline_picture(words: Words) -> Sheet:
    """The 10m model's blocks on two and on four ranks."""
    config = preset("10m")
    model = decoder_map(config, sequence_length=128)
    costs = list(model.costs or [])
    labels = ["E", *map(str, range(config.num_hidden_layers)), "N", "H"]
    title = words["pipeline"].format(model="10m")
    sheet = Sheet(WIDTH, 260, title=title, words=words["pipeline desc"])
    sheet.text(20, 30, title, size=16, bold=True)
    sheet.text(20, 54, words["cost"], colour="pale")
    scale = 760 / sum(costs)
    for row, ranks in enumerate((2, 4)):
        y = 100 + row * 76
        sheet.text(20, y - 12, words["by cost"].format(p=ranks), bold=True)
        x, dearest = 20.0, 0.0
        cuts = stage_cuts(model, Plan.parse(f"pipeline={ranks}"))
        for rank, (first, count) in enumerate(cuts):
            cost = sum(costs[first : first + count])
            dearest = max(dearest, cost)
            for block in range(first, first + count):
                width = costs[block] * scale
                sheet.rect(x, y, width, 28, f"rank{rank % 4}", edge="card")
                if width > 10:
                    sheet.text(x + width / 2, y + 18, labels[block], colour="card",
                               anchor="middle", size=11)  # fmt: skip
                x += width
            x += 6
        share = f"{100 * dearest / sum(costs):.1f} %".replace(".", words["point"])
        sheet.text(x + 8, y + 18, words["slowest"].format(share=share), size=11, colour="pale")
    sheet.text(20, 240, words["blocks"].format(last=config.num_hidden_layers - 1), colour="pale")
    return sheet


def main() -> None:
    """Write every picture in both languages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for language in WORDS:
        ending = ".svg" if language == "en" else f".{language}.svg"
        tensor_picture(WORDS[language]).write(folder / f"tensor{ending}")
        pipeline_picture(WORDS[language]).write(folder / f"pipeline{ending}")
        for name in ("1f1b", "zb-v"):
            schedule = generate(name, pipeline=4, chunks=default_chunks(name), num_microbatches=8)
            drawn = draw_svg(schedule, language=language)
            (folder / f"schedule-{name}{ending}").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
