"""Tensor parallelism as index arithmetic: which rectangles of every weight a tensor rank holds.

A *rule table* maps module path patterns to styles; `*` stands for one path element. The model file
holds no parallel code; this file reads the table, `parallel/tensor.py` acts on it.

| style | weight (out, in) is cut by | bias | input | output |
|---|---|---|---|---|
| `vocab_rows` | rows of the table | | token ids, whole | sum over ranks |
| `column` | out | cut | whole | cut by the last dim |
| `row` | in | whole, added once | cut by the last dim | sum over ranks |
| `vocab_column` | out, which is the vocabulary | cut | whole | logits cut by vocabulary |
| `enter` | nothing | | made whole, once for all `column` modules inside | as it comes |
| `enter_leave` | nothing | | the same | sum over ranks of what comes |
| `row_partial` | in | none | cut by the last dim | a term of the sum that an `enter_leave` makes |
| `experts` | nothing; its children may be on other ranks (`experts.py`) | | rows by expert | same |
| `partial` | nothing; gradients are summed over ranks | | as it comes | as it comes |
| `replicated` | nothing | | as it comes | as it comes |

`partial` is for a weight that every rank applies to its own part, such as a norm on each head.

`column packed 4|2|2` is a weight that stores several matrices one below the other, with rows in
that proportion (q|k|v, gate|up): each part is cut, so a rank's local weight is packed the same way.

Rows, columns and vocabulary are cut in runs that differ by at most one, so no size needs padding
and none can leak into a loss or a checkpoint. Rejected: padding the vocabulary to a multiple of the
degree, which needs a mask in the loss, a second shape in every checkpoint and a rule for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reparto.errors import UserError, nearest_word
from reparto.partition.tensors import Placement, Rectangle, Table, split_evenly

#: styles that cut the first dim of their weight (and of their bias), and the one that cuts the last
CUTS_FIRST_DIM = ("vocab_rows", "column", "vocab_column")
CUTS_LAST_DIM = ("row", "row_partial")
#: modules whose first input is made whole, once for the `column` modules inside
ENTERS = ("enter", "enter_leave")
STYLES = (*CUTS_FIRST_DIM, *CUTS_LAST_DIM, *ENTERS, "experts", "partial", "replicated")


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How one module takes part in tensor parallelism."""

    name: str
    "one of `STYLES`"
    parts: tuple[int, ...] = (1,)
    "proportion of rows of the matrices packed in the weight; `(1,)` for a single one"


def parse_style(text: str, *, where: str = "rules") -> Style:
    """`column`, or `column packed 4|2|2`. Raises `UserError` on anything else."""
    words = text.split()
    legal = ", ".join(STYLES) + ", or `column packed 1|1`"
    if not words or words[0] not in STYLES:
        likely = nearest_word(words[0], STYLES) if words else ""
        raise UserError(f"`{text}` is no style", where=where, legal=legal, nearest=likely)
    if len(words) == 1:
        return Style(name=words[0])
    parts = words[2].split("|") if len(words) == 3 and words[1] == "packed" else []
    if words[0] != "column" or not parts or not all(p.isdecimal() and int(p) for p in parts):
        raise UserError(f"`{text}` is no style", where=where, legal=legal)
    return Style(name=words[0], parts=tuple(map(int, parts)))


def module_paths(names: Iterable[str]) -> list[str]:
    """Every module path that the parameter names imply, parents included, in order."""
    found: dict[str, None] = {}
    for name in names:
        elements = name.split(".")[:-1]
        for length in range(1, len(elements) + 1):
            found.setdefault(".".join(elements[:length]))
    return list(found)


def match_rules(rules: Mapping[str, str], paths: Sequence[str]) -> dict[str, Style]:
    """Module path -> style, for every module that a pattern names.

    Raises `UserError` for a pattern that names nothing and a module that two patterns name.
    """
    found: dict[str, tuple[str, Style]] = {}
    by_length: dict[int, list[tuple[str, list[str]]]] = {}
    for path in paths:
        elements = path.split(".")
        by_length.setdefault(len(elements), []).append((path, elements))
    for pattern, text in rules.items():
        style = parse_style(text, where=f"rules `{pattern}`")
        wanted = pattern.split(".")
        hit = False
        for path, elements in by_length.get(len(wanted), []):
            if all(w in ("*", e) for w, e in zip(wanted, elements, strict=True)):
                hit = True
                if path in found:
                    raise UserError(
                        f"module `{path}` is named by `{found[path][0]}` and by `{pattern}`",
                        where="rules",
                        legal="one pattern for each module",
                        nearest=f"remove `{pattern}`",
                    )
                found[path] = (pattern, style)
        if not hit:
            raise UserError(
                f"`{pattern}` names no module of this model",
                where="rules",
                legal="patterns of module paths, `*` for one element",
                nearest=_likely(wanted, paths),
            )
    return {path: found[path][1] for path in paths if path in found}


