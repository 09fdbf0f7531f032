"""The grid as a picture: one self-contained SVG, no script, no font file, nothing fetched.

Hue is the op (blue F, orange B, green W, told apart also by the colour-blind), tone is the chunk
(dark first, light last), the number is the microbatch, and every cell says its action and times
when pointed at. Right of each row: the rank's idle share and its peak of live activations.
Numbers are left out where a cell is too narrow for them, and the words for pointing at above 20,000
cells (64 ranks x 512 microbatches is 98,304 cells and 8 MB).

Rejected: a plotting library (a dependency, and 10 times the bytes), and a canvas with a script,
which a report page under a strict content policy would not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal
from xml.sax.saxutils import escape

from reparto.schedule.actions import Action, Op, Schedule
from reparto.schedule.timing import Timeline, simulate

Language = Literal["en", "es"]

_HUES = MappingProxyType({Op.F: (212, 62), Op.B: (24, 85), Op.W: (152, 45)})
_DARK, _LIGHT = 38, 74  # lightness of the first and the last chunk, per cent
_ALONE = 42  # lightness of the only chunk
_WHITE_BELOW = 50  # lightness under which white digits can be read
_CELL = 24.0  # width of the shortest action where the step is short
_ROW = 28  # height of a row
_GAP = 4  # between rows
_PLOT = 1500.0  # a long step is squeezed to this width
_TOP = 78  # title, figures, ruler
_BELOW = 74  # legend
_RIGHT = 110  # two columns of figures
_LEAST = 760  # wide enough for the words
_MANY = 20_000  # cells
_INK, _PALE, _IDLE = "#1f2933", "#616e7c", "#eef1f5"

_WORDS = MappingProxyType(
    {
        "en": MappingProxyType(
            {
                "rank": "rank",
                "idle": "idle",
                "live": "live",
                "F": "forward",
                "B": "input gradient",
                "W": "weight gradient",
                "stage": "stage",
                "stages": "stages",
                "shape": "{p} × {v} stages, {m} microbatches",
                "figures": "bubble {bubble:.1f} % · step {step:g} {unit} · "
                "at most {live:g} live activations (chunks) on a rank",
                "slots": "slots",
                "tone": "darker: first chunk, lighter: last",
                "number": "number: microbatch",
            }
        ),
        "es": MappingProxyType(
            {
                "rank": "rango",
                "idle": "espera",
                "live": "vivas",
                "F": "paso adelante",
                "B": "gradiente de la entrada",
                "W": "gradiente de los pesos",
                "stage": "etapa",
                "stages": "etapas",
                "shape": "{p} × {v} etapas, {m} microlotes",
                "figures": "burbuja {bubble:.1f} % · paso {step:g} {unit} · "
                "como máximo {live:g} activaciones vivas (trozos) en un rango",
                "slots": "turnos",
                "tone": "oscuro: primer trozo, claro: último",
                "number": "número: microlote",
            }
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class _Sheet:
    """Where things go; all lengths in pixels."""

    timeline: Timeline
    """What is drawn."""
    words: MappingProxyType[str, str]
    """The words in the reader's language."""
    timed: bool
    """True for a timeline in seconds, False for slots."""
    left: float
    """Where the time axis starts."""
    scale: float
    """Pixels of a second or slot."""
    digits: float
    """Font size of the numbers in the cells, one for the whole picture."""

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def plot(self) -> float:
        """Width of the time axis."""
        return self.timeline.step_s * self.scale

    @property
    def figures(self) -> float:
        """Where the columns of figures start."""
        return self.left + max(self.plot, 300) + 14

    @property
    def bottom(self) -> int:
        """Where the last row ends."""
        return _TOP + self.schedule.num_ranks * (_ROW + _GAP)


def draw_svg(what: Schedule | Timeline, *, language: Language = "en") -> str:
    """The grid of a schedule (F = B = W = 1, free messages) or of a timeline as an SVG document.

    For a timeline, widths are seconds. Returns the whole document, valid XML, about 150 bytes for
    each action.
    """
    sheet = _sheet(what, _WORDS[language])
    parts = [*_frame(sheet), *_ruler(sheet)]
    for rank in range(sheet.schedule.num_ranks):
        parts += _row(sheet, rank)
    return "\n".join([*parts, *_legend(sheet), "</svg>\n"])


