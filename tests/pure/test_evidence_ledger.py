"""A ledger that was touched says where and how; one torn by a crash goes on and says so."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reparto.errors import Fault, UserError
from reparto.evidence import chain
from reparto.evidence.canonical import canonical, digest_of, parse
from reparto.evidence.ledger import (
    GENESIS,
    Ledger,
    create_key,
    load_key,
    read_ledger,
    verify_ledger,
)

KEY = bytes(range(32))
OTHER_KEY = bytes(32)
BODIES: list[tuple[str, dict[str, object]]] = [
    ("config", {"seed": 1, "name": "first-run"}),
    ("stage", {"stage": "partition", "resources": {"compute_s": 0.25}}),
    ("note", {"text": "a\nline break, \x1b[31m colour and ñ", "loss": float("nan")}),
    ("stage", {"stage": "recover", "list": [1, [2.5, None, True]]}),
    ("end", {}),
]


def write(path: Path, bodies: list[tuple[str, dict[str, object]]] = BODIES) -> list[str]:
    """A new ledger with these lines; the digests in order."""
    with Ledger.create(path, KEY, clock=lambda: 1000.5) as ledger:
        return [ledger.append(kind, body) for kind, body in bodies]


@pytest.fixture
def ledger_path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    write(path)
    return path


# --- writing -------------------------------------------------------------------------------------


def test_a_line_is_what_the_format_says(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    digests = write(path)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["seq"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["prev"] for line in lines] == [GENESIS, *digests[:-1]]
    assert [line["digest"] for line in lines] == digests
    first = '{"body":{"name":"first-run","seed":1},"kind":"config","prev":"' + GENESIS
    first += '","seq":1,"time_s":1000.5}'
    assert digests[0] == hashlib.sha256(first.encode()).hexdigest()
    assert lines[2]["body"]["loss"] == "NaN"
    assert path.read_bytes().count(b"\n") == 5
    assert b"\x1b" not in path.read_bytes()


def test_count_and_head_go_on_over_openings(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, KEY) as ledger:
        assert (ledger.count, ledger.head) == (0, GENESIS)
        head = ledger.append("one", {})
        assert (ledger.count, ledger.head) == (1, head)
    with Ledger.open(path, KEY, known_count=1, known_head=head) as ledger:
        assert (ledger.count, ledger.head) == (1, head)
        head = ledger.append("two", {})
    assert [line.kind for line in read_ledger(path, KEY)] == ["one", "two"]
    report = verify_ledger(path, KEY, known_count=2, known_head=head)
    assert (report.passed, report.count, report.head) == (True, 2, head)


def test_an_empty_ledger_holds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, KEY).close()
    assert verify_ledger(path, KEY).passed
    assert not verify_ledger(path, KEY, known_count=1, known_head="0" * 64).passed


def test_only_one_may_write(ledger_path: Path) -> None:
    with Ledger.open(ledger_path, KEY) as ledger:
        with pytest.raises(UserError, match="another process is writing"):
            Ledger.open(ledger_path, KEY)
        ledger.append("still", {})
    with pytest.raises(ValueError, match="closed"):
        ledger.append("late", {})
    Ledger.open(ledger_path, KEY).close()


def test_create_never_overwrites_and_open_never_creates(ledger_path: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        Ledger.create(ledger_path, KEY)
    with pytest.raises(UserError, match="No such file"):
        Ledger.open(ledger_path.with_name("other"), KEY)
    assert not ledger_path.with_name("other").exists()


def test_files_are_private_under_any_umask(tmp_path: Path) -> None:
    for umask in (0o000, 0o022, 0o777):
        before = os.umask(umask)
        try:
            key = create_key(tmp_path / f"key-{umask}")
            Ledger.create(tmp_path / f"ledger-{umask}", key).close()
        finally:
            os.umask(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_link_is_not_followed(ledger_path: Path) -> None:
    link = ledger_path.with_name("link")
    link.symlink_to(ledger_path)
    for attempt in (Ledger.open, verify_ledger):
        with pytest.raises(UserError):
            attempt(link, KEY)
    dangling = ledger_path.with_name("dangling")
    dangling.symlink_to(ledger_path.with_name("nowhere"))
    with pytest.raises(UserError):
        create_key(dangling)
    assert not ledger_path.with_name("nowhere").exists()


def test_a_pipe_does_not_hang_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a plain file"):
        verify_ledger(tmp_path / "pipe", KEY)
    with pytest.raises(UserError, match="not a plain file"):
        load_key(tmp_path / "pipe")


def test_what_cannot_be_written_leaves_the_ledger_as_it_was(ledger_path: Path) -> None:
    before = ledger_path.read_bytes()
    with Ledger.open(ledger_path, KEY) as ledger:
        with pytest.raises(TypeError, match=r"body\.x is a set"):
            ledger.append("bad", {"x": {1}})
        with pytest.raises(TypeError, match="keys must be strings"):
            ledger.append("bad", {"x": {1: 2}})
        with pytest.raises(ValueError, match="at most"):
            ledger.append("bad", {"x": "y" * chain.MAX_LINE_BYTES})
        assert ledger.count == 5
        assert ledger_path.read_bytes() == before
        ledger.append("good", {})


def test_a_full_disk_stops_the_run_and_leaves_no_half_line(
    ledger_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ledger_path.read_bytes()
    ledger = Ledger.open(ledger_path, KEY)
    real_write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Fault, match=r"line 6 \(more\).*No space left"):
        ledger.append("more", {})
    monkeypatch.undo()
    assert ledger_path.read_bytes() == before
    with Ledger.open(ledger_path, KEY) as again:
        assert again.count == 5


# --- touching ------------------------------------------------------------------------------------


def test_removed_reordered_inserted_and_changed_lines_are_named(ledger_path: Path) -> None:
    one, two, three, four, five = ledger_path.read_bytes().splitlines(keepends=True)
    cases = {
        "removed": ([one, three, four, five], 2, "removed.*line 2 is gone"),
        "first removed": ([two, three, four, five], 1, "removed.*line 1 is gone"),
        "reordered": ([one, two, four, three, five], 3, "reordered.*line 3 is further down"),
        "doubled": ([one, two, two, three, four, five], 3, "repeated.*line 2"),
        "changed": ([one, two, three.replace(b"colour", b"color"), four, five], 3, "changed"),
        "respelled": ([one, two.replace(b",", b", ", 1), three, four, five], 2, "spelled"),
        "not JSON": ([one, b"hello\n", two], 2, "not JSON"),
        "empty line": ([one, b"\n", two], 2, "not JSON"),
        "other JSON": ([one, b"[1]\n", two], 2, "fields"),
        "key twice": ([one, two.replace(b'{"body"', b'{"seq":2,"body"')], 2, "twice"),
        "deep": ([one, b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"\n"], 2, "changed: .*nested"),
    }
    for name, (lines, bad_line, reason) in cases.items():
        ledger_path.write_bytes(b"".join(lines))
        report = verify_ledger(ledger_path, KEY)
        assert not report.passed, name
        assert (report.bad_line, report.count) == (bad_line, bad_line - 1), name
        assert re.search(reason, report.reason), (name, report.reason)
        with pytest.raises(UserError, match=f"line {bad_line}: "):
            Ledger.open(ledger_path, KEY)
        assert ledger_path.read_bytes() == b"".join(lines), name


def test_a_line_resealed_without_the_key_is_found(ledger_path: Path) -> None:
    """The forger recomputes digests and chain, but has to guess the key."""
    lines = read_ledger(ledger_path, KEY)
    texts, prev = [], GENESIS
    for line in lines:
        key = KEY if line.seq < 3 else OTHER_KEY
        body = line.body if line.seq != 3 else {"text": "nothing happened"}
        text, prev = chain.line_text(
            seq=line.seq, time_s=line.time_s, kind=line.kind, body=body, prev=prev, key=key
        )
        texts.append(text)
    ledger_path.write_bytes(b"".join(texts))
    report = verify_ledger(ledger_path, KEY)
    assert (report.passed, report.bad_line) == (False, 3)
    assert "not sealed with this key" in report.reason


def test_a_line_of_the_same_run_put_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    """Two branches under one key: a line 3 of one after the line 2 of the other."""
    left, right = tmp_path / "left", tmp_path / "right"
    write(left)
    write(right, [("config", {"seed": 2}), *BODIES[1:]])
    mixed = left.read_bytes().splitlines(True)[:2] + right.read_bytes().splitlines(True)[2:]
    left.write_bytes(b"".join(mixed))
    report = verify_ledger(left, KEY)
    assert (report.bad_line, report.reason.split(":")[0]) == (3, "replaced")


def test_the_wrong_key_is_named_at_the_first_line(ledger_path: Path) -> None:
    report = verify_ledger(ledger_path, OTHER_KEY)
    assert (report.passed, report.bad_line, report.count) == (False, 1, 0)
    assert "wrong key" in report.reason


def test_a_cut_off_end_is_seen_against_what_a_checkpoint_remembers(ledger_path: Path) -> None:
    digests = [line.digest for line in read_ledger(ledger_path, KEY)]
    lines = ledger_path.read_bytes().splitlines(keepends=True)
    ledger_path.write_bytes(b"".join(lines[:3]))
    assert verify_ledger(ledger_path, KEY).passed  # a chain alone cannot know
    report = verify_ledger(ledger_path, KEY, known_count=4, known_head=digests[3])
    assert (report.passed, report.bad_line) == (False, 4)
    assert "truncated: a checkpoint remembers 4 lines, here are 3" in report.reason
    with pytest.raises(UserError, match="truncated"):
        Ledger.open(ledger_path, KEY, known_count=4, known_head=digests[3])


def test_a_chain_grown_anew_from_an_earlier_line_is_seen(ledger_path: Path) -> None:
    """Whoever has the key can cut and go on; the manifest still remembers the old line."""
    digests = [line.digest for line in read_ledger(ledger_path, KEY)]
    ledger_path.write_bytes(b"".join(ledger_path.read_bytes().splitlines(keepends=True)[:2]))
    with Ledger.open(ledger_path, KEY) as ledger:
        for _ in range(3):
            ledger.append("other", {})
    report = verify_ledger(ledger_path, KEY, known_count=4, known_head=digests[3])
    assert (report.passed, report.bad_line, report.count) == (False, 4, 3)
    assert "replaced" in report.reason


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_changed_byte_is_found_in_its_line(ledger_path: Path, data: st.DataObject) -> None:
    whole = ledger_path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.integers(0, 255).filter(lambda value: value != whole[place]))
    touched = ledger_path.with_name("touched")
    touched.write_bytes(whole[:place] + bytes([new]) + whole[place + 1 :])
    report = verify_ledger(touched, KEY)
    assert not report.passed
    assert report.bad_line == whole[:place].count(b"\n") + 1


# --- tearing -------------------------------------------------------------------------------------


def test_a_crash_at_any_byte_of_a_write_loses_no_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    digests = write(path)
    whole = path.read_bytes()
    starts = [0]
    for text in whole.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    for size in [*range(starts[3], starts[4] + 1, 7), starts[4] - 1, starts[4]]:
        path.write_bytes(whole[:size])
        complete = 4 if size == starts[4] else 3
        torn = whole[starts[complete] : size]
        report = verify_ledger(path, KEY)
        assert (report.passed, report.torn_bytes) == (not torn, len(torn))
        with Ledger.open(path, KEY, known_count=3, known_head=digests[2]) as ledger:
            ledger.append("resumed", {})
        lines = read_ledger(path, KEY)
        assert [line.digest for line in lines[:complete]] == digests[:complete]
        if torn:
            note = lines[complete]
            assert note.kind == "ledger.torn"
            assert note.body["bytes"] == len(torn)
            aside = path.with_name(str(note.body["moved_to"]))
            assert aside.read_bytes() == torn
            assert stat.S_IMODE(aside.stat().st_mode) == 0o600
        assert lines[-1].kind == "resumed"


def test_a_crash_during_the_repair_can_be_repaired(ledger_path: Path) -> None:
    torn = b'{"body":{},"di'
    ledger_path.write_bytes(ledger_path.read_bytes() + torn)
    name = f"ledger.jsonl.torn-6-{hashlib.sha256(torn).hexdigest()[:8]}"
    ledger_path.with_name(name).write_bytes(torn[:5])  # the copy was not finished
    Ledger.open(ledger_path, KEY).close()
    assert ledger_path.with_name(name).read_bytes() == torn
    assert read_ledger(ledger_path, KEY)[-1].body["moved_to"] == name


def test_a_torn_line_that_a_checkpoint_remembers_was_not_torn_by_a_crash(
    ledger_path: Path,
) -> None:
    digests = [line.digest for line in read_ledger(ledger_path, KEY)]
    ledger_path.write_bytes(ledger_path.read_bytes()[:-4])
    with pytest.raises(UserError, match="truncated"):
        Ledger.open(ledger_path, KEY, known_count=5, known_head=digests[4])
    with pytest.raises(UserError, match="torn"):
        read_ledger(ledger_path, KEY)


# --- the key -------------------------------------------------------------------------------------


def test_a_key_is_made_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.key"
    key = create_key(path)
    assert len(key) == 32
    assert load_key(path) == key
    with pytest.raises(UserError, match="exists"):
        create_key(path)
    assert load_key(path) == key
    assert create_key(tmp_path / "another") != key


def test_one_of_many_creates_the_key(tmp_path: Path) -> None:
    made: list[bytes] = []

    def attempt() -> None:
        with contextlib.suppress(UserError):
            made.append(create_key(tmp_path / "key"))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [load_key(tmp_path / "key")]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    create_key(path)
    path.chmod(mode)
    with pytest.raises(UserError) as caught:
        load_key(path)
    assert "0600" in caught.value.legal
    assert "chmod 600" in caught.value.nearest


@pytest.mark.parametrize("size", [0, 31, 33, 1000])
def test_a_key_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(UserError, match="32 bytes"):
        load_key(path)


# --- canonical text ------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_canonical_text_survives_reading(value: object) -> None:
    text = canonical(value)
    assert canonical(parse(text)) == text
    assert text.isascii()
    assert b"\n" not in text


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_the_order_of_keys_does_not_matter(value: dict[str, int]) -> None:
    assert digest_of(value) == digest_of(dict(reversed(value.items())))


def test_values_that_only_look_alike_have_different_digests() -> None:
    values: list[object] = [1, 1.0, True, "1", [1], {"1": 1}, None, 0, False, "", -0.0, 0.0]
    assert len({digest_of(value) for value in values}) == len(values)


def test_what_json_has_no_word_for() -> None:
    assert canonical([float("inf"), float("-inf")]) == b'["Infinity","-Infinity"]'
    for hostile in (b"NaN", b"Infinity", b'{"a":1,"a":2}', b"[" * 100_000, b""):
        with pytest.raises(ValueError):
            parse(hostile)
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        canonical(deep)
