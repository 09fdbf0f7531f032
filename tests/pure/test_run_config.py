"""The run config: TOML there and back, strict keys and types, --plan and --set, and resume."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from reparto.config.data import DataConfig, MixtureMember
from reparto.config.model_table import ModelTable
from reparto.config.plan import Plan, ScheduleName, ShardMode
from reparto.config.run import (
    Communicate,
    Compute,
    Guard,
    Objective,
    Recover,
    Run,
    Synchronize,
    read_run,
    resume_changes,
)
from reparto.errors import UserError

#: tables and keys that documents promise; more may be added, none may go
PROMISED = {
    "": {"name", "owner", "seed", "steps", "objective", "model", "data", "partition", "compute",
         "communicate", "synchronize", "recover", "guard"},
    "objective": {"metric", "at_most"},
    "model": {"preset", "source", "config", "weights"},
    "data": {"source", "tokenizer", "sequence_length", "batch_size"},
    "partition": {"data", "shard"},
    "compute": {"precision", "compile"},
    "communicate": {"backend", "timeout_s"},
    "synchronize": {"optimizer", "learning_rate", "learning_rate_schedule", "clip_norm"},
    "recover": {"checkpoint_every", "keep"},
}  # fmt: skip


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read_run(written(tmp_path, text))
    return caught.value


def set_refusal(*settings: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read_run(None, settings=settings)
    return caught.value


# --- the value -----------------------------------------------------------------------------------


def test_the_promised_tables_and_keys_are_there() -> None:
    dumped = Run(guard=(Guard(signal="x"),)).model_dump()
    assert PROMISED[""] <= dumped.keys()
    for table, keys in PROMISED.items():
        if table:
            assert keys <= dumped[table].keys(), table
    assert {"signal", "above", "window", "owner", "action"} <= dumped["guard"][0].keys()


def test_without_a_file_it_is_the_demo_over_two_workers() -> None:
    run = read_run(None)
    assert run == Run()
    assert run.partition == Plan(data=2, shard="parameters")


def every_model(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for one in (field.annotation, *get_args(field.annotation)):
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from every_model(one)


def test_every_table_is_frozen_and_strict() -> None:
    found = set(every_model(Run))
    assert {Run, Plan, DataConfig, MixtureMember, Guard, ModelTable, Compute} <= found
    for model in found:
        assert model.model_config.get("frozen") and model.model_config.get("strict"), model
        assert model.model_config.get("extra") == "forbid", model
    with pytest.raises(ValidationError):
        Run().steps = 3  # type: ignore[misc]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    share = st.floats(0, 0.99)
    positive = st.floats(1e-12, 1e6)
    maybe = st.one_of(st.none(), st.floats(-1e6, 1e6))
    return Run(
        name=draw(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,40}", fullmatch=True)),
        owner=draw(st.text(st.characters(exclude_categories=("Cs",)), max_size=20)),
        seed=draw(st.integers(0, 2**63 - 1)),
        steps=draw(st.integers(1, 10**9)),
        objective=Objective(at_most=draw(maybe)),
        model=ModelTable(preset=draw(st.sampled_from(["1m", "10m", "1b"])), dropout=draw(share)),
        data=DataConfig(
            source="mixture",
            mixture=(
                MixtureMember(name="a", source="python-stdlib", weight=draw(positive)),
                MixtureMember(name="b", source="text", paths=("x y", 'quo"te', "c:\\d")),
            ),
            batch_size=draw(st.integers(1, 10**6)),
            validation_share=draw(st.floats(0, 0.4)),
        ),
        partition=Plan(
            data=draw(st.integers(1, 99)),
            shard=draw(st.sampled_from(get_args(ShardMode))),
            schedule=draw(st.sampled_from(get_args(ScheduleName))),
            sequence_parallel=draw(st.booleans()),
        ),
        compute=Compute(precision=draw(st.sampled_from(["float32", "bfloat16", "float64"]))),
        communicate=Communicate(timeout_s=draw(positive)),
        synchronize=Synchronize(
            learning_rate=draw(positive), beta2=draw(share), eps=draw(st.floats(1e-30, 1.0)),
            warmup_steps=draw(st.one_of(st.none(), st.integers(0, 99))),
        ),
        recover=Recover(keep=draw(st.integers(1, 9))),
        guard=tuple(
            Guard(signal="loss", above=draw(maybe)) for _ in range(draw(st.integers(0, 2)))
        ),
    )  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(runs())
def test_toml_gives_the_run_back(run: Run) -> None:
    assert Run.model_validate(tomllib.loads(run.to_toml())) == run


def test_a_written_run_is_read_back_from_its_file(tmp_path: Path) -> None:
    run = Run(name="a.b-c_d", owner="Núria Ñandú", steps=7, synchronize=Synchronize(warmup_steps=2))
    assert read_run(written(tmp_path, run.to_toml())) == run


# --- what a file may not say ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "says", "nearest"),
    [
        ("stepss = 3", "stepss", "unknown key `stepss`", "steps"),
        ("[dta]", "dta", "unknown key `dta`", "data"),
        ("[data]\nbatch = 3", "data.batch", "unknown key `batch`", "batch_size"),
        ("[partition]\nexprt = 2", "partition.exprt", "unknown key `exprt`", "expert"),
        ("[recover]\ncheckpoint_evry = 2", "recover.checkpoint_evry", "unknown key",
         "checkpoint_every"),
        ("[[guard]]\nsignal = 'x'\nabve = 1", "guard.0.abve", "unknown key `abve`", "above"),
        ("[[data.mixture]]\nname = 'a'\nsource = 'text'\nwieght = 2", "data.mixture.0.wieght",
         "unknown key `wieght`", "weight"),
        ("steps = '3'", "steps", "'3' is not allowed", "3"),
        ("steps = 3.0", "steps", "3.0 is not allowed", "3"),
        ("steps = true", "steps", "True is not allowed", "300"),
        ("steps = 0", "steps", "0 is not allowed", "1"),
        ("seed = -1", "seed", "-1 is not allowed", "0"),
        ("owner = 3", "owner", "3 is not allowed", '"3"'),
        ("[data]\nbatch_size = 16.5", "data.batch_size", "16.5 is not allowed", "16"),
        ("[data]\nvocab_size = 3", "data.vocab_size", "3 is not allowed", "257"),
        ("[data]\nsource = 'stdlib'", "data.source", "'stdlib' is not allowed", "python-stdlib"),
        ("[model]\nhidden_size = 0", "model.hidden_size", "0 is not allowed", "1"),
        ("[model]\npreset = '10'", "model.preset", "no preset is called `10`", "10m"),
        ("[compute]\nprecision = 'fp32'", "compute.precision", "'fp32' is not", "float32"),
        ("[compute]\ncompile = 'yes'", "compute.compile", "'yes' is not allowed", "true"),
        ("[communicate]\nbackend = 'ncll'", "communicate.backend", "'ncll' is not", "nccl"),
        ("[communicate]\ntimeout_s = 0", "communicate.timeout_s", "0 is not allowed", "60.0"),
        ("[synchronize]\nlearning_rate = 'fast'", "synchronize.learning_rate", "'fast' is not",
         "0.003"),
        ("[synchronize]\nlearning_rate = nan", "synchronize.learning_rate", "nan is not", "0.003"),
        ("[synchronize]\nlearning_rate = inf", "synchronize.learning_rate", "inf is not", "0.003"),
        ("[synchronize]\nbeta1 = 1.0", "synchronize.beta1", "1.0 is not allowed", "0.9"),
        ("[synchronize]\nfinal_share = 1.5", "synchronize.final_share", "1.5 is not", "1"),
        ("[recover]\nkeep = 0", "recover.keep", "0 is not allowed", "1"),
        ("name = '../x'", "name", "`../x` cannot be part of a file name", "first-run"),
        ("name = '.hidden'", "name", "cannot be part of a file name", "first-run"),
        ("name = 'a\\nb'", "name", "cannot be part of a file name", "first-run"),
    ],
)  # fmt: skip
def test_wrong_keys_types_and_values_are_named_with_the_nearest(
    tmp_path: Path, text: str, where: str, says: str, nearest: str
) -> None:
    error = refusal(tmp_path, text)
    assert (error.where, error.nearest) == (where, nearest)
    assert says in error.what
    assert error.legal, "legal values are always told"
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("text", "where", "legal"),
    [
        ("data = 3", "data", "a table"),
        ("partition = 'data=2'", "partition", "a table"),
        ("guard = 3", "guard", "a list"),
        ("[data]\npaths = 'x'", "data.paths", "a list"),
        ("[[guard]]\nabove = 3", "guard.0.signal", "a text"),
    ],
)
def test_a_value_of_another_kind_is_told_what_belongs_there(
    tmp_path: Path, text: str, where: str, legal: str
) -> None:
    error = refusal(tmp_path, text)
    assert (error.where, error.legal) == (where, legal)


def test_whole_numbers_are_fine_where_numbers_belong(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, "[synchronize]\nlearning_rate = 1\nclip_norm = 0\n"))
    assert (run.synchronize.learning_rate, run.synchronize.clip_norm) == (1.0, 0.0)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    text = str(refusal(tmp_path, "steps = 0\n[data]\nbatch = 3\n[compute]\nthreads = -1\n"))
    assert "steps: 0" in text and "data.batch: unknown key" in text and "compute.threads" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"steps = = 3", "is not TOML"), (b"steps = 3\nsteps = 4", "is not TOML"),
     (b"name = '\xff'", "is not UTF-8 at byte 8")],
)  # fmt: skip
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_run(path)
    assert caught.value.where == str(path) and says in caught.value.what


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_run(tmp_path / "nowhere.toml")


def test_a_warm_up_longer_than_the_training_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, "steps = 20\n[synchronize]\nwarmup_steps = 21\n")
    assert error.where == "synchronize.warmup_steps"
    assert (error.legal, error.nearest) == ("0 to 20", "2")
    assert read_run(written(tmp_path, "steps = 5")).synchronize.warmup(5) == 0


# --- --plan and --set ----------------------------------------------------------------------------


def test_plan_replaces_the_whole_table_and_set_goes_on_top(tmp_path: Path) -> None:
    path = written(tmp_path, '[partition]\ndata = 8\nrecompute = "full"\n')
    assert read_run(path).partition == Plan(data=8, recompute="full")
    assert read_run(path, plan="tensor=2").partition == Plan(tensor=2)
    found = read_run(path, plan="tensor=2", settings=["partition.gradient_sync=microbatch"])
    assert found.partition == Plan(tensor=2, gradient_sync="microbatch")


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("steps=7", "steps", 7),
        (" steps = 7 ", "steps", 7),
        ("name=hello", "name", "hello"),
        ('name="12"', "name", "12"),
        ("owner=a=b", "owner", "a=b"),
        ("synchronize.learning_rate=3e-4", "synchronize.learning_rate", 3e-4),
        ("synchronize.learning_rate=1", "synchronize.learning_rate", 1.0),
        ("partition.sequence_parallel=true", "partition.sequence_parallel", True),
        ("data.batch_size=48", "data.batch_size", 48),
        ("objective.at_most=2.6", "objective.at_most", 2.6),
    ],
)
def test_set_sets_one_key(setting: str, key: str, value: object) -> None:
    run = read_run(None, settings=[setting])
    assert flattened(run)[key] == value
    changed = {k for k, v in flattened(run).items() if v != flattened(Run())[k]}
    assert changed <= {key}


def test_later_settings_win_and_lists_are_toml() -> None:
    run = read_run(None, settings=["steps=7", 'data.source="text"', 'data.paths=["a", "b"]',
                                   "steps=9"])  # fmt: skip
    assert run.steps == 9 and run.data.paths == ("a", "b")


@pytest.mark.parametrize("setting", ["steps", "=3", ".steps=3", "data.=3", "data..x=3", ""])
def test_a_setting_that_is_no_pair_is_refused(setting: str) -> None:
    error = set_refusal(setting)
    assert error.where == "--set" and "is not `table.key=value`" in error.what


@pytest.mark.parametrize(
    ("setting", "where", "nearest"),
    [
        ("stps=3", "stps", "steps"),
        ("data.batchsize=3", "data.batchsize", "batch_size"),
        ("recover.kep=3", "recover.kep", "keep"),
        ("steps=1e3", "steps", "1000"),
        ("steps=", "steps", "300"),
        ("name=12", "name", '"12"'),
        ("steps=3\nseed=4", "steps", "300"),  # no second key rides along
    ],
)
def test_a_setting_is_as_strict_as_a_file(setting: str, where: str, nearest: str) -> None:
    error = set_refusal(setting)
    assert (error.where, error.nearest) == (where, nearest)


def test_a_value_has_no_keys(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`steps` is a value, not a table"):
        read_run(written(tmp_path, "steps = 3"), settings=["steps.x=3"])


# --- resume --------------------------------------------------------------------------------------

#: what a resume may change without being asked: where, how wide, how often; never what is computed
FREE_TABLES = {"partition", "communicate", "recover", "guard", "objective"}
FREE_KEYS = {"name", "owner", "tensorboard", "compute.threads", "compute.compile",
             "compute.memory_gb", "data.loader_workers"}  # fmt: skip


def flattened(run: Run) -> dict[str, object]:
    def walk(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    return dict(walk(run.model_dump(), ""))


def another(value: object) -> object:
    """A different value of about the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return ("x",) if isinstance(value, tuple) else 3