def _sheet(what: Schedule | Timeline, words: MappingProxyType[str, str]) -> _Sheet:
    timeline = what if isinstance(what, Timeline) else simulate(what)
    schedule = timeline.schedule
    ranks = range(schedule.num_ranks)
    lengths = [end - start for rank in ranks for _, start, end in timeline.computing(rank)]
    shortest_s = min((length for length in lengths if length > 0), default=1.0)
    scale = min(_CELL / shortest_s, _PLOT / (timeline.step_s or 1.0))
    names = [_row_name(schedule, rank, words) for rank in ranks]
    return _Sheet(
        timeline=timeline,
        words=words,
        timed=isinstance(what, Timeline),
        left=12 + 7.2 * max(map(len, names)),
        scale=scale,
        digits=max(7.0, min(12.0, scale * shortest_s / 2)),
    )


def _frame(sheet: _Sheet) -> Iterator[str]:
    """Head of the document, styles, title and figures."""
    schedule, words = sheet.schedule, sheet.words
    width, height = max(sheet.figures + _RIGHT, _LEAST), sheet.bottom + _BELOW
    name = escape("".join(c if c.isprintable() else "?" for c in schedule.name))
    shape = escape(
        words["shape"].format(
            p=schedule.num_ranks, v=schedule.num_chunks, m=schedule.num_microbatches
        )
    )
    figures = escape(
        words["figures"].format(
            bubble=100 * sheet.timeline.bubble_share,
            step=float(f"{sheet.timeline.step_s:.4g}"),
            unit="s" if sheet.timed else words["slots"],
            live=max(peaks.live for peaks in sheet.timeline.peaks),
        )
    )
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="12">'
    )
    yield f"<title>{name}: {shape}</title>"
    yield f"<desc>{figures}</desc>"
    yield f"<style>{_style(schedule.num_chunks)}</style>"
    yield f'<rect width="{width:.0f}" height="{height}" fill="#fff"/>'
    yield (
        f'<text x="12" y="26" font-size="17" font-weight="600">{name}'
        f'<tspan dx="10" font-size="13" font-weight="400" class="p">{shape}</tspan></text>'
    )
    yield f'<text x="12" y="47" class="p">{figures}</text>'
    yield f'<text x="{sheet.figures:.1f}" y="{_TOP - 8}" class="p">{words["idle"]}</text>'
    yield f'<text x="{sheet.figures + 52:.1f}" y="{_TOP - 8}" class="p">{words["live"]}</text>'


def _style(num_chunks: int) -> str:
    rules = [f"text{{fill:{_INK}}}", f".p{{fill:{_PALE}}}"]
    for op, (hue, saturation) in _HUES.items():
        for chunk in range(num_chunks):
            light: float = _ALONE
            if num_chunks > 1:
                light = _DARK + (_LIGHT - _DARK) * chunk / (num_chunks - 1)
            ink = "#fff" if light < _WHITE_BELOW else _INK
            kind = f"{op.value}{chunk}"
            rules.append(f".{kind}{{fill:hsl({hue},{saturation}%,{light:.0f}%)}}")
            rules.append(f".{kind}t{{fill:{ink};text-anchor:middle;pointer-events:none}}")
    return "".join(rules)


def _ruler(sheet: _Sheet) -> Iterator[str]:
    """A mark every 90 to 225 pixels, at 1, 2 or 5 times a power of ten."""
    step, power = 1.0, -9
    while step * 10.0**power * sheet.scale < 90:
        step, power = {1.0: (2.0, power), 2.0: (5.0, power), 5.0: (1.0, power + 1)}[step]
    every = step * 10.0**power
    unit = " s" if sheet.timed else ""
    for number in range(int(sheet.timeline.step_s / every) + 1):
        x = sheet.left + number * every * sheet.scale
        yield f'<path d="M{x:.1f} {_TOP - 4}V{sheet.bottom}" stroke="#d5dbe3"/>'
        yield (
            f'<text x="{x:.1f}" y="{_TOP - 8}" class="p" text-anchor="middle" '
            f'font-size="11">{number * every:g}{unit}</text>'
        )


