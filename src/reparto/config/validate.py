"""From a mapping that a person wrote to a frozen value, or to one clear `UserError`.

pydantic finds what is wrong; this file says it in the words of DESIGN §5: what, where, legal
values, nearest fix. All faults of one input are gathered, the first is told in full and the others
are listed under it, so that a user repairs a file in one go.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from reparto.errors import UserError, nearest_word

M = TypeVar("M", bound=BaseModel)


def build(model: type[M], values: Mapping[str, object], *, where: str = "") -> M:
    """Make `model` from `values`. Raises `UserError`: field, legal values, nearest fix."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        faults = [_explain(model, fault, where) for fault in error.errors()]
    first, others = faults[0], faults[1:]
    if others:
        rest = "; ".join(f"{other.where}: {other.what}" for other in others)
        first = UserError(
            f"{first.what}\n  also: {rest}",
            where=first.where,
            legal=first.legal,
            nearest=first.nearest,
        )
    raise first


def _explain(model: type[BaseModel], fault: Any, where: str) -> UserError:
    location = [str(part) for part in fault["loc"]]
    path = ".".join([where, *location] if where else location)
    kind = fault["type"]
    if kind == "extra_forbidden":
        owner = _descend(model, location[:-1])
        known = list(owner.model_fields) if owner else []
        near = nearest_word(location[-1], known)
        return UserError(
            f"unknown key `{location[-1]}`",
            where=path,
            legal=", ".join(known),
            nearest=near,
        )
    found = _field(model, location)
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return UserError(
            cause.what,
            where=cause.where or path,
            legal=cause.legal,
            nearest=cause.nearest,
        )
    if kind == "missing":
        return UserError("is missing", where=path, legal=_legal(found))
    value = fault.get("input")
    return UserError(
        f"{value!r} is not allowed ({fault['msg'][0].lower()}{fault['msg'][1:]})",
        where=path,
        legal=_legal(found),
        nearest=_nearest(found, value),
    )


def _descend(model: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in path:
        if current is None or part.isdigit():
            continue
        field = current.model_fields.get(part)
        current = next(_models(field.annotation), None) if field else None
    return current


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _field(model: type[BaseModel], path: list[str]) -> FieldInfo | None:
    names = [part for part in path if not part.isdigit()]
    owner = _descend(model, names[:-1])
    return owner.model_fields.get(names[-1]) if owner and names else None


def _choices(field: FieldInfo | None) -> list[str]:
    if field is None:
        return []
    return [str(value) for value in _literals(field.annotation)]


def _literals(annotation: object) -> Iterator[object]:
    if typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    else:
        for argument in typing.get_args(annotation):
            yield from _literals(argument)


def _legal(field: FieldInfo | None) -> str:
    if field is None:
        return ""
    choices = _choices(field)
    if choices:
        return ", ".join(choices)
    bounds = []
    for rule in field.metadata:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            bound = getattr(rule, name, None)
            if bound is not None:
                bounds.append(f"{sign} {bound}")
    return f"{_type_words(field.annotation)} {' and '.join(bounds)}".rstrip()


def _nearest(field: FieldInfo | None, value: object) -> str:
    """The legal value most like `value`; the field's default where nothing is like it."""
    if field is None:
        return ""
    choices = _choices(field)
    if choices:
        near = nearest_word(str(value).lower(), choices)
    else:
        near = _nearest_plain(set(_parts(field.annotation)), field, value)
    default = field.default
    if not near and isinstance(default, (bool, int, float, str)):
        near = str(default).lower() if isinstance(default, bool) else str(default)
    return near


def _nearest_plain(types_: set[object], field: FieldInfo, value: object) -> str:
    word = str(value).strip().lower()
    if bool in types_:
        return {"1": "true", "yes": "true", "on": "true", "0": "false"}.get(word, "")
    if types_ & {int, float} and not isinstance(value, bool):
        try:
            number = float(word)
        except ValueError:
            return ""
        if not math.isfinite(number):
            return ""
        whole = int in types_
        for rule in field.metadata:
            least, most = getattr(rule, "ge", None), getattr(rule, "le", None)
            above, below = getattr(rule, "gt", None), getattr(rule, "lt", None)
            if whole and above is not None:
                least = above + 1
            elif (above is not None and number <= above) or (below is not None and number >= below):
                return ""  # an open bound has no nearest value
            number = max(number, least) if least is not None else number
            number = min(number, most) if most is not None else number
        return f"{round(number)}" if whole else f"{number:g}"
    if str in types_ and isinstance(value, (int, float)):
        return f'"{value}"'
    return ""


def _parts(annotation: object) -> Iterator[object]:
    """The plain types of an annotation, unions taken apart."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _type_words(annotation: object) -> str:
    if isinstance(annotation, type) and annotation in _WORDS:
        return _WORDS[annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(
            _type_words(part) for part in typing.get_args(annotation) if part is not type(None)
        )
    if typing.get_origin(annotation) in (list, tuple):
        return "a list"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table"
    return getattr(annotation, "__name__", str(annotation))
