"""The plan as a value: its keys, its text and file forms, and what it answers to bad input."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reparto.config.plan import Plan, ScheduleName, ShardMode
from reparto.errors import UserError

#: the keys of `[partition]`, in their order, with their defaults: frozen
KEYS = {
    "data": 1,
    "shard": "none",
    "replicas": 1,
    "tensor": 1,
    "sequence_parallel": False,
    "pipeline": 1,
    "chunks": 0,
    "schedule": "1f1b",
    "num_microbatches": 1,
    "context": 1,
    "context_mode": "ring",
    "expert": 1,
    "recompute": "none",
    "gradient_sync": "step",
    "bucket_bytes": 25 * 1024 * 1024,
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    degree = st.integers(1, 64)
    return Plan(
        data=draw(degree),
        shard=draw(st.sampled_from(get_args(ShardMode))),
        replicas=draw(degree),
        tensor=draw(degree),
        sequence_parallel=draw(st.booleans()),
        pipeline=draw(degree),
        chunks=draw(st.integers(0, 8)),
        schedule=draw(st.sampled_from(get_args(ScheduleName))),
        num_microbatches=draw(degree),
        context=draw(degree),
        context_mode=draw(st.sampled_from(["ring", "ulysses"])),
        expert=draw(degree),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        gradient_sync=draw(st.sampled_from(["step", "microbatch"])),
        bucket_bytes=draw(st.integers(1, 1 << 40)),
    )


def test_the_keys_and_their_defaults_are_frozen() -> None:
    assert Plan().model_dump() == KEYS
    assert list(Plan.model_fields) == list(KEYS)


@settings(deadline=None)
@given(plans())
def test_the_text_form_gives_the_plan_back(plan: Plan) -> None:
    assert Plan.parse(plan.text) == plan


@settings(deadline=None)
@given(plans())
def test_only_what_differs_from_the_default_is_written(plan: Plan) -> None:
    named = {part.partition("=")[0] for part in plan.text.split(",")}
    differing = {key for key, value in plan.model_dump().items() if value != KEYS[key]}
    assert named == (differing or {"data"})


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("data=2,tensor=2,pipeline=2", "data=2,tensor=2,pipeline=2"),
        (" data = 2 , shard=parameters ", "data=2,shard=parameters"),
        ("data=1", "data=1"),
        ("chunks=0,shard=none", "data=1"),
        ("sequence_parallel=True,tensor=2", "tensor=2,sequence_parallel=true"),
        ("schedule=1f1b", "data=1"),  # looks like a number, and is none
        ("data=2,", "data=2"),
    ],
)
def test_texts_by_hand(text: str, same_as: str) -> None:
    assert Plan.parse(text).text == same_as


def test_world_size_is_the_product_of_four_degrees() -> None:
    plan = Plan.parse("data=4,replicas=2,tensor=2,pipeline=3,context=5,expert=2,shard=gradients")
    assert plan.world_size == 3 * 4 * 5 * 2
    assert plan.num_shards == 4 // 2 * 5


@pytest.mark.parametrize(
    ("text", "chunks"),
    [("schedule=interleaved", 2), ("schedule=zb-v", 2), ("schedule=dualpipe-v", 2),
     ("schedule=gpipe", 1), ("schedule=interleaved,chunks=4", 4)],
)  # fmt: skip
def test_chunks_that_are_not_named_are_the_schedules_own(text: str, chunks: int) -> None:
    assert Plan.parse(f"pipeline=2,{text}").num_chunks == chunks


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Plan().data = 2  # type: ignore[misc]


# --- bad input -----------------------------------------------------------------------------------

ALL_KEYS = ", ".join(KEYS)
FORM = "data=2,shard=parameters"


@pytest.mark.parametrize(
    ("text", "where", "says", "legal", "nearest"),
    [
        ("data", "--plan", "`data` is not `key=value`", FORM, "data=2"),
        ("data 2", "--plan", "`data 2` is not `key=value`", FORM, "data=2"),
        ("tensr", "--plan", "`tensr` is not `key=value`", FORM, "tensor=2"),
        ("data=", "--plan", "`data=` is not `key=value`", FORM, "data=2"),
        ("=2", "--plan", "`=2` is not `key=value`", FORM, "data=2"),
        ("", "--plan", "is empty", FORM, "data=1"),
        (" , ", "--plan", "is empty", FORM, "data=1"),
        ("data=2,data=3", "--plan", "`data` stands twice", "every key once", "data=2"),
        ("dta=2", "--plan.dta", "unknown key `dta`", ALL_KEYS, "data"),
        ("Data=2", "--plan.Data", "unknown key `Data`", ALL_KEYS, "data"),
        ("microbatches=2", "--plan.microbatches", "unknown key", ALL_KEYS, "num_microbatches"),
        ("data=two", "--plan.data", "'two' is not allowed", "a whole number >= 1", "1"),
        ("data=0", "--plan.data", "0 is not allowed", "a whole number >= 1", "1"),
        ("data=-3", "--plan.data", "-3 is not allowed", "a whole number >= 1", "1"),
        ("data=2.0", "--plan.data", "'2.0' is not allowed", "a whole number >= 1", "2"),
        ("data=true", "--plan.data", "True is not allowed", "a whole number >= 1", "1"),
        ("chunks=-1", "--plan.chunks", "-1 is not allowed", "a whole number >= 0", "0"),
        ("data=2;tensor=2", "--plan.data", "'2;tensor=2' is not", "a whole number >= 1", "1"),
        ("bucket_bytes=25MB", "--plan.bucket_bytes", "'25MB' is not", "a whole number >= 1",
         str(25 * 1024 * 1024)),
        ("shard=param", "--plan.shard", "'param' is not allowed",
         "none, optimizer, gradients, parameters", "parameters"),
        ("shard=Optimizer", "--plan.shard", "'Optimizer' is not allowed",
         "none, optimizer, gradients, parameters", "optimizer"),
        ("schedule=1f1", "--plan.schedule", "'1f1' is not allowed",
         "gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v", "1f1b"),
        ("schedule=zbv", "--plan.schedule", "'zbv' is not allowed",
         "gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v", "zb-v"),
        ("context_mode=rings", "--plan.context_mode", "'rings' is not", "ring, ulysses", "ring"),
        ("recompute=all", "--plan.recompute", "'all' is not", "none, selective, full", "full"),
        ("gradient_sync=micro", "--plan.gradient_sync", "'micro' is not", "step, microbatch",
         "microbatch"),
        ("sequence_parallel=1", "--plan.sequence_parallel", "1 is not", "true or false", "true"),
        ("sequence_parallel=no", "--plan.sequence_parallel", "'no' is not", "true or false",
         "false"),
    ],
)  # fmt: skip
def test_bad_texts_are_answered_with_field_legal_values_and_nearest(
    text: str, where: str, says: str, legal: str, nearest: str
) -> None:
    with pytest.raises(UserError) as caught:
        Plan.parse(text)
    error = caught.value
    assert error.exit_code == 2
    assert (error.where, error.legal, error.nearest) == (where, legal, nearest)
    assert says in error.what


def test_all_faults_of_one_text_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Plan.parse("data=0,tensor=x,foo=1")
    text = str(caught.value)
    assert "--plan.data: 0" in text and "--plan.tensor: 'x'" in text and "key `foo`" in text


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_text_is_a_plan_or_a_user_error(text: str) -> None:
    if text.endswith(".toml"):
        return
    try:
        plan = Plan.parse(text)
    except UserError as error:
        assert error.where and error.nearest is not None
    else:
        assert Plan.parse(plan.text) == plan


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["", "[partition]\n"])
def test_a_plan_file_has_its_keys_at_the_top_or_in_a_partition_table(
    tmp_path: Path, head: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(head + 'data = 4\nshard = "gradients"\nsequence_parallel = false\n')
    assert Plan.parse(str(path)) == Plan(data=4, shard="gradients")


@pytest.mark.parametrize(
    ("content", "says", "nearest"),
    [
        (b"data = = 2", "is not TOML", ""),
        (b"\xff\xfe", "is not TOML", ""),
        (b"dta = 2", "unknown key `dta`", "data"),
        (b'data = "2"', "'2' is not allowed", "2"),
        (b"[partition]\ndata = 2.5", "2.5 is not allowed", "2"),
        (b"partition = 3", "unknown key `partition`", ""),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, says: str, nearest: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        Plan.parse(str(path))
    assert says in str(caught.value) and "plan.toml" in str(caught.value)
    assert caught.value.nearest == nearest


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot read nowhere\.toml: No such file"):
        Plan.parse("nowhere.toml")
