"""The grid as text and as SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from reparto.schedule.actions import Schedule
from reparto.schedule.draw import draw_text
from reparto.schedule.generate import generate
from reparto.schedule.rules import NAMES, default_chunks
from reparto.schedule.svg import draw_svg
from reparto.schedule.timing import simulate

_SVG = "{http://www.w3.org/2000/svg}"


def made(name: str, p: int, m: int) -> Schedule:
    return generate(name, pipeline=p, chunks=default_chunks(name), num_microbatches=m)


def test_the_grid_of_1f1b() -> None:
    assert draw_text(made("1f1b", 3, 3)).splitlines() == [
        "1f1b: 3 x 1 stages, 3 microbatches; step 15, bubble 40.0 %, "
        "live activations at most 3 of 3",
        "F forward, B input gradient, W weight gradient, · idle; F0 is microbatch 0",
        "",
        "       0              5              10",
        "rank 0 F0 F1 F2 ·  ·  ·  ·  B0 W0 ·  B1 W1 ·  B2 W2",
        "rank 1 ·  F0 F1 ·  ·  B0 W0 F2 B1 W1 ·  B2 W2 ·  ·",
        "rank 2 ·  ·  F0 B0 W0 F1 B1 W1 F2 B2 W2 ·  ·  ·  ·",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_in_the_grid_once(name: str) -> None:
    schedule = made(name, 3, 5)
    grid = draw_text(schedule, width=70).splitlines()[2:]
    assert max(map(len, grid)) <= 70
    for rank, row in enumerate(schedule.ranks):
        lines = [line.split()[2:] for line in grid if line.startswith(f"rank {rank} ")]
        words = [word for line in lines for word in line if word != "·"]
        if schedule.num_chunks == 1:
            words = [f"{rank}{word}" for word in words]
        assert words == [str(action) for action in row]


def test_a_timeline_with_other_times_shows_longer_actions_longer() -> None:
    timeline = simulate(made("1f1b", 2, 1), forward_s=1, backward_s=3, weight_s=1, message_s=2)
    assert draw_text(timeline).splitlines()[4:] == [
        "rank 0 F0 ·  ·  ·  ·  ·  ·  ·  ·  ·  B0 -- -- W0",
        "rank 1 ·  ·  ·  F0 B0 -- -- W0 ·  ·  ·  ·  ·  ·",
    ]


def test_colour_adds_nothing_but_colour() -> None:
    schedule = made("zb-v", 2, 3)
    coloured = draw_text(schedule, color=True)
    assert "\x1b[" in coloured
    stripped = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()]
    assert stripped == draw_text(schedule).splitlines()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 4])
def test_svg_is_valid_and_has_one_cell_for_each_action(name: str, p: int) -> None:
    schedule = made(name, p, 6)
    root = ET.fromstring(draw_svg(schedule))
    assert root.tag == f"{_SVG}svg"
    cells = [rect for rect in root.iter(f"{_SVG}rect") if rect.find(f"{_SVG}title") is not None]
    assert len(cells) == 3 * schedule.num_stages * 6
    said = {cell.findtext(f"{_SVG}title", "").split(":")[0] for cell in cells}
    assert said == {str(action) for row in schedule.ranks for action in row}
    # chunks are told apart by class
    assert len({cell.get("class") for cell in cells}) == 3 * schedule.num_chunks
    # nothing is fetched, nothing runs
    text = draw_svg(schedule)
    assert "href" not in text
    assert "<script" not in text
    assert text.count("http") == 1  # the namespace


def test_svg_says_bubble_and_memory_in_both_languages() -> None:
    schedule = made("zb-v", 4, 8)
    english, spanish = draw_svg(schedule), draw_svg(schedule, language="es")
    assert "bubble 5.9 % · step 51 slots · at most 8 live activations" in english
    assert "burbuja 5.9 % · paso 51 turnos · como máximo 8 activaciones vivas" in spanish
    for words in ("forward", "weight gradient", "idle"):
        assert words in english
        assert words not in spanish


def test_svg_of_a_timeline_is_in_seconds() -> None:
    text = draw_svg(simulate(made("1f1b", 2, 2), forward_s=1e-3, backward_s=2e-3, weight_s=1e-3))
    assert "step 0.012 s" in text
    ET.fromstring(text)


def test_a_hostile_name_stays_a_name() -> None:
    name = '</title><script>alert("1")</script>&\x01\ud800'
    root = ET.fromstring(draw_svg(replace(made("1f1b", 2, 2), name=name)))
    assert not list(root.iter(f"{_SVG}script"))
    assert '<script>alert("1")</script>&??' in root.findtext(f"{_SVG}title", "")


def test_the_picture_of_a_long_step_stays_narrow() -> None:
    root = ET.fromstring(draw_svg(made("zb-v", 8, 100)))
    assert float(root.get("width", "0")) < 1900
