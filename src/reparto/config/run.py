"""The run: everything that decides a training run, as one frozen value with the stages' tables.

A run is read from TOML, changed by `--plan` and `--set`, resolved (nothing left to a default that
could change tomorrow) and written back as `run.toml`. `resume_changes` says what may differ when a
run is taken up again.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, field_validator

from reparto.config.data import DataConfig
from reparto.config.model_table import ModelTable
from reparto.config.plan import Plan
from reparto.config.validate import build
from reparto.errors import UserError


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Objective(_Table):
    """What counts as success, declared before the run."""

    metric: Literal["validation_loss", "loss"] = "validation_loss"
    "the figure that is judged at the end, in nats a token"
    at_most: float | None = Field(None, strict=False)
    "the run reached its objective if the metric is at most this; unset: nothing is judged"


class Compute(_Table):
    """Stage 2: local forward and backward."""

    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    "type of forward and backward; sums, updates and moments are float32 (float64 for float64)"
    compile: bool = False
    "compile every block with torch.compile: half a minute on a processor before the first step"
    threads: int = Field(0, ge=0)
    "threads of one worker; 0: cores of this host divided by its workers"
    memory_gb: float = Field(0.0, ge=0, lt=1e6, strict=False)
    "most GiB of private memory of one worker process, enforced by the kernel; 0: no limit"

    @property
    def memory_bytes(self) -> int:
        """`memory_gb` in bytes; 0: no limit."""
        return round(self.memory_gb * (1 << 30))

    @property
    def master(self) -> str:
        """Type of master weights, reduced gradients and moments."""
        return "float64" if self.precision == "float64" else "float32"


class Communicate(_Table):
    """Stage 3: what carries tensors between ranks."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    "auto: nccl where there are enough GPUs, else this host's memory, and gloo between hosts"
    placement: Literal["block", "cyclic"] = "block"
    "block: a host has consecutive ranks, so the fastest axes (tensor, context) stay within it; "
    "cyclic: ranks are dealt out host by host, which puts them across the hosts"
    timeout_s: float = Field(60.0, gt=0, strict=False)
    "seconds after which a collective that a rank has not joined is a fault"
    check: Literal["step", "collective"] = "step"
    "step: ranks compare a fingerprint of their collectives once a step; collective: before each "
    "one, which costs a round trip to the store and names the first that differs"


class Synchronize(_Table):
    """Stage 4: how gradients become updates."""

    optimizer: Literal["adamw"] = "adamw"
    "the update rule"
    learning_rate: float = Field(3e-3, gt=0, strict=False)
    "highest rate of the schedule"
    learning_rate_schedule: Literal["warmup-cosine", "warmup-stable-decay", "constant"] = (
        "warmup-cosine"
    )
    "how the rate goes over optimizer steps"
    warmup_steps: int | None = Field(None, ge=0)
    "optimizer steps over which the rate rises to its highest; unset: a tenth of all, at most 100"
    final_share: float = Field(0.0, ge=0, le=1, strict=False)
    "rate of the last step as a share of the highest"
    beta1: float = Field(0.9, ge=0, lt=1, strict=False)
    "decay of the first moment"
    beta2: float = Field(0.95, ge=0, lt=1, strict=False)
    "decay of the second moment"
    eps: float = Field(1e-8, gt=0, strict=False)
    "added to the root of the second moment"
    weight_decay: float = Field(0.1, ge=0, strict=False)
    "decoupled decay of matrices; norm weights and biases never decay"
    clip_norm: float = Field(1.0, ge=0, strict=False)
    "largest global gradient norm; 0 does not clip"
    label_smoothing: float = Field(0.0, ge=0, lt=1, strict=False)
    "share of the target spread over the vocabulary"
    max_skipped: int = Field(10, ge=1)
    "steps in a row that may be skipped because they are not finite, before the run stops"

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a training of `steps`."""
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps


class Recover(_Table):
    """Stage 5: what survives."""

    checkpoint_every: int = Field(100, ge=0)
    "steps between checkpoints; 0: only at the end"
    keep: int = Field(3, ge=1)
    "checkpoints that are kept"
    background: bool = True
    "write checkpoints on a thread while training goes on; false: training waits for the disk"
    when_busy: Literal["wait", "skip"] = "wait"
    "what a background save does while the one before is still being written"
    evaluate_every: int = Field(0, ge=0)
    "steps between evaluations; 0: only at the end"
    max_restarts: int = Field(3, ge=0)
    "automatic restarts after a fault, each from the newest whole checkpoint; 0: none"


class Guard(_Table):
    """A signal that is watched while the run goes on."""

    signal: str
    above: float | None = Field(None, strict=False)
    below: float | None = Field(None, strict=False)
    window: int = Field(50, ge=1)
    owner: str = ""
    action: Literal["warn", "skip", "rollback", "stop"] = "warn"


class Run(_Table):
    """A whole run. Without a file this is the demo."""

    name: str = "first-run"
    "what people call it; letters, digits, dot, dash and underscore"
    owner: str = ""
    "the person who answers for it; default: the user who starts it"
    seed: int = Field(1, ge=0)
    "from which initial weights, sample order and dropout grow"
    steps: int = Field(300, ge=1)
    "length of the training in optimizer steps; schedules are made for it"
    tensorboard: bool = False
    "also write every row of metrics.jsonl for TensorBoard, into RUN_DIR/tensorboard"
    objective: Objective = Objective()
    model: ModelTable = ModelTable()
    data: DataConfig = DataConfig()
    partition: Plan = Plan(data=2, shard="parameters")
    compute: Compute = Compute()
    communicate: Communicate = Communicate()
    synchronize: Synchronize = Synchronize()
    recover: Recover = Recover()
    guard: tuple[Guard, ...] = Field((), strict=False)

    @field_validator("name")
    @classmethod
    def _safe_name(cls, name: str) -> str:
        allowed = name and all(one.isalnum() or one in "._-" for one in name)
        if not allowed or name.startswith(".") or len(name) > 80:
            raise UserError(
                f"`{name[:80]}` cannot be part of a file name",
                legal="1 to 80 letters, digits, dots, dashes and underscores, no dot in front",
                nearest="first-run",
            )
        return name

    def resolved(self) -> Run:
        """The same with absolute paths and nothing left to a default that depends on others."""
        synchronize = self.synchronize.model_copy(
            update={"warmup_steps": self.synchronize.warmup(self.steps)}
        )
        return self.model_copy(
            update={
                "data": self.data.absolute(),
                "model": self.model.absolute(),
                "synchronize": synchronize,
            }
        )

    def to_toml(self) -> str:
        """The run as TOML; `read_run(text)` gives an equal run."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def _without_none(values: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        if value is None or (key == "guard" and not value):
            continue
        if isinstance(value, list):
            found[key] = [_without_none(v) if isinstance(v, Mapping) else v for v in value]
        else:
            found[key] = _without_none(value) if isinstance(value, Mapping) else value
    return found