def _row_name(schedule: Schedule, rank: int, words: MappingProxyType[str, str]) -> str:
    stages = ", ".join(map(str, schedule.stages(rank)[:4]))
    more = ", …" if schedule.num_chunks > 4 else ""
    word = words["stage" if schedule.num_chunks == 1 else "stages"]
    return f"{words['rank']} {rank} ({word} {stages}{more})"


def _row(sheet: _Sheet, rank: int) -> Iterator[str]:
    y = _TOP + rank * (_ROW + _GAP)
    base = y + _ROW / 2 + 4
    name = escape(_row_name(sheet.schedule, rank, sheet.words))
    idle, live = sheet.timeline.bubble_share_by_rank[rank], sheet.timeline.peaks[rank].live
    yield f'<text x="12" y="{base}">{name}</text>'
    yield (
        f'<rect x="{sheet.left:.1f}" y="{y}" width="{sheet.plot:.1f}" height="{_ROW}" '
        f'fill="{_IDLE}"/>'
    )
    for action, start_s, end_s in sheet.timeline.computing(rank):
        yield from _cell(sheet, action, start_s, end_s, y)
    yield f'<text x="{sheet.figures:.1f}" y="{base}">{100 * idle:.1f} %</text>'
    yield f'<text x="{sheet.figures + 52:.1f}" y="{base}">{live:g}</text>'


def _cell(sheet: _Sheet, action: Action, start_s: float, end_s: float, y: int) -> Iterator[str]:
    schedule = sheet.schedule
    kind = f"{action.op.value}{schedule.chunk(action.pipeline_stage)}"
    x, wide = sheet.left + start_s * sheet.scale, (end_s - start_s) * sheet.scale
    gap = 1.0 if wide > 4 else 0.0
    hint = ""
    if 3 * schedule.num_stages * schedule.num_microbatches <= _MANY:
        unit = " s" if sheet.timed else ""
        hint = f"<title>{action}: {start_s:.6g} – {end_s:.6g}{unit}</title>"
    yield (
        f'<rect class="{kind}" x="{x + gap / 2:.1f}" y="{y}" width="{max(0.0, wide - gap):.2f}" '
        f'height="{_ROW}" rx="{2 * gap:.0f}">{hint}</rect>'
    )
    label = str(action.microbatch)
    if 0.62 * sheet.digits * len(label) <= wide - 1:
        base = y + _ROW / 2 + 0.36 * sheet.digits
        yield (
            f'<text class="{kind}t" x="{x + wide / 2:.1f}" y="{base:.1f}" '
            f'font-size="{sheet.digits:.1f}">{label}</text>'
        )


def _legend(sheet: _Sheet) -> Iterator[str]:
    words, y, x = sheet.words, sheet.bottom + 30, 12.0
    chunks = sheet.schedule.num_chunks
    box = f'y="{y - 11}" width="14" height="14" rx="2"'
    for op in _HUES:
        for chunk in sorted({0, chunks - 1}):
            yield f'<rect class="{op.value}{chunk}" x="{x:.0f}" {box}/>'
            x += 16
        text = f"{op.value} {words[op.value]}"
        yield f'<text x="{x + 4:.0f}" y="{y + 1}">{text}</text>'
        x += 7 * len(text) + 24
    yield f'<rect x="{x:.0f}" {box} fill="{_IDLE}" stroke="#cbd2d9"/>'
    yield f'<text x="{x + 20:.0f}" y="{y + 1}">{words["idle"]}</text>'
    notes = [words["number"]] + ([words["tone"]] if chunks > 1 else [])
    yield f'<text x="12" y="{y + 26}" class="p">{escape(" · ".join(notes))}</text>'