def _likely(wanted: list[str], paths: Sequence[str]) -> str:
    same_length = [path for path in paths if path.count(".") == len(wanted) - 1]
    return nearest_word(".".join(wanted), same_length or paths)


def held_by(
    shape: tuple[int, ...], style: Style, *, bias: bool, degree: int, index: int, where: str
) -> tuple[Rectangle, ...]:
    """The rectangles of a weight (or bias) of `shape` that tensor rank `index` holds.

    The local tensor is these rectangles one below the other. Raises `UserError` if there are fewer
    rows or columns than ranks, or rows that the packed parts do not divide.
    """
    whole = Rectangle.whole(shape)
    if style.name in CUTS_FIRST_DIM:
        unit, rest = divmod(shape[0], sum(style.parts))
        if rest:
            raise UserError(
                f"`{where}` has {shape[0]} rows, which the proportion "
                f"{'|'.join(map(str, style.parts))} does not divide",
                where="rules",
                legal=f"parts whose sum divides {shape[0]}",
            )
        found, first = [], 0
        for part in style.parts:
            _enough(part * unit, degree, where, "rows")
            start, size = split_evenly(part * unit, degree, index)
            found.append(whole.narrow(0, first + start, size))
            first += part * unit
        return tuple(found)
    if style.name in CUTS_LAST_DIM and not bias:
        _enough(shape[-1], degree, where, "columns")
        start, size = split_evenly(shape[-1], degree, index)
        return (whole.narrow(len(shape) - 1, start, size),)
    return (whole,)


def _enough(extent: int, degree: int, where: str, what: str) -> None:
    if extent < degree:
        raise UserError(
            f"`{where}` has {extent} {what}, fewer than tensor={degree}",
            where="partition.tensor",
            legal=f"1 to {extent}",
            nearest=f"tensor={extent}",
        )


def cut_table(
    table: Table,
    styles: Mapping[str, Style],
    *,
    degree: int,
    index: int,
    sequence_parallel: bool,
    aliases: Mapping[str, str],
) -> dict[str, Placement]:
    """The table under tensor parallelism: what tensor rank `index` of `degree` holds.

    Cut parameters are no longer replicated over `tensor`. With sequence parallelism whatever is not
    cut sees only a part of the tokens, so its gradient is one term of a sum over `tensor`.
    `aliases` (alias -> stored name) of a tied weight must be cut alike.
    """
    if degree == 1:
        return dict(table)
    placed = {
        name: _cut_one(one, name, styles, degree, index, sequence_parallel)
        for name, one in table.items()
    }
    for alias, name in aliases.items():
        other = _cut_one(table[name], alias, styles, degree, index, sequence_parallel)
        if other.held != placed[name].held:
            raise UserError(
                f"`{alias}` and `{name}` are one tensor, but their rules cut it differently",
                where="rules",
                legal="styles that cut the same dim, such as vocab_rows and vocab_column",
            )
    return placed


def _cut_one(
    one: Placement,
    place: str,
    styles: Mapping[str, Style],
    degree: int,
    index: int,
    sequence_parallel: bool,
) -> Placement:
    path, _, leaf = place.rpartition(".")
    style = styles.get(path, Style(name="replicated"))
    held = held_by(one.shape, style, bias=leaf == "bias", degree=degree, index=index, where=place)
    if held != one.held:
        return one.with_(
            held=held, replicated_over=tuple(a for a in one.replicated_over if a != "tensor")
        )
    if style.name == "partial" or sequence_parallel:
        return one.with_(partial_over=(*one.partial_over, "tensor"))
    return one


def local_shape(held: Sequence[Rectangle], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the local tensor: the held rectangles one below the other."""
    if not shape:
        return shape
    rows = sum(box.size[0] for box in held)
    return (rows, *held[0].size[1:]) if held else (0, *shape[1:])


def rows_of(held: Sequence[Rectangle], start: int, size: int) -> tuple[Rectangle, ...]:
    """Rows [start, start + size) of the local tensor, as rectangles of the global one."""
    found: list[Rectangle] = []
    first = 0
    for box in held:
        if not box.size:  # a scalar is one row
            return (box,) if start == 0 and size else ()
        low, high = max(start, first), min(start + size, first + box.size[0])
        if low < high and box.numel:
            found.append(box.narrow(0, low - first, high - low))
        first += box.size[0]
    return tuple(found)
