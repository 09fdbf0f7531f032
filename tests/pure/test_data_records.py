"""Records to documents: what is learned, what is only read, and every fault with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reparto.config.data import DataConfig
from reparto.data.corpus import Document, Part
from reparto.data.dataset import IGNORED
from reparto.data.prepare import prepare
from reparto.data.sources import open_corpus
from reparto.errors import UserError


def documents(path: Path, **changes: object) -> list[Document]:
    values = {"source": "jsonl", "paths": (str(path),), **changes}
    found = list(open_corpus(DataConfig.model_validate(values)).documents())
    assert all(isinstance(document, Document) for document in found)
    return [document for document in found if isinstance(document, Document)]


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learned(document: Document) -> list[tuple[str, bool]]:
    return [(part.text, part.counted) for part in document.parts]


def test_a_field_of_text(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": ""}, {"text": "twö", "x": 1})
    path.write_text(path.read_text() + "\n  \n")
    found = documents(path)
    assert [learned(document) for document in found] == [[("one", True)], [("twö", True)]]
    assert [document.name for document in found] == ["a.jsonl:1", "a.jsonl:3"]
    assert {document.group for document in found} == {"a"}


def test_other_field_names_and_a_group_field(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"body": "x", "topic": "news"}, {"body": "y", "topic": 2026})
    found = documents(path, text_field="body", group_field="topic")
    assert [document.group for document in found] == ["news", "2026"]


def test_a_folder_takes_only_jsonl_files(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", {"text": "b"})
    lines(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "notes.txt").write_text("no record")
    assert [document.text for document in documents(tmp_path)] == ["a", "b"]


def test_a_prompt_is_read_and_only_its_completion_is_learned(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "2+2=", "completion": "4"})
    (document,) = documents(path, record="prompt")
    assert learned(document) == [("2+2=", False), ("4", True)]


def test_an_empty_prompt_leaves_a_text(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "", "completion": "4"})
    (document,) = documents(path, record="prompt")
    assert document.parts == (Part(text="4"),)


def test_of_a_chat_only_the_assistant_is_learned(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Bye!"},
    ]
    path = lines(tmp_path / "a.jsonl", {"messages": chat})
    (document,) = documents(path, record="chat")
    assert learned(document) == [
        ("<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n", False),
        ("Hello!\n", True),
        ("<|user|>\nBye\n<|assistant|>\n", False),
        ("Bye!\n", True),
    ]


@pytest.mark.parametrize(
    ("line", "record", "what", "nearest"),
    [
        ('{"txt": "x"}', "text", "no field `text`", "txt"),
        ('{"text": 3}', "text", "`text` is a number", ""),
        ('{"text": null}', "text", "`text` is null", ""),
        ('{"text": true}', "text", "`text` is true or false", ""),
        ('{"text": "x"', "text", "broken line: Expecting ',' delimiter at column", ""),
        ("nonsense", "text", "broken line: Expecting value at column 1", ""),
        ('["text"]', "text", "is no JSON object", ""),
        ('{"text": "\\ud800"}', "text", "half a surrogate pair at character 0", ""),
        ("[" * 100_000, "text", "nested too deeply", ""),
        ('{"text": ' + "1" * 10_000 + "}", "text", "a number too long", ""),
        ('{"prompt": "x"}', "prompt", "no field `completion`", ""),
        ('{"prompt": "x", "completion": ""}', "prompt", "`completion` is empty", ""),
        ('{"messages": "x"}', "chat", "`messages` is a text", ""),
        ('{"messages": []}', "chat", "no message of the assistant", ""),
        ('{"messages": ["x"]}', "chat", "is a text, not an object", ""),
        ('{"messages": [{"role": "user"}]}', "chat", "no field `content`", ""),
    ],
)
def test_every_fault_names_file_and_line(
    tmp_path: Path, line: str, record: str, what: str, nearest: str
) -> None:
    good = {
        "text": "fine",
        "prompt": "fine",
        "completion": "fine",
        "messages": [{"role": "assistant", "content": "fine"}],
    }
    path = lines(tmp_path / "a.jsonl", good, good)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError) as caught:
        documents(path, record=record)
    assert what in caught.value.what
    assert caught.value.where.startswith(f"{path}:3")
    assert nearest in caught.value.nearest


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UserError, match="byte 0xe9 at byte 14 of the line is not UTF-8") as caught:
        documents(path)
    assert caught.value.where == f"{path}:2"


def test_from_chat_lines_to_masked_labels(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number}?"},
                {"role": "assistant", "content": f"{number}!"},
            ]
        }
        for number in range(40)
    ]
    path = lines(tmp_path / "a.jsonl", *rows)
    config = DataConfig(
        source="jsonl",
        paths=(str(path),),
        record="chat",
        tokenizer="bytes",
        sequence_length=16,
        packing="documents",
    )
    prepared = prepare(config, tmp_path / "cache")
    dataset = prepared.train_dataset()
    answers = []
    for sample_id in range(len(dataset)):
        labels = dataset[sample_id].labels_S
        answers.append(bytes(0 if i == 256 else i for i in labels[labels != IGNORED].tolist()))
    # of each document exactly the answer, its line end and the end of the document are asked
    pieces = sorted(b"".join(answers).split(b"\0"))
    trained = prepared.counts("train").num_documents
    assert pieces[0] == b"" and len(pieces) == trained + 1
    assert all(piece.endswith(b"!\n") and b"?" not in piece for piece in pieces[1:])
    labels_per_document = sum(len(piece) + 1 for piece in pieces[1:])
    assert prepared.counts("train").num_labels == labels_per_document
