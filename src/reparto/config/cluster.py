"""A cluster as a value: one kind of accelerator, how many, and the links between them.

Links form *tiers*, fastest first: the ranks of one node, then of one rack, then of the whole
cluster. A tier says how many neighbouring ranks it joins and what one rank can send in one
direction while all of them send. That is coarse (no torus, no oversubscription by path), but it is
what vendors publish and what a user can type in; a measured cluster file replaces it by curves.

Units stand in the keys because a person writes them: `gb_s` is 1e9 *bytes* a second and one
direction. Network cards are sold in Gbit/s, eight times as large a number, so values outside what
any hardware of today reaches are refused with the converted number.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from reparto.config.validate import build
from reparto.errors import UserError

#: one direction, one accelerator; faster than any link sold, so a larger number is a wrong unit
MAX_LINK_GB_S = 2000.0
#: the same for links that leave a node (800 Gbit/s is 100 GB/s)
MAX_NETWORK_GB_S = 220.0


class Accelerator(BaseModel):
    """One device as its maker publishes it, and what a plain matmul reaches on it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    "the name in `<name>x<count>`, lower case"
    aliases: tuple[str, ...] = ()
    "other names for the same device"
    generation: str = "other"
    "ampere, hopper, blackwell, volta, cdna, tpu, cpu, other: what fitted constants are kept by"
    peak_bf16_tflops: float = Field(gt=0, lt=20_000)
    "dense 16-bit matrix peak, 1e12 operations a second (fp16 where bf16 is missing)"
    peak_fp8_tflops: float = Field(default=0.0, ge=0, lt=40_000)
    "dense 8-bit matrix peak; 0: the device has none"
    peak_fp4_tflops: float = Field(default=0.0, ge=0, lt=80_000)
    "dense 4-bit matrix peak; 0: the device has none"
    peak_fp32_tflops: float = Field(default=0.0, ge=0, lt=5_000)
    "32-bit matrix peak; 0: an eighth of the 16-bit one"
    matmul_share: float = Field(default=0.75, gt=0, le=1)
    "largest share of the 16-bit peak that a plain matmul was seen to reach"
    memory_gb: float = Field(gt=0, lt=4_000)
    "device memory as sold; a program sees about 98.5 % of so many GiB"
    memory_tb_s: float = Field(gt=0, lt=100)
    "device memory bandwidth, 1e12 bytes a second"
    compute_units: int = Field(default=128, ge=1)
    "units that each work on one output tile (SMs, CUs)"
    node_size: int = Field(default=8, ge=1)
    "accelerators that share the fast link in the usual node"
    node_gb_s: float = Field(gt=0)
    "fast link, one direction, 1e9 bytes a second an accelerator"
    network_gb_s: float = Field(default=25.0, gt=0)
    "usual network share of one accelerator, one direction, 1e9 bytes a second"
    power_w: float = Field(default=0.0, ge=0, lt=10_000)
    "board power; 0: not known"
    price_per_hour: float = Field(default=0.0, ge=0, lt=1_000)
    "US dollars an hour for one accelerator; 0: not known"

    @model_validator(mode="after")
    def _plausible_links(self) -> Accelerator:
        _check_link("node_gb_s", self.node_gb_s, MAX_LINK_GB_S)
        _check_link("network_gb_s", self.network_gb_s, MAX_NETWORK_GB_S)
        return self


class Tier(BaseModel):
    """One level of the network."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    "node, rack, network: for people"
    size: int = Field(ge=1)
    "neighbouring ranks that this tier joins, tiers inside included"
    gb_s: float = Field(gt=0)
    "one direction, 1e9 bytes a second an accelerator, while all of them send"
    latency_us: float = Field(default=5.0, ge=0, lt=1e6)
    "one message of no bytes, 1e-6 s"


class CollectiveCurve(BaseModel):
    """Measured seconds of one collective in one group size, by payload."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    operation: str
    "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send"
    group_size: int = Field(ge=2)
    "ranks in the group"
    tier: str
    "name of the slowest tier that the group crosses"
    points: tuple[tuple[float, float], ...] = Field(min_length=1)
    "(payload bytes, seconds), ascending; payload as in `partition/volume.py`"


