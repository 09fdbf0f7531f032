"""Which requests are refused, and that the nearest legal one named is legal."""

from __future__ import annotations

import re

import pytest

from reparto.errors import UserError
from reparto.schedule.check import check
from reparto.schedule.generate import generate
from reparto.schedule.rules import NAMES, check_request, default_chunks, legal_chunks


def test_legal_chunks() -> None:
    assert {name: str(legal_chunks(name)) for name in NAMES} == {
        "gpipe": "1",
        "1f1b": "1",
        "interleaved": "2 or more",
        "zb-h1": "1",
        "zb-v": "2",
        "dualpipe-v": "2",
    }
    assert [default_chunks(name) for name in NAMES] == [1, 1, 2, 1, 2, 2]
    assert 2 in legal_chunks("zb-v")
    assert 3 not in legal_chunks("zb-v")
    assert 17 in legal_chunks("interleaved")
    assert 1 not in legal_chunks("interleaved")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [-1, 0, 1, 2, 3, 4])
def test_every_number_of_chunks_runs_or_is_refused_with_a_number_that_runs(
    name: str, chunks: int
) -> None:
    if chunks in legal_chunks(name):
        check(generate(name, pipeline=3, chunks=chunks, num_microbatches=4))
        return
    with pytest.raises(UserError) as refused:
        generate(name, pipeline=3, chunks=chunks, num_microbatches=4)
    assert refused.value.where == "chunks"
    assert f"chunks={chunks}" in refused.value.what
    assert refused.value.legal
    nearest = re.match(r"chunks=(\d+)", refused.value.nearest)
    assert nearest is not None
    check(generate(name, pipeline=3, chunks=int(nearest[1]), num_microbatches=4))


def test_more_chunks_than_a_schedule_takes_names_the_one_that_takes_them() -> None:
    with pytest.raises(UserError) as refused:
        check_request("1f1b", pipeline=4, chunks=3, num_microbatches=8)
    assert refused.value.nearest == "chunks=1, or schedule=interleaved with chunks=3"


def test_one_rank_takes_one_chunk_under_every_schedule() -> None:
    for name in NAMES:
        check_request(name, pipeline=1, chunks=1, num_microbatches=1)
    with pytest.raises(UserError, match="or 1 with pipeline=1"):
        check_request("zb-v", pipeline=1, chunks=3, num_microbatches=1)


@pytest.mark.parametrize("field", ["pipeline", "num_microbatches"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_below_one(field: str, value: int) -> None:
    request = {"pipeline": 2, "num_microbatches": 2, field: value}
    with pytest.raises(UserError) as refused:
        check_request("1f1b", chunks=1, **request)
    assert (refused.value.where, refused.value.nearest) == (field, f"{field}=1")


def test_an_unknown_name_gets_the_likely_one() -> None:
    with pytest.raises(UserError) as refused:
        generate("zbv", pipeline=2, chunks=2, num_microbatches=2)
    assert refused.value.where == "schedule"
    assert refused.value.nearest == "schedule=zb-v"
    assert "dualpipe-v" in refused.value.legal