@pytest.mark.filterwarnings("ignore:Pydantic serializer:UserWarning")  # made without validation
@pytest.mark.parametrize("key", sorted(flattened(Run())))
def test_resume_judges_every_key_by_itself(key: str) -> None:
    old = Run()
    table, _, leaf = key.rpartition(".")
    new_value = another(flattened(old)[key])
    inner = getattr(old, table).model_copy(update={leaf: new_value}) if table else None
    new = old.model_copy(update={table: inner} if table else {leaf: new_value})
    free = key in FREE_KEYS or key.partition(".")[0] in FREE_TABLES
    expected = [] if free else [(key, flattened(old)[key], new_value)]
    assert resume_changes(old, new) == expected


def test_resume_names_every_change_and_nothing_else() -> None:
    old = Run()
    assert resume_changes(old, old) == []
    new = read_run(None, plan="data=8,shard=gradients", settings=[
        "seed=2", "steps=400", "data.batch_size=64", "synchronize.clip_norm=2.0",
        "model.num_hidden_layers=3", "recover.keep=9", "communicate.timeout_s=5",
    ])  # fmt: skip
    assert [key for key, _, _ in resume_changes(old, new)] == [
        "data.batch_size", "model.num_hidden_layers", "seed", "steps", "synchronize.clip_norm",
    ]  # fmt: skip