class Measured(BaseModel):
    """What `probe` found on the real machine; each part given replaces the formula for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: str = ""
    "where it was measured"
    matmul: tuple[tuple[float, float, float, float], ...] = ()
    "(m, n, k, seconds) of a matmul in the compute type"
    memory_tb_s: float = Field(default=0.0, ge=0)
    "bandwidth of a copy, read and write counted, 1e12 bytes a second; 0: not measured"
    kernel_us: float = Field(default=0.0, ge=0)
    "host time of one small operation, 1e-6 s; 0: not measured"
    disk_gb_s: float = Field(default=0.0, ge=0)
    "writing a checkpoint, 1e9 bytes a second; 0: not measured"
    collectives: tuple[CollectiveCurve, ...] = ()
    "curves of collectives"


class Cluster(BaseModel):
    """`count` equal accelerators, joined by tiers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    "for people; `<accelerator>x<count>` if nobody named it"
    accelerator: Accelerator
    "the one kind of device"
    count: int = Field(ge=1, le=1_000_000)
    "accelerators of the cluster"
    tiers: tuple[Tier, ...] = Field(min_length=1)
    "fastest and smallest first; the last one joins all"
    price_per_hour: float = Field(default=0.0, ge=0)
    "US dollars an hour for one accelerator; 0: the accelerator's own"
    restart_s: float = Field(default=600.0, ge=0)
    "detect, restart and reload after a fault"
    hours_to_fault: float = Field(default=50_700.0, gt=0)
    "mean accelerator-hours between unplanned stops (Llama 3: 419 in 54 days on 16,384)"
    measured: Measured | None = None
    "curves from `probe`"

    @model_validator(mode="after")
    def _tiers_nest(self) -> Cluster:
        size = 0
        for index, tier in enumerate(self.tiers):
            limit = MAX_LINK_GB_S if index == 0 else MAX_NETWORK_GB_S
            _check_link(f"tiers.{index}.gb_s", tier.gb_s, limit)
            if tier.size <= size:
                raise UserError(
                    f"tier {tier.name!r} joins {tier.size} ranks, the one before {size}",
                    where=f"tiers.{index}.size",
                    legal="tiers from small to large",
                )
            size = tier.size
        if size < self.count:
            raise UserError(
                f"the last tier joins {size} of {self.count} accelerators",
                where="tiers",
                legal=f"a last tier of size {self.count}",
            )
        return self

    @property
    def dollars_per_hour(self) -> float:
        """Of one accelerator; 0 if unknown."""
        return self.price_per_hour or self.accelerator.price_per_hour

    @property
    def memory_bytes(self) -> float:
        """What a program can see on one accelerator.

        Makers sell GiB as GB and keep 1 to 2 % for themselves (an 80 GB H100 shows 79.1 GiB).
        """
        return self.accelerator.memory_gb * 0.985 * (1 << 30)

    def tier_of(self, span: int) -> int:
        """Index of the smallest tier that joins `span` neighbouring ranks."""
        for index, tier in enumerate(self.tiers):
            if tier.size >= span:
                return index
        return len(self.tiers) - 1

    def resized(self, count: int) -> Cluster:
        """The same machine with another number of accelerators."""
        tiers = [tier for tier in self.tiers[:-1] if tier.size < count]
        last = self.tiers[-1]
        if not tiers and len(self.tiers) > 1 and count <= self.tiers[0].size:
            last = self.tiers[0]
        tiers.append(last.model_copy(update={"size": max(count, 1)}))
        return self.model_copy(update={"count": count, "tiers": tuple(tiers)})


def _check_link(where: str, gb_s: float, limit: float) -> None:
    if gb_s > limit:
        raise UserError(
            f"{gb_s:g} GB/s is faster than any link: is it Gbit/s?",
            where=where,
            legal=f"gigabytes a second, one direction, up to {limit:g}",
            nearest=f"{gb_s / 8:g}",
        )


def cluster_of(accelerator: Accelerator, count: int) -> Cluster:
    """`count` accelerators in the maker's usual nodes and network."""
    node = min(accelerator.node_size, count)
    tiers = [Tier(name="node", size=node, gb_s=accelerator.node_gb_s, latency_us=3.0)]
    if count > node:
        tiers.append(
            Tier(name="network", size=count, gb_s=accelerator.network_gb_s, latency_us=8.0)
        )
    return Cluster(
        name=f"{accelerator.name}x{count}", accelerator=accelerator, count=count, tiers=tuple(tiers)
    )


def read_toml(path: Path, *, where: str) -> dict[str, object]:
    """A TOML file as a mapping; every failure is a `UserError` that names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", where=where) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}", where=where) from error


def accelerator_from(values: dict[str, object], *, where: str) -> Accelerator:
    """An accelerator from a table."""
    return build(Accelerator, _tuples(values), where=where)


def cluster_from(values: dict[str, object], *, where: str) -> Cluster:
    """A cluster from a table whose `accelerator` is already a table."""
    return build(Cluster, _tuples(values), where=where)


def _tuples(values: dict[str, object]) -> dict[str, object]:
    """TOML has lists and whole numbers where these values want tuples and floats."""
    return {key: _tuple(value) for key, value in values.items()}


def _tuple(value: object) -> object:
    if isinstance(value, list):
        return tuple(_tuple(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuple(item) for key, item in value.items()}
    return value
