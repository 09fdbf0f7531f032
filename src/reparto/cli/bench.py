"""`reparto bench NAME`: ratios to named peers, from one interleaved run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.table import Table

from reparto.cli.console import console
from reparto.errors import UserError, nearest_word


def bench(*, name: str, model: str, rounds: int, json_out: bool) -> None:
    """The verb."""
    from reparto.bench.run import BENCHES

    if name not in BENCHES:
        raise UserError(
            f"no benchmark is called `{name}`",
            where="bench",
            legal=", ".join(BENCHES),
            nearest=nearest_word(name, BENCHES),
        )
    if rounds < 3:
        raise UserError(f"{rounds} rounds have no quartiles", where="--rounds", legal=">= 3")
    out = console()

    def tell(words: str) -> None:
        out.print(words, style="dim")

    found = BENCHES[name](model, rounds, tell)
    table = Table(
        title=f"bench {name} {model}: above 1 is better for reparto", title_justify="left"
    )
    for heading in ("peer", "q1", "median", "q3"):
        table.add_column(heading, justify="left" if heading == "peer" else "right")
    ratios, aa = found["ratios"], found["aa"]
    assert isinstance(ratios, dict) and isinstance(aa, dict)
    for peer, one in [*ratios.items(), ("ours against ours", aa)]:
        table.add_row(peer, f"{one['q1']:.3f}", f"{one['median']:.3f}", f"{one['q3']:.3f}")
    out.print(table)
    out.print(str(found["workload"]))
    figures = found["figures"]
    assert isinstance(figures, dict)
    if rows := figures.get("rows"):
        out.print(_rows(rows))
    out.print(json.dumps({key: one for key, one in figures.items() if key != "rows"}))
    if json_out:
        print(json.dumps(found))


def _rows(rows: Sequence[Mapping[str, object]]) -> Table:
    """Figures of many cases, a line each."""
    table = Table()
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(str(one) for one in row.values()))
    return table
