"""The plan: how the work is shared out. A value that can be written, saved, compared and replayed.

A plan says how many ranks there are along each axis and what each strategy does there. It knows
nothing of the model, the batch or the machine; whether it can run on them is decided in
`partition/legal.py`, before any process starts.

Text form, for the command line: `data=2,tensor=2,pipeline=2`. Only what differs from the default
is written; `Plan.parse(plan.text) == plan`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from reparto.config.validate import build
from reparto.errors import UserError, nearest_word

ShardMode = Literal["none", "optimizer", "gradients", "parameters"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]

#: chunks a rank that a schedule takes when the plan does not say
DEFAULT_CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}


class Plan(BaseModel):
    """The `[partition]` table of a run, stage 1 of the five."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    data: int = Field(1, ge=1)
    "data-parallel degree: ranks that see different sequences"
    shard: ShardMode = "none"
    "what the data-parallel ranks keep only a part of (ZeRO 0 to 3); each includes the ones before"
    replicas: int = Field(1, ge=1)
    "copies of the sharded state; divides `data` and adds no ranks (hybrid sharding)"
    tensor: int = Field(1, ge=1)
    "tensor-parallel degree: ranks that share every matrix"
    sequence_parallel: bool = False
    "norms and dropout on sequence shards between tensor-parallel regions"
    pipeline: int = Field(1, ge=1)
    "pipeline degree: ranks that own consecutive layers"
    chunks: int = Field(0, ge=0)
    "virtual stages a pipeline rank; 0 takes the schedule's own number (1, or 2 where it needs two)"
    schedule: ScheduleName = "1f1b"
    "order of the pipeline's actions"
    num_microbatches: int = Field(1, ge=1)
    "parts that each rank's batch is cut into, for the pipeline or for gradient accumulation"
    context: int = Field(1, ge=1)
    "context-parallel degree: ranks that share every sequence"
    context_mode: Literal["ring", "ulysses"] = "ring"
    "how attention crosses the context ranks"
    expert: int = Field(1, ge=1)
    "expert-parallel degree; folds over data x context and adds no ranks"
    recompute: Literal["none", "selective", "full"] = "none"
    "activations made again in backward instead of kept: none, attention only, whole layers"
    gradient_sync: Literal["step", "microbatch"] = "step"
    "reduce once a step (fewest bytes) or after each microbatch (least memory when sharded)"
    bucket_bytes: int = Field(25 * 1024 * 1024, ge=1)
    "bytes of gradient that are reduced together"

    @property
    def world_size(self) -> int:
        """pipeline x data x context x tensor. `replicas` and `expert` fold over data x context."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def num_chunks(self) -> int:
        """Virtual stages a pipeline rank, with the schedule's own number filled in."""
        return self.chunks or DEFAULT_CHUNKS.get(self.schedule, 1)

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of sharded state: (data / replicas) x context."""
        return self.data // self.replicas * self.context

    @property
    def text(self) -> str:
        """The text form, only what differs from the default; `data=1` for the default plan."""
        parts = [
            f"{name}={_word(value)}"
            for name, value in self
            if value != type(self).model_fields[name].default
        ]
        return ",".join(parts) or "data=1"

    @classmethod
    def parse(cls, text: str, *, where: str = "--plan") -> Plan:
        """A plan from its text form or a TOML file (`*.toml`, keys at top or in `[partition]`)."""
        if text.endswith(".toml"):
            return cls._from_file(Path(text), where)
        values: dict[str, object] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, equals, raw = part.partition("=")
            key = key.strip()
            if not equals or not key or not raw.strip():
                raise UserError(
                    f"`{part}` is not `key=value`",
                    where=where,
                    legal="data=2,shard=parameters",
                    nearest=f"{nearest_word(key, cls.model_fields) or 'data'}=2",
                )
            if key in values:
                raise UserError(
                    f"`{key}` stands twice in `{text}`",
                    where=where,
                    legal="every key once",
                    nearest=f"{key}={_word(values[key])}",
                )
            values[key] = _value(raw.strip())
        if not values:
            raise UserError(
                "is empty", where=where, legal="data=2,shard=parameters", nearest="data=1"
            )
        return build(cls, values, where=where)

    @classmethod
    def _from_file(cls, path: Path, where: str) -> Plan:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}", where=where) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not TOML: {error}", where=where) from error
        inner = table.get("partition", table)
        return build(cls, inner if isinstance(inner, dict) else table, where=str(path))


def _value(raw: str) -> object:
    if raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    try:
        return int(raw)
    except ValueError:
        return raw


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
