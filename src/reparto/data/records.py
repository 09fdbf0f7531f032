"""One record of a data set to a document: a text, a prompt with its completion, or a chat.

What the model is to say is learned; what it is told is only read. A chat is written as

    <|user|>
    Hello
    <|assistant|>
    Hi!

and the assistant's text with its line end is learned, its heading is not. The markers are plain
text, encoded like any other, so no message can forge what no user could have typed. Rejected: the
chat templates of tokenizer files, which are programs in a template language, and taking the layout
from whichever fields happen to be there, which turns a misspelled field into another training task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reparto.config.data import RecordKind
from reparto.data.corpus import Document, Part
from reparto.errors import UserError, nearest_word


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """How the records of one corpus become documents."""

    record: RecordKind
    "what a record holds"
    text_field: str
    "for record `text`"
    prompt_field: str
    "for record `prompt`"
    completion_field: str
    "for record `prompt`"
    messages_field: str
    "for record `chat`"
    group_field: str
    "whose value names the group; empty: `group` of `document`"

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read."""
        by_record = {
            "text": (self.text_field,),
            "prompt": (self.prompt_field, self.completion_field),
            "chat": (self.messages_field,),
        }
        return (*by_record[self.record], *filter(None, (self.group_field,)))

    def document(
        self, row: Mapping[str, object], *, name: str, group: str, where: str
    ) -> Document | None:
        """The document of a record, None if its text is empty.

        Raises `UserError` with `where` (file and line) for a missing field or a wrong type.
        """
        if self.group_field:
            group = str(_take(row, self.group_field, (str, int), where))
        parts = tuple(part for part in _joined(self._parts(row, where)) if part.text)
        return Document(name=name, group=group, parts=parts) if parts else None

    def _parts(self, row: Mapping[str, object], where: str) -> Iterator[Part]:
        if self.record == "text":
            yield Part(text=_text(row, self.text_field, where))
        elif self.record == "prompt":
            yield Part(text=_text(row, self.prompt_field, where), counted=False)
            yield Part(text=_learned(row, self.completion_field, where))
        else:
            messages = _take(row, self.messages_field, (list,), where)
            assert isinstance(messages, list)
            yield from self._chat(messages, where)

    def _chat(self, messages: list[object], where: str) -> Iterator[Part]:
        answered = False
        for number, message in enumerate(messages, start=1):
            place = f"{where}: message {number}"
            if not isinstance(message, Mapping):
                raise UserError(f"is {_kind(message)}, not an object", where=place)
            role, content = _text(message, "role", place), _text(message, "content", place)
            answers = role == "assistant" and bool(content)
            answered |= answers
            yield Part(text=f"<|{role}|>\n", counted=False)
            yield Part(text=f"{content}\n", counted=answers)
        if not answered:
            raise UserError(
                "the chat has no message of the assistant, so nothing is learned from it",
                where=where,
                legal='at least one {"role": "assistant", "content": "..."}',
            )


def _joined(parts: Iterator[Part]) -> Iterator[Part]:
    """Neighbours of one kind as one part, so that tokens may reach over their border."""
    held: Part | None = None
    for part in parts:
        if held is not None and held.counted == part.counted:
            held = Part(text=held.text + part.text, counted=held.counted)
        else:
            if held is not None:
                yield held
            held = part
    if held is not None:
        yield held


def _learned(row: Mapping[str, object], field: str, where: str) -> str:
    text = _text(row, field, where)
    if not text:
        raise UserError(f"`{field}` is empty, so nothing is learned", where=where)
    return text


def _text(row: Mapping[str, object], field: str, where: str) -> str:
    text = _take(row, field, (str,), where)
    assert isinstance(text, str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"`{field}` holds half a surrogate pair at character {error.start}, which is no text",
            where=where,
        ) from error
    return text


def _take(row: Mapping[str, object], field: str, kinds: tuple[type, ...], where: str) -> object:
    if field not in row:
        raise UserError(
            f"no field `{field}`",
            where=where,
            legal=", ".join(sorted(row)) or "a record with fields",
            nearest=nearest_word(field, row),
        )
    value = row[field]
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = {str: "a text", list: "a list", int: "a whole number"}
        raise UserError(
            f"`{field}` is {_kind(value)}",
            where=where,
            legal=" or ".join(wanted[kind] for kind in kinds),
        )
    return value


def _kind(value: object) -> str:
    words = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return words.get(type(value), type(value).__name__)
