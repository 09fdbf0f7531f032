"""Boxes that tile a tensor, and boxes that do not."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint_worlds import cut_at_random

from reparto.checkpoint.tiling import tiles, why_not_tiled
from reparto.partition.tensors import Rectangle

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def covered_once(shape: tuple[int, ...], boxes: list[Rectangle]) -> bool:
    """The same question by counting every element."""
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for box in boxes:
        for at in itertools.product(*map(range, box.start, box.stop)):
            if at not in counts:
                return False
            counts[at] += 1
    return all(count == 1 for count in counts.values())


@given(SHAPES, st.integers(1, 9), st.integers(0, 10_000))
def test_every_cut_tiles(shape: tuple[int, ...], parts: int, seed: int) -> None:
    assert tiles(shape, cut_at_random(shape, parts, random.Random(seed)))


@settings(max_examples=300)
@given(SHAPES, st.integers(1, 6), st.integers(0, 10_000), st.data())
def test_agrees_with_counting_elements(
    shape: tuple[int, ...], parts: int, seed: int, data: st.DataObject
) -> None:
    boxes = cut_at_random(shape, parts, random.Random(seed))
    change = data.draw(st.sampled_from(("drop", "double", "move", "grow")))
    index = data.draw(st.integers(0, len(boxes) - 1))
    box = boxes[index]
    if change == "drop":
        boxes.pop(index)
    elif change == "double":
        boxes.append(box)
    elif shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        grown = [a + (at == dim) for at, a in enumerate(box.size)]
        moved = [a + (at == dim) for at, a in enumerate(box.start)]
        boxes[index] = (
            Rectangle(start=box.start, size=tuple(grown))
            if change == "grow"
            else Rectangle(start=tuple(moved), size=box.size)
        )
    assert tiles(shape, boxes) == covered_once(shape, boxes)


def test_a_gap_and_an_overlap_of_one_size_do_not_cancel() -> None:
    left = Rectangle(start=(0, 0), size=(2, 2))
    assert not tiles((2, 4), [left, left])
    assert "overlap" in why_not_tiled((2, 4), [left, left])


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([], "6 of 6 elements are in no piece"),
        ([Rectangle(start=(0, 0), size=(2, 2))], "2 of 6 elements are in no piece"),
        ([Rectangle(start=(0, 1), size=(2, 3))], "does not lie inside shape [2, 3]"),
        ([Rectangle(start=(0,), size=(2,))], "other dims than the tensor, which has 2"),
        ([Rectangle(start=(0, 0), size=(2, 0))], "does not lie inside"),
    ],
)
def test_says_why(boxes: list[Rectangle], words: str) -> None:
    assert not tiles((2, 3), boxes)
    assert words in why_not_tiled((2, 3), boxes)


def test_thirty_thousand_pieces_are_checked_in_linear_time() -> None:
    boxes = [Rectangle(start=(0, at), size=(7, 1)) for at in range(30_000)]
    assert tiles((7, 30_000), boxes)