def read_run(path: Path | None, *, plan: str | None = None, settings: Sequence[str] = ()) -> Run:
    """The run of a file (or the default run), with `--plan` and then `--set` applied.

    plan      text or file; replaces the whole `[partition]` table
    settings  `a.b=value` pairs; values are TOML, or plain text where that fails
    """
    values: dict[str, object] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error
        except UnicodeDecodeError as error:
            raise UserError(f"is not UTF-8 at byte {error.start}", where=str(path)) from error
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"is not TOML: {error}", where=str(path)) from error
    if plan is not None:
        values["partition"] = Plan.parse(plan).model_dump()
    # a setting changes one key of the default plan, which is not `Plan()`
    values.setdefault("partition", Run().partition.model_dump())
    for setting in settings:
        _set(values, setting)
    run = build(Run, values)
    _refuse_unbuilt(run)
    if run.synchronize.warmup(run.steps) > run.steps:
        raise UserError(
            f"{run.synchronize.warmup_steps} steps of warm-up in a training of {run.steps}",
            where="synchronize.warmup_steps",
            legal=f"0 to {run.steps}",
            nearest=str(run.steps // 10),
        )
    return run


def _set(values: dict[str, object], setting: str) -> None:
    key, equals, raw = setting.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(
            f"`{setting}` is not `table.key=value`",
            where="--set",
            legal="--set recover.checkpoint_every=10",
        )
    table = values
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"`{part}` is a value, not a table", where=f"--set {key}")
        table = inner
    table[parts[-1]] = _toml_value(raw.strip())


def _toml_value(raw: str) -> object:
    try:
        found = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    return found["value"] if len(found) == 1 else raw  # a line break could smuggle in more keys


def _refuse_unbuilt(run: Run) -> None:
    if run.guard:
        raise UserError(
            "guards are not built yet, so this table would be ignored",
            where="[[guard]]",
            nearest="remove the [[guard]] tables",
        )
    if run.model.source == "huggingface":
        _refuse_foreign(run.model)
    if run.compute.compile and run.partition.tensor > 1:
        raise UserError(
            "messages stand inside the blocks of a tensor-parallel model, and compiling those is "
            "not built yet",
            where="compute.compile",
            legal="false, or partition.tensor = 1",
            nearest="false",
        )
    if run.compute.compile and run.model.has_experts:
        raise UserError(
            "the number of tokens of an expert differs in every step, for which compiled blocks "
            "would be compiled again and again",
            where="compute.compile",
            legal="false with a model that has experts",
            nearest="false",
        )


def _refuse_foreign(table: ModelTable) -> None:
    """What transformers' own Llama cannot be, and then whether transformers is there at all."""
    if table.dropout:
        raise UserError(
            f"dropout={table.dropout}, which Hugging Face's Llama does not have",
            where="model.dropout",
            legal="0, or model.source=reparto",
            nearest="model.dropout=0.0",
        )
    if table.has_experts:
        raise UserError(
            "Hugging Face's Llama has no experts",
            where="model.source",
            legal="reparto, or a model without experts",
            nearest="reparto",
        )
    if find_spec("transformers") is None:
        raise UserError(
            "transformers is not installed",
            where="model.source",
            legal="huggingface with the extra `hf`, or reparto",
            nearest="pip install 'reparto[hf]'",
        )


#: tables and keys that a resume may change without being asked
_FREE = (
    "partition",
    "communicate",
    "recover",
    "guard",
    "objective",
    "name",
    "owner",
    "tensorboard",
)
_FREE_KEYS = ("compute.threads", "compute.compile", "compute.memory_gb", "data.loader_workers")


def resume_changes(old: Run, new: Run) -> list[tuple[str, object, object]]:
    """`(key, old value, new value)` of everything that a resume must not change unasked."""
    changes: list[tuple[str, object, object]] = []
    before, after = _flatten(old.model_dump()), _flatten(new.model_dump())
    for key in sorted(before.keys() | after.keys()):
        if key.split(".")[0] in _FREE or key in _FREE_KEYS:
            continue
        if before.get(key) != after.get(key):
            changes.append((key, before.get(key), after.get(key)))
    return changes


def _flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
