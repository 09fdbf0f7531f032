"""Failures, checkpoints and restarts: what a whole run takes and costs, not one perfect step.

With C seconds of one checkpoint, M the mean seconds between unplanned stops and R the seconds to
detect, restart and reload, the lost share of time at interval tau is C/tau + tau/(2M) + R/M.

    Young 1974:  tau = sqrt(2 C M)
    Daly 2006:   tau = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / (18 M)) - C,  for C < 2M; else M

M of n devices is M of one / n: failures of devices are independent to first order. The default is
Llama 3's 50,700 device-hours (419 stops in 54 days on 16,384). A checkpoint that is written beside
training costs only the copy that stops it, which is then what C means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reparto.config.cluster import Cluster
from reparto.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """A whole run of so many tokens."""

    steps: int
    "optimizer steps"
    ideal_s: float
    "seconds without any stop"
    expected_s: float
    "seconds with checkpoints, lost work and restarts"
    goodput: float
    "ideal over expected, 0 to 1"
    stops: float
    "expected unplanned stops"
    checkpoint_s: float
    "seconds of one checkpoint"
    interval_s: float
    "seconds between checkpoints, Daly's"
    interval_steps: int
    "the same in steps, at least 1"
    cost: float | None
    "US dollars of the whole run, None if the price is unknown"
    energy_kwh: float | None
    "board energy at full power, None if unknown"


def young_s(checkpoint_s: float, between_stops_s: float) -> float:
    """Young's interval between checkpoints."""
    return math.sqrt(2 * checkpoint_s * between_stops_s)


def daly_s(checkpoint_s: float, between_stops_s: float) -> float:
    """Daly's higher-order interval between checkpoints (his eq. 37)."""
    c, m = checkpoint_s, between_stops_s
    if c >= 2 * m:
        return m
    return young_s(c, m) * (1 + math.sqrt(c / (2 * m)) / 3 + c / (18 * m)) - c


def lost_share(
    interval_s: float, checkpoint_s: float, between_stops_s: float, restart_s: float
) -> float:
    """Share of time that checkpoints, repeated work and restarts take."""
    return (
        checkpoint_s / interval_s + interval_s / (2 * between_stops_s) + restart_s / between_stops_s
    )


def goodput(
    cluster: Cluster,
    *,
    step_s: float,
    step_tokens: int,
    total_tokens: float,
    checkpoint_s: float,
) -> Goodput:
    """The expected time and cost of `total_tokens`. Raises `UserError` for absurd inputs."""
    given = {
        "step_s": step_s,
        "step_tokens": step_tokens,
        "total_tokens": total_tokens,
        "checkpoint_s": checkpoint_s,
    }
    for name, value in given.items():
        if not 0 < value < 1e18:
            raise UserError(f"{value!r} is not positive", where=name, legal="a positive number")
    steps = math.ceil(total_tokens / step_tokens)
    ideal = steps * step_s
    between = cluster.hours_to_fault * 3600 / cluster.count
    tau = max(daly_s(checkpoint_s, between), step_s)
    lost = lost_share(tau, checkpoint_s, between, cluster.restart_s)
    # every second of useful work drags its share of lost seconds, and those fail too
    expected = ideal * (1 + lost / max(1e-9, 1 - min(lost, 0.999)))
    device_hours = expected / 3600 * cluster.count
    price, power = cluster.dollars_per_hour, cluster.accelerator.power_w
    return Goodput(
        steps=steps,
        ideal_s=ideal,
        expected_s=expected,
        goodput=ideal / expected,
        stops=expected / between,
        checkpoint_s=checkpoint_s,
        interval_s=tau,
        interval_steps=max(1, round(tau / step_s)),
        cost=device_hours * price if price else None,
        energy_kwh=device_hours * power / 1000 if power else None,
    )


def checkpoint_seconds(cluster: Cluster, parameters: float) -> float:
    """Seconds that training stands still for one checkpoint.

    Master weights and two moments, 12 bytes a parameter, written by all devices at once; the disk's
    measured rate, or 1 GB/s a device where nobody measured.
    """
    measured = cluster.measured
    rate = (measured.disk_gb_s if measured and measured.disk_gb_s else 1.0) * 1e9
    return max(12 * parameters / (rate * cluster.count), 1.0)
