"""Local data sets; the ones that need the `hf` extra are skipped where it is not installed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reparto.config.data import DataConfig
from reparto.data.corpus import Document
from reparto.data.sources import open_corpus
from reparto.errors import UserError

ROWS = [{"text": f"row {number}", "topic": f"t{number % 2}", "n": number} for number in range(25)]


def documents(path: Path, **changes: object) -> list[Document]:
    values = {"source": "huggingface", "paths": (str(path),), **changes}
    found = list(open_corpus(DataConfig.model_validate(values)).documents())
    return [document for document in found if isinstance(document, Document)]


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="needs the extra hf")


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    real = importlib.import_module

    def missing(name: str) -> ModuleType:
        if name == "datasets":
            raise ModuleNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match="needs the package `datasets`") as caught:
        documents(tmp_path)
    assert caught.value.nearest == 'pip install "reparto[hf]"'


def test_a_folder_of_jsonl_needs_no_extra(tmp_path: Path) -> None:
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = documents(tmp_path, group_field="topic")
    assert [document.text for document in found] == [row["text"] for row in ROWS]
    assert {document.group for document in found} == {"t0", "t1"}


def test_what_is_no_folder_of_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        documents(tmp_path / "gone")
    with pytest.raises(UserError, match=r"no \*.parquet or \*.arrow or \*.jsonl"):
        documents(tmp_path)


def test_a_saved_data_set(tmp_path: Path, datasets: Any) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    found = documents(tmp_path / "saved")
    assert [document.text for document in found] == [row["text"] for row in ROWS]
    assert found[3].name == "saved:3" and found[3].group == "saved"


def test_a_saved_dictionary_of_data_sets(tmp_path: Path, datasets: Any) -> None:
    both = {"train": ROWS[:20], "test": ROWS[20:]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in both.items()}
    ).save_to_disk(str(tmp_path / "saved"))
    assert len(documents(tmp_path / "saved")) == 20
    assert len(documents(tmp_path / "saved", subset="test")) == 5
    with pytest.raises(UserError) as caught:
        documents(tmp_path / "saved", subset="tests")
    assert caught.value.nearest == "test" and caught.value.legal == "train, test"


def test_parquet_and_arrow_files(tmp_path: Path, datasets: Any) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    (tmp_path / "plain").mkdir()
    arrow.rename(tmp_path / "plain" / "b.arrow")
    for path in (tmp_path / "a.parquet", tmp_path / "plain" / "b.arrow"):
        folder = path.parent if path.suffix == ".arrow" else tmp_path / "parquet"
        if path.suffix == ".parquet":
            folder.mkdir()
            path.rename(folder / path.name)
        found = documents(folder, group_field="topic")
        assert [document.text for document in found] == [row["text"] for row in ROWS]


def test_chats_and_missing_fields_in_rows(tmp_path: Path, datasets: Any) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    datasets.Dataset.from_list([{"messages": chat}] * 3).save_to_disk(str(tmp_path / "chat"))
    found = documents(tmp_path / "chat", record="chat")
    assert [part.text for part in found[0].parts] == ["<|user|>\na\n<|assistant|>\n", "b\n"]
    with pytest.raises(UserError, match="no field `text`") as caught:
        documents(tmp_path / "chat")
    assert caught.value.where.endswith("chat: row 0")


def test_a_broken_file_is_named(tmp_path: Path, datasets: Any) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"cannot read .*a\.parquet"):
        documents(tmp_path)
