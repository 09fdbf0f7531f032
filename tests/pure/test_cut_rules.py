"""Rule tables against module paths: each pattern names something, each module has one pattern."""

from __future__ import annotations

import pytest

from reparto.errors import UserError
from reparto.partition.cuts import match_rules

PATHS = ["embed", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]


def test_a_star_is_one_element_of_a_path() -> None:
    found = match_rules({"layers.*.up": "column", "layers.*.down": "row"}, PATHS)
    assert {path: style.name for path, style in found.items()} == {
        "layers.0.up": "column", "layers.0.down": "row",
        "layers.1.up": "column", "layers.1.down": "row",
    }  # fmt: skip


@pytest.mark.parametrize("pattern", ["layers.*.upp", "layers.2.up", "up", "*.up"])
def test_a_pattern_that_names_no_module_is_refused_with_a_likely_one(pattern: str) -> None:
    with pytest.raises(UserError, match="names no module") as error:
        match_rules({pattern: "column"}, PATHS)
    assert error.value.where == "rules"
    assert "`*`" in error.value.legal


def test_a_slip_of_the_pen_is_told_the_nearest_path() -> None:
    with pytest.raises(UserError) as error:
        match_rules({"layers.0.upp": "column"}, PATHS)
    assert error.value.nearest == "layers.0.up"


def test_a_module_that_two_patterns_name_is_refused_with_both() -> None:
    with pytest.raises(UserError) as error:
        match_rules({"layers.*.up": "column", "layers.1.*": "row"}, PATHS)
    assert "layers.1.up" in error.value.what
    assert "layers.*.up" in error.value.what and "layers.1.*" in error.value.what
    assert error.value.nearest == "remove `layers.1.*`"
