"""Stage records: five, complete, and refused when an uncomfortable field is blank."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from reparto.evidence.canonical import canonical
from reparto.evidence.ledger import Ledger, read_ledger
from reparto.evidence.record import STAGES, Discarded, StageRecord, in_stage_order

FIELDS: dict[str, object] = {
    "stage": "partition",
    "owner": "reparto.partition",
    "person": "Ana",
    "input": "plan data=2, 1.1M parameters",
    "output": "11 placements, 2.2 MB a rank",
    "test": "slices tile every tensor exactly",
    "uncertainty": "none: arithmetic",
    "discarded": [{"what": "shard = none", "reason": "4.4 MB a rank"}],
    "resources": {"compute_s": 0.01, "parameter_bytes": 4_461_056},
    "controls": ["world size equals the plan's"],
}


def record(**change: object) -> StageRecord:
    return StageRecord.model_validate({**FIELDS, **change})


def test_the_stages_are_the_five_in_order() -> None:
    assert STAGES == ("partition", "compute", "communicate", "synchronize", "recover")


def test_a_record_survives_the_ledger(tmp_path: Path) -> None:
    key, path = bytes(32), tmp_path / "ledger.jsonl"
    with Ledger.create(path, key) as ledger:
        ledger.append("stage", record().body())
    (line,) = read_ledger(path, key)
    assert StageRecord.model_validate(line.body) == record()
    assert canonical(line.body) == canonical(record().body())
    assert record().discarded == (Discarded(what="shard = none", reason="4.4 MB a rank"),)


@pytest.mark.parametrize(
    "field", ["owner", "person", "input", "output", "test", "uncertainty", "stage"]
)
def test_no_field_may_be_missing_or_blank(field: str) -> None:
    for change in ({field: ""}, {field: "  \n"}, {field: None}):
        with pytest.raises(ValidationError, match=field):
            record(**change)
    with pytest.raises(ValidationError, match=field):
        StageRecord.model_validate({k: v for k, v in FIELDS.items() if k != field})


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "pipeline"},
        {"colour": "red"},
        {"discarded": [{"what": "gpipe", "reason": ""}]},
        {"resources": {"compute_s": -1.0}},
        {"resources": {"compute_s": float("nan")}},
        {"controls": [""]},
    ],
)
def test_what_a_record_does_not_take(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        record(**change)


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        record().person = "someone else"  # type: ignore[misc]


def test_a_run_writes_one_record_for_each_stage() -> None:
    five = [record(stage=stage) for stage in reversed(STAGES)]
    assert [found.stage for found in in_stage_order(five)] == list(STAGES)
    with pytest.raises(ValueError, match="no record of stage compute, recover"):
        in_stage_order([r for r in five if r.stage not in ("compute", "recover")])
    with pytest.raises(ValueError, match="stage compute has two"):
        in_stage_order([*five, record(stage="compute")])
