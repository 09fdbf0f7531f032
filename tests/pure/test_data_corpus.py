"""Documents: found, read, grouped, split by content, and refused by name and offset."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reparto.data.corpus import Document, Part, TextFiles, python_library
from reparto.data.files import find_files
from reparto.data.split import Survey, survey
from reparto.errors import UserError


@dataclass(frozen=True)
class Listed:
    """A corpus of given texts; the group is the first letter."""

    texts: tuple[str, ...]

    def documents(self) -> Iterator[Document]:
        for number, text in enumerate(self.texts):
            yield Document(name=f"{number}", group=text[:1], parts=(Part(text=text),))


def surveyed(texts: Sequence[str], *, limit: int | None = None) -> Survey:
    return survey(
        Listed(tuple(texts)), validation_share=0.3, confirmation_share=0.2, limit_bytes=limit
    )


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_the_standard_library_is_a_corpus() -> None:
    documents = list(python_library(Path(sysconfig.get_path("stdlib"))).documents())
    names = {document.name: document.group for document in documents}
    assert names["argparse.py"] == "modules" and names["json/decoder.py"] == "json"
    assert not [name for name in names if "site-packages" in name or "/test/" in f"/{name}"]
    assert all(document.text for document in documents)
    assert sum(document.num_bytes for document in documents) > 5_000_000


def test_a_python_without_source_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no library source"):
        python_library(tmp_path)


def test_a_library_file_in_its_declared_encoding(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"# coding: latin-1\n# \xe9\n"})
    (document,) = python_library(tmp_path).documents()
    assert document.text == "# coding: latin-1\n# é\n"


def test_files_folders_and_globs_each_file_once(tmp_path: Path) -> None:
    root = write(
        tmp_path / "books",
        {"a/x.txt": b"ax", "a/deep/y.txt": b"ay", "z.txt": b"z", ".hidden": b"h", "empty": b""},
    )
    found = find_files([str(root), str(root / "a" / "*.txt"), str(root / "z.txt")])
    assert [(file.group, file.name) for file in found] == [
        ("a", "a/deep/y.txt"),
        ("a", "a/x.txt"),
        ("books", "empty"),
        ("books", "z.txt"),
    ]
    texts = [document.text for document in TextFiles(found).documents()]
    assert texts == ["ay", "ax", "z"]
    assert [file.group for file in find_files([str(root / "z.txt")])] == ["books"]


def test_a_name_with_glob_signs_is_a_name_first(tmp_path: Path) -> None:
    write(tmp_path, {"a[1].txt": b"x"})
    assert [file.name for file in find_files([str(tmp_path / "a[1].txt")])] == ["a[1].txt"]


def test_a_long_single_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    lines = b"".join(b"line %05d, with \xc3\xa9\n" % number for number in range(40_000))
    files = find_files([str(write(tmp_path, {"book.txt": lines}) / "book.txt")])
    documents = list(TextFiles(files).documents())
    assert len(documents) > 40
    assert "".join(document.text for document in documents).encode() == lines
    assert all(document.text.endswith("\n") for document in documents)
    assert documents[3].name == "book.txt#3"


def test_many_files_are_not_cut(tmp_path: Path) -> None:
    root = write(tmp_path, {f"{number}.txt": b"word\n" * 30_000 for number in range(64)})
    assert len(list(TextFiles(find_files([str(root)])).documents())) == 64


def test_bytes_that_are_not_utf8_name_file_and_offset(tmp_path: Path) -> None:
    good = b"fine text\n" * 2_000
    root = write(tmp_path, {"bad.txt": good + b"caf\xe9 \n" + good})
    with pytest.raises(UserError) as caught:
        list(TextFiles(find_files([str(root)])).documents())
    assert "bad.txt is not UTF-8: byte 0xe9 at offset 20003" in caught.value.what


def test_a_pattern_that_matches_nothing_says_what_is_near(tmp_path: Path) -> None:
    write(tmp_path, {"corpus.txt": b"x"})
    with pytest.raises(UserError) as caught:
        find_files([str(tmp_path / "corpsu.txt")])
    assert caught.value.nearest == str(tmp_path / "corpus.txt")
    with pytest.raises(UserError, match="no file in"):
        (tmp_path / "nothing").mkdir()
        find_files([str(tmp_path / "nothing")])


def test_what_cannot_be_read_is_never_skipped(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"cannot read .*link: No such file"):
        list(TextFiles(find_files([str(tmp_path)])).documents())
    (tmp_path / "link").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a regular file"):
        list(TextFiles(find_files([str(tmp_path)])).documents())


def test_a_corpus_of_empty_files_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path, {"a": b"", "b": b""})
    corpus = TextFiles(find_files([str(root)]))
    with pytest.raises(UserError, match="the corpus holds no text"):
        survey(corpus, validation_share=0.3, confirmation_share=0.2)


@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=40))
def test_equal_texts_never_stand_on_two_sides(texts: list[str]) -> None:
    found = surveyed(texts)
    sides: dict[bytes, set[object]] = {}
    for entry in found.entries:
        sides.setdefault(entry.digest, set()).add(entry.split)
    assert all(len(splits) == 1 for splits in sides.values())
    kinds = len(sides)
    used = {entry.split for entry in found.entries}
    assert len(used) == min(kinds, 3)
    assert "train" in used and (kinds == 1 or "validation" in used)
    assert (len(used) == 3) == (found.warnings == ())


def test_splits_have_their_shares_and_survive_growth_and_renaming() -> None:
    texts = tuple(f"document {number}" for number in range(4000))
    small, large = surveyed(texts[:2000]), surveyed(texts)
    counts = Counter(entry.split for entry in large.entries)
    assert counts["validation"] == pytest.approx(1200, abs=120)
    assert counts["confirmation"] == pytest.approx(800, abs=110)
    before = {entry.digest: entry.split for entry in small.entries}
    after = {entry.digest: entry.split for entry in large.entries}
    assert all(after[digest] == split for digest, split in before.items())
    reversed_names = surveyed(texts[::-1])
    assert {entry.digest: entry.split for entry in reversed_names.entries} == after


def test_a_limit_takes_whole_documents_of_a_fair_sample() -> None:
    texts = tuple(f"{number:04d} " + "x" * 95 for number in range(1000))
    found = surveyed(texts, limit=20_050)
    kept = [entry for entry in found.entries if entry.split is not None]
    assert sum(entry.num_bytes for entry in kept) == 20_000
    assert found.num_left_out == 800
    names = [int(entry.name) for entry in kept]
    assert 400 < sum(names) / len(names) < 600
    assert Counter(entry.split for entry in kept)["validation"] == pytest.approx(60, abs=25)


def test_the_digest_is_of_what_is_used() -> None:
    texts = tuple(f"document {number}" for number in range(50))
    assert surveyed(texts).digest == surveyed(texts).digest
    changed = (*texts[:-1], "another")
    assert surveyed(changed).digest != surveyed(texts).digest


def test_parts_are_part_of_the_content() -> None:
    whole = Document(name="n", group="g", parts=(Part(text="ab"),))
    parted = Document(name="n", group="g", parts=(Part(text="a", counted=False), Part(text="b")))
    assert whole.text == parted.text and whole.digest() != parted.digest()


def test_a_file_that_changes_between_two_readings_is_an_error(tmp_path: Path) -> None:
    root = write(tmp_path, {"a.txt": b"one", "b.txt": b"two"})
    corpus = TextFiles(find_files([str(root)]))
    found = survey(corpus, validation_share=0.3, confirmation_share=0.2)
    (root / "b.txt").write_bytes(b"three")
    with pytest.raises(UserError, match=r"b\.txt changed while it was being read"):
        list(found.read(corpus))
