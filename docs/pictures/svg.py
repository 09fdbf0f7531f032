"""A sheet of SVG written by hand: rectangles, lines and words on a card that suits light and dark.

One file, no script, no font file, nothing fetched. Colours are named by what they mean (`compute`,
`hidden`, `exposed`, ...) and given twice; the reader's system chooses. The card has a background of
its own, so the words can be read whatever colour the page around it has.

Rejected: a plotting library, which is a dependency of a hundred megabytes for eight drawings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from xml.sax.saxutils import escape

#: meaning -> (light, dark). Blue, orange and green are told apart by the colour-blind as well.
COLOURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "card": ("#ffffff", "#161b22"),
        "ink": ("#1f2933", "#e6edf3"),
        "pale": ("#5d6b7a", "#9aa7b4"),
        "line": ("#d5dbe1", "#39424d"),
        "empty": ("#eef1f5", "#222a33"),
        "compute": ("#2f6db3", "#5b9be0"),
        "compute2": ("#7fa9d8", "#37618f"),
        "hidden": ("#8fcfb0", "#2f7a58"),
        "exposed": ("#e07b1a", "#f0953c"),
        "other": ("#8a6fb8", "#a58ad6"),
        "rank0": ("#2f6db3", "#5b9be0"),
        "rank1": ("#e07b1a", "#f0953c"),
        "rank2": ("#3a9a6d", "#4fbf8a"),
        "rank3": ("#8a6fb8", "#a58ad6"),
    }
)


class Sheet:
    """Shapes in the order they are drawn; `write` makes the file."""

    def __init__(self, width: float, height: float, *, title: str, words: str) -> None:
        """`title` and `words` are what a screen reader says."""
        self.width, self.height = width, height
        self._parts: list[str] = []
        self._title, self._words = title, words

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        *,
        edge: str = "",
        round_: float = 0,
        tip: str = "",
        hatched: bool = False,
    ) -> None:
        """A filled box. `edge` is the colour of its outline, `tip` is shown when pointed at."""
        fill = "hatch" if hatched else f"f-{colour}"
        classes = f"{fill} s-{edge}" if edge else fill
        corner = f' rx="{_n(round_)}"' if round_ else ""
        body = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.4))}" height="{_n(height)}"'
            f'{corner} class="{classes}"{body}'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str = "line",
        *,
        width: float = 1,
        dashed: bool = False,
        arrow: bool = False,
    ) -> None:
        """Straight pieces through `points`."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        head = f' marker-end="url(#head-{colour})"' if arrow else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" class="s-{colour}" '
            f'stroke-width="{_n(width)}"{dash}{head}/>'
        )

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """A filled circle."""
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="f-{colour}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        colour: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """One line of words whose base line is at y."""
        weight = ' font-weight="600"' if bold else ""
        family = ' font-family="ui-monospace, monospace"' if mono else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}" '
            f'class="f-{colour}"{weight}{family}>{escape(words)}</text>'
        )

    def key(
        self, x: float, y: float, entries: Sequence[tuple[str, str]], *, gap: float = 20
    ) -> None:
        """A legend in one row: (colour, words). The colour `hatch` is the pattern."""
        for colour, words in entries:
            self.rect(x, y - 10, 14, 12, colour, edge="line", round_=2, hatched=colour == "hatch")
            self.text(x + 20, y, words, colour="pale")
            x += 20 + 6.4 * len(words) + gap

    def write(self, path: Path) -> None:
        """The whole document."""
        size = f'width="{_n(self.width)}" height="{_n(self.height)}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_n(self.width)} '
            f'{_n(self.height)}" role="img" font-family="system-ui, sans-serif">',
            f"<title>{escape(self._title)}</title>",
            f"<desc>{escape(self._words)}</desc>",
            f"<style>{_style()}</style>",
            f"<defs>{_markers()}{_HATCH}</defs>",
            f'<rect {size} rx="8" class="f-card"/>',
        ]
        path.write_text("\n".join([*head, *self._parts, "</svg>"]) + "\n", encoding="utf-8")


_HATCH = (
    '<pattern id="hatching" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" class="f-empty"/>'
    '<line x1="0" y1="0" x2="0" y2="6" class="s-pale" stroke-width="1.4"/></pattern>'
)


def _style() -> str:
    light, dark = [], []
    for name, (day, night) in COLOURS.items():
        light.append(f".f-{name}{{fill:{day}}}.s-{name}{{stroke:{day}}}")
        dark.append(f".f-{name}{{fill:{night}}}.s-{name}{{stroke:{night}}}")
    return (
        "".join(light)
        + ".hatch{fill:url(#hatching)}"
        + f"@media(prefers-color-scheme:dark){{{''.join(dark)}}}"
    )


def _markers() -> str:
    return "".join(
        f'<marker id="head-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" class="f-{name}"/></marker>'
        for name in ("pale", "hidden", "exposed")
    )


def _n(value: float) -> str:
    """Two decimals at most: a picture that is made again from the same data is the same text."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
