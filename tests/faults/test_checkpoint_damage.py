"""Damaged, incomplete and foreign checkpoints: named, passed over, never half believed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoint_worlds import (
    KEY,
    RUN,
    all_good,
    memory_folder,
    model,
    ranks,
    save_alone,
    save_world,
    shared_out,
    snapshot,
    steps_in,
)

from reparto.checkpoint.catalog import check, list_checkpoints
from reparto.checkpoint.exchange import Exchange
from reparto.checkpoint.files import folder_name
from reparto.checkpoint.layout import Damaged
from reparto.checkpoint.load import Found, find_latest, open_checkpoint
from reparto.checkpoint.save import Saver
from reparto.errors import CheckFailed, UserError


@pytest.fixture
def root() -> Iterator[Path]:
    """Steps 7 and 8, saved by two ranks."""
    with memory_folder() as folder:
        for step in (7, 8):
            save_world(folder / "c", step, 2)
        yield folder / "c"


def flip(path: Path, at: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ (1 << bit)]))


def positions(path: Path, draw: random.Random, count: int) -> list[int]:
    """Offsets in a file: its ends, the header's length, text and padding, elements."""
    size = path.stat().st_size
    if path.suffix == ".json":
        raw = path.read_bytes()
        words = [b'"files"', b'"sha256"', b'"bytes"', b'"format"', b'"parent"', b'"per_rank"',
                 b'"plan"', b'"run"', b'"state"', b'"step"', b'"tensors"', b'"dtype"', b'"start"',
                 b'"size"', b'"shape"', b'"alias_of"', b'"hmac"']  # fmt: skip
        at = [raw.index(word) for word in words]
        marks = [a + d for a, w in zip(at, words, strict=True) for d in (0, 1, len(w), len(w) + 2)]
    else:
        header = int.from_bytes(path.read_bytes()[:8], "little")
        marks = [0, 1, 7, 8, 9, 8 + header // 2, 8 + header - 1, 8 + header, 8 + header + 1,
                 8 + header + (size - 8 - header) // 2]  # fmt: skip
    return [*marks, size - 1, size - 2, *(draw.randrange(size) for _ in range(count))]


def test_promise_3_every_flipped_byte_is_found_and_named_before_a_weight_is_used(
    root: Path,
) -> None:
    """At least 500 flips over every file and position class; the one before is used."""
    draw, flips = random.Random(3), 0
    folder = root / "step-8"
    for path in sorted(folder.iterdir()):
        for at in positions(path, draw, 180):
            bit = draw.randrange(8)
            flip(path, at, bit)
            found = find_latest(root, key=KEY)
            assert found.checkpoint.manifest.step == 7, (path.name, at)
            assert len(found.skipped) == 1
            assert "step-8" in found.skipped[0] and path.name in found.skipped[0]
            with pytest.raises(CheckFailed, match=path.name):
                check(folder, KEY)
            if path.suffix == ".safetensors":
                damaged = open_checkpoint(folder, KEY)
                hit = {
                    name
                    for name, entry in damaged.manifest.tensors.items()
                    if any(piece.file == path.name for piece in entry.pieces)
                }
                for name in list(hit)[:2]:
                    with pytest.raises(Damaged, match=path.name):
                        damaged.read(name)
            flip(path, at, bit)
            flips += 1
    assert flips >= 500
    assert find_latest(root, key=KEY).checkpoint.manifest.step == 8  # all were put back
    check(root, KEY)


def swap_newer_file(folder: Path) -> None:
    """Step 9's shard under step 8's name, as a copy that went wrong would leave it."""
    save_world(folder.parent / "elsewhere", 9, 2)
    shutil.copy(folder.parent / "elsewhere" / "step-9" / "rank-00001.safetensors", folder)
    shutil.rmtree(folder.parent / "elsewhere")


def take_manifest_of_step_7(folder: Path) -> None:
    shutil.copy(folder.parent / "step-7" / "manifest.json", folder)


def exchange_the_two_files(folder: Path) -> None:
    one, other = folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


def cut_short(folder: Path) -> None:
    path = folder / "rank-00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def grow(folder: Path) -> None:
    with open(folder / "rank-00001.safetensors", "ab") as file:
        file.write(b"\0")


def empty(folder: Path) -> None:
    os.truncate(folder / "rank-00000.safetensors", 0)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (swap_newer_file, "rank-00001.safetensors has"),
    (take_manifest_of_step_7, "named after step 8, its manifest is of step 7"),
    (exchange_the_two_files, "rank-00000.safetensors has"),
    (cut_short, "rank-00001.safetensors has"),
    (grow, "rank-00001.safetensors has"),
    (empty, "rank-00000.safetensors has 0 bytes"),
    (lambda folder: (folder / "rank-00001.safetensors").unlink(), "rank-00001.safetensors is miss"),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: is missing"),
    (lambda folder: os.truncate(folder / "manifest.json", 0), "manifest.json"),
    (lambda folder: os.truncate(folder / "manifest.json", 500), "manifest.json"),
    (lambda folder: [one.unlink() for one in folder.iterdir()], "manifest.json: is missing"),
    (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "is a file, not a folder"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_l76_damage_is_named_and_the_one_before_is_used(
    damage: Callable[[Path], object], words: str, world_size: int, root: Path
) -> None:
    """L76: flipped bits, mixed steps, missing and torn files; all ranks fall back alike."""
    damage(root / "step-8")

    def work(rank: int, exchange: Exchange) -> Found:
        return find_latest(root, key=KEY, rank=rank, exchange=exchange)

    for found in all_good(ranks(world_size, work)):
        assert found.checkpoint.manifest.step == 7
        assert len(found.skipped) == 1 and words in found.skipped[0], found.skipped
        for name, tensor in model(7).items():
            assert torch.equal(found.checkpoint.read(name), tensor)
    with pytest.raises(Damaged, match="step-8"):
        check(root, KEY)
    listed = {one.path.name: one.status for one in list_checkpoints(root, KEY)}
    assert listed["step-7"] == "readable"


def test_l76_a_file_of_another_step_is_said_to_be_one(root: Path) -> None:
    """Equal layouts: only digest and the step inside the file tell the two apart."""
    swap_newer_file(root / "step-8")
    with pytest.raises(Damaged, match=r"says step '9' of run 'run-a'"):
        open_checkpoint(root / "step-8", KEY).verify()


@pytest.mark.parametrize("world_size", [1, 2])
def test_l74_without_any_whole_checkpoint_a_resume_stops(world_size: int, tmp_path: Path) -> None:
    """L74: a run that is asked to go on never starts from fresh weights by itself."""
    root = tmp_path / "c"

    def work(rank: int, exchange: Exchange) -> Found:
        return find_latest(root, key=KEY, rank=rank, exchange=exchange)

    for make in (lambda: None, root.mkdir, lambda: (root / "latest").write_text("step-8")):
        make()
        for one in ranks(world_size, work):
            assert isinstance(one, UserError) and one.exit_code == 2
            assert "start a new run without --resume" in str(one)
    save_world(root, 8, 2)
    flip(root / "step-8" / "rank-00000.safetensors", 100)
    for one in ranks(world_size, work):
        assert isinstance(one, UserError) and "passed over: step-8" in str(one)


def test_a_pointer_file_is_not_even_looked_at(root: Path) -> None:
    """B4 row 39: pointers go stale; the folder itself is scanned."""
    for text in ("step-7", "step-9", "../elsewhere", ""):
        (root / "latest").write_text(text)
        (root / "latest_checkpointed_iteration.txt").write_text(text)
        assert find_latest(root, key=KEY).checkpoint.manifest.step == 8


def test_steps_are_ordered_as_numbers_and_other_names_are_ignored(tmp_path: Path) -> None:
    root = tmp_path / "c"
    for step in (9, 10, 99, 100, 1000):
        save_alone(root, step)
    for name in ("step-1001x", "step-01001", "step--1", "STEP-2000", "step-٣٠٠٠", "backup"):
        shutil.copytree(root / "step-9", root / name)
    order = []
    before: int | None = None
    while True:
        try:
            found = find_latest(root, key=KEY, before=before)
        except UserError:
            break
        before = found.checkpoint.manifest.step
        order.append(before)
    assert order == [1000, 100, 99, 10, 9]


def test_l46_all_ranks_take_rank_0s_answer(root: Path) -> None:
    """L46: the newest is hidden from rank 1 only (a slow or stale mount): no hang, one answer."""
    other = root.parent / "seen-by-rank-1"
    other.mkdir()
    shutil.copytree(root / "step-7", other / "step-7")

    def work(rank: int, exchange: Exchange) -> Found:
        return find_latest(other if rank == 1 else root, key=KEY, rank=rank, exchange=exchange)

    for found in all_good(ranks(3, work)):
        assert found.checkpoint.manifest.step == 7
        assert "rank 1" in found.skipped[0] and "cannot be read" in found.skipped[0]


def test_ranks_that_see_two_different_folders_refuse_them(root: Path) -> None:
    other = root.parent / "other"
    save_world(other, 8, 3, seed=5)

    def work(rank: int, exchange: Exchange) -> Found:
        return find_latest(other if rank == 1 else root, key=KEY, rank=rank, exchange=exchange)

    for one in ranks(2, work):
        assert isinstance(one, UserError) and "another manifest than rank 0" in str(one)


def test_only_the_run_that_is_asked_for_is_loaded(tmp_path: Path) -> None:
    root = tmp_path / "c"
    save_alone(root, 5000, run="old-run")
    save_alone(root, 40)
    assert find_latest(root, key=KEY, run=RUN).checkpoint.manifest.step == 40
    assert find_latest(root, key=KEY).checkpoint.manifest.step == 5000
    with pytest.raises(UserError):
        find_latest(root, key=KEY, run="third-run")


def test_another_runs_key_opens_nothing(root: Path) -> None:
    with pytest.raises(UserError, match="another key"):
        find_latest(root, key=bytes(32))


def test_a_file_that_changes_after_its_proof_is_not_read(root: Path) -> None:
    checkpoint = find_latest(root, key=KEY).checkpoint
    path = root / "step-8" / "rank-00001.safetensors"
    name = next(
        name
        for name, entry in checkpoint.manifest.tensors.items()
        if any(piece.file == path.name for piece in entry.pieces)
    )
    checkpoint.read(name)
    flip(path, path.stat().st_size - 1)
    os.utime(path)  # a write moves the times; files in memory have coarse ones
    with pytest.raises(Damaged, match="changed since its digest was checked"):
        checkpoint.read(name)


def test_check_names_every_fault_of_every_checkpoint(root: Path) -> None:
    save_world(root, 9, 2)
    flip(root / "step-7" / "rank-00000.safetensors", 200)
    (root / "step-7" / "rank-00001.safetensors").unlink()
    (root / "step-8" / "note.txt").write_text("x")
    (root / "step-10.tmp-0123456789abcdef").mkdir()
    with pytest.raises(Damaged) as caught:
        check(root, KEY)
    text = " | ".join(caught.value.faults)
    assert "step-7: rank-00000.safetensors has been changed" in text
    assert "step-7: rank-00001.safetensors is missing" in text
    assert "step-8: 'note.txt' is in the folder, but not in the manifest" in text
    assert "step 10 is incomplete (0 files, not published)" in text
    assert "step-9" not in text and len(caught.value.faults) == 4
    (one,) = check(root / "step-9", KEY)
    assert (one.step, one.num_files, one.signed, one.num_tensors) == (9, 2, True, 15)
    (one,) = check(root / "step-9", None)
    assert not one.signed
    with pytest.raises(UserError, match="holds no checkpoint"):
        check(root.parent, KEY)


def test_the_list_shows_lineage(tmp_path: Path) -> None:
    root = tmp_path / "c"
    save_alone(root, 10)
    first = open_checkpoint(root / "step-10", KEY).parent
    saver = Saver(root, run=RUN, key=KEY)
    provenance = {"code": "abc", "config": "def", "data": [0, 320]}
    saver.save(
        snapshot(20, shared_out(model(20), 1)[0], parent=first, state={"provenance": provenance})
    )
    lost = first.model_copy(update={"step": 15, "manifest": "0" * 64})
    saver.save(snapshot(30, shared_out(model(30), 1)[0], parent=lost))
    (root / "step-40").mkdir()
    listed = list_checkpoints(root, KEY)
    assert [one.step for one in listed] == [10, 20, 30, 40]
    assert [one.status for one in listed] == ["readable"] * 3 + ["damaged"]
    assert [one.parent and one.parent.step for one in listed] == [None, 10, 15, None]
    assert [one.parent_here for one in listed] == [False, True, False, False]
    assert listed[1].state == {"provenance": provenance} and listed[1].plan == "data=2"
    assert "manifest.json" in listed[3].fault and listed[0].num_bytes > 0
    with pytest.raises(UserError, match="no such folder"):
        list_checkpoints(tmp_path / "gone", KEY)


# --- retention -----------------------------------------------------------------------------------


def test_l72_the_last_three_of_many_stay_by_number(tmp_path: Path) -> None:
    """L72: keep 3 of 200..1000, where text order says that 1000 is the oldest."""
    root = tmp_path / "c"
    for step in (200, 400, 600, 800, 1000):
        save_alone(root, step, keep=3)
    assert steps_in(root) == ["step-600", "step-800", "step-1000"]


def test_l72_another_runs_checkpoint_stays_and_does_not_count(tmp_path: Path) -> None:
    root = tmp_path / "c"
    save_alone(root, 5000, run="old-run")
    for step in (200, 400, 600):
        report = save_alone(root, step, keep=2)
    assert steps_in(root) == ["step-400", "step-600", "step-5000"]
    assert report.deleted == ("step-200",)
    assert report.notes == ("step-5000 is of run old-run, left alone",)


def test_l72_damaged_ones_do_not_count_as_kept_and_are_not_deleted(tmp_path: Path) -> None:
    root = tmp_path / "c"
    saver = Saver(root, run=RUN, key=KEY, keep=2)
    for step in (1, 2, 3):
        saver.save(snapshot(step, shared_out(model(step), 1)[0]))
    assert steps_in(root) == ["step-2", "step-3"]
    flip(root / "step-3" / "rank-00000.safetensors", 300)
    os.utime(root / "step-3" / "rank-00000.safetensors")
    report = saver.save(snapshot(4, shared_out(model(4), 1)[0]))
    assert steps_in(root) == ["step-2", "step-3", "step-4"] and report.deleted == ()
    assert len(report.notes) == 1 and "step-3 does not hold" in report.notes[0]
    assert find_latest(root, key=KEY).checkpoint.manifest.step == 4


def test_a_resumed_run_proves_old_ones_before_it_counts_them(tmp_path: Path) -> None:
    """A new process knows nothing of what it finds."""
    root = tmp_path / "c"
    for step in (1, 2, 3):
        save_alone(root, step)
    flip(root / "step-3" / "rank-00000.safetensors", 300)
    save_alone(root, 4, keep=2)
    assert steps_in(root) == ["step-2", "step-3", "step-4"]


def test_nothing_is_deleted_if_the_new_one_cannot_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "c"
    save_alone(root, 1, keep=1)
    real = os.rename

    def rename_and_lose(source: Path, target: Path) -> None:
        real(source, target)
        if target.name == "step-2":
            (target / "rank-00000.safetensors").unlink()

    monkeypatch.setattr(os, "rename", rename_and_lose)
    report = save_alone(root, 2, keep=1)
    assert "step-1" in steps_in(root) and report.deleted == ()
    assert "rank-00000.safetensors" in report.notes[0]
    assert find_latest(root, key=KEY).checkpoint.manifest.step == 1


def test_a_step_saved_again_replaces_and_never_leaves_a_gap(tmp_path: Path) -> None:
    """A damaged newest one: the run fell back, came to the same step, and saves it again."""
    root = tmp_path / "c"
    for step in (1, 2):
        save_alone(root, step)
    flip(root / "step-2" / "rank-00000.safetensors", 300)
    save_alone(root, 2, keep=3)
    assert find_latest(root, key=KEY).checkpoint.manifest.step == 2
    aside = [name for name in steps_in(root) if "replaced" in name]
    assert len(aside) == 1  # damaged, so not ours to delete


def test_a_course_that_was_left_is_not_taken_for_newer(tmp_path: Path) -> None:
    """The run went back from 400 to 200 on purpose, and goes on from there."""
    root = tmp_path / "c"
    for step in (200, 300, 400):
        save_alone(root, step, keep=3)
    save_alone(root, 250, keep=3)
    found = find_latest(root, key=KEY)
    assert found.checkpoint.manifest.step == 250
    names = steps_in(root)
    assert names[:2] == ["step-200", "step-250"]
    assert len(names) == 3 and names[2].startswith("step-400.replaced-")  # still a way back
    assert [one.status for one in list_checkpoints(root, KEY)] == [
        "readable", "readable", "replaced",
    ]  # fmt: skip
    for step in (300, 350):
        save_alone(root, step, keep=3)
    assert steps_in(root) == ["step-250", "step-300", "step-350"]


def test_leftovers_of_this_run_go_with_the_next_save_those_of_others_stay(tmp_path: Path) -> None:
    root = tmp_path / "c"
    save_alone(root, 1)
    ours = root / folder_name(2, "tmp", run=RUN)
    others = root / folder_name(3, "tmp", run="run-that-is-saving-now")
    for one in (ours, others, root / folder_name(1, "removed", run=RUN)):
        one.mkdir()
        (one / "rank-00000.safetensors").write_bytes(b"x")
    save_alone(root, 4)
    assert steps_in(root) == ["step-1", "step-4", others.name]


def test_one_that_cannot_be_deleted_does_not_keep_the_others(tmp_path: Path) -> None:
    root = tmp_path / "c"
    for step in (1, 2, 3):
        save_alone(root, step)
    (root / "step-2" / "a folder").mkdir()
    report = save_alone(root, 4, keep=1)
    assert report.deleted == ("step-3", "step-1")
    assert len(report.notes) == 1 and "cannot be deleted" in report.notes[0]
    assert find_latest(root, key=KEY).checkpoint.manifest.step == 4
