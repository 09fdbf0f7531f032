"""Seconds of one kernel on one accelerator: matmul, attention, a pass over memory.

A matmul is cut in output tiles that run in waves over the compute units. Its time is the number of
waves times the time of a tile, and a tile of inner size k costs as much as k + ramp, because its
pipeline fills and drains. That reproduces the three effects that plain "FLOPs over peak" misses:
narrow shards (few tiles), short inner sizes, and the staircase of partly filled waves. Several tile
shapes are tried and the best is taken, as the vendor's library does.

Source of the tile and wave picture: NVIDIA, "Matrix Multiplication Background User's Guide".
Rejected: a table of measured kernels per device. It is more accurate (SimuMax) and nobody has it
for the device they are about to rent; a cluster file from `probe` is that table where it exists.
"""

from __future__ import annotations

import math
from itertools import pairwise

from reparto.config.cluster import Accelerator, Measured
from reparto.planner.constants import Constants

#: (rows, columns, speed over the best tile)
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))


class Kernels:
    """The kernels of one accelerator under one set of constants; remembers what it computed."""

    def __init__(
        self, device: Accelerator, constants: Constants, measured: Measured | None = None
    ) -> None:
        generation = device.generation
        self.device = device
        self.constants = constants
        share = device.matmul_share * constants.of("matmul", generation)
        base = device.peak_bf16_tflops * 1e12
        self.peak_flops = base
        self.rates = {
            "bf16": base * share,
            "fp32": (device.peak_fp32_tflops * 1e12 or base / 8) * share,
            "fp8": max(base, device.peak_fp8_tflops * 1e12 * constants.of("fp8", generation))
            * share,
            "fp4": max(base, device.peak_fp4_tflops * 1e12 * constants["fp4"]) * share,
        }
        self.rates["fp4"] = max(self.rates["fp4"], self.rates["fp8"])
        self.memory_bytes_s = device.memory_tb_s * 1e12 * constants["memory"]
        plain = base * device.matmul_share
        self.flash_flops_s = plain * constants.of("flash", generation)
        self.batched_flops_s = plain * constants.of("batched", generation)
        second = constants.of("flash_second", generation)
        self.flash_kernels = {
            "vendor": 1.0,
            "second": second,
            "first": second * constants["flash_first"],
        }
        self.kernel_s = constants["host_us"] * 1e-6
        self.tiled = device.compute_units > 8
        self.curve: list[tuple[float, float]] = []
        if measured is not None:
            self._take(measured)
        self._matmuls: dict[tuple[float, float, float, str], float] = {}

    def _take(self, measured: Measured) -> None:
        """Let measured curves stand in for the formulas."""
        if measured.memory_tb_s:
            self.memory_bytes_s = measured.memory_tb_s * 1e12
        if measured.kernel_us:
            self.kernel_s = measured.kernel_us * 1e-6
        self.curve = sorted((2 * m * n * k, 2 * m * n * k / s) for m, n, k, s in measured.matmul)
        if self.curve:
            best = max(rate for _, rate in self.curve)
            scale = best / self.rates["bf16"]
            self.flash_flops_s *= scale
            self.batched_flops_s *= scale
            self.peak_flops = max(self.peak_flops, best)

    def matmul_s(self, m: float, n: float, k: float, precision: str = "bf16") -> float:
        """Seconds of an (m, k) by (k, n) product."""
        key = (m, n, k, precision)
        found = self._matmuls.get(key)
        if found is None:
            found = self._matmuls[key] = self._matmul_s(m, n, k, precision)
        return found

    def _matmul_s(self, m: float, n: float, k: float, precision: str) -> float:
        if min(m, n, k) <= 0:
            return 0.0
        if self.curve:
            return 2 * m * n * k / _interpolate(self.curve, 2 * m * n * k)
        rate = self.rates[precision]
        width = {"fp32": 4.0, "bf16": 2.0}.get(precision, 1.0)
        moved = (m * k + k * n) * width + m * n * max(width, 2.0)
        memory_s = moved / self.memory_bytes_s
        if not self.tiled:
            return max(2 * m * n * k / rate, memory_s)
        units = self.device.compute_units
        tail = self.constants["tail"]
        depth = k + self.constants["ramp"]
        best = math.inf
        for rows, columns, speed in TILES:
            tiles = math.ceil(m / rows) * math.ceil(n / columns)
            full = tiles / units
            waves = full + tail * (math.ceil(full) - full)
            best = min(best, waves * rows * columns / speed)
        return max(2 * best * units * depth / rate, memory_s)

    def attention_s(
        self, flops: float, head_dim: float, span: float, *, kernel: str = "vendor"
    ) -> float:
        """Seconds of a flash kernel; short heads and short sequences fill its tiles badly."""
        fill = float(min(1.0, (head_dim / 128) ** 0.35) * span / (span + 64))
        rate = self.flash_flops_s * self.flash_kernels[kernel]
        return flops / (rate * fill)

    def batched_s(self, flops: float, head_dim: int) -> float:
        """Seconds of batched attention matmuls; a head size off the 16-byte grid is slow."""
        rate = self.batched_flops_s * float(min(1.0, (head_dim / 128) ** 0.35))
        return flops / (rate * (self.constants["misaligned"] if head_dim % 8 else 1.0))

    def pass_s(self, num_bytes: float) -> float:
        """Seconds of reading or writing so many bytes of device memory."""
        return num_bytes / self.memory_bytes_s


def _interpolate(curve: list[tuple[float, float]], x: float) -> float:
    """Linear between points over the logarithm of x, constant outside."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if x <= right:
            share = math.log(x / left) / math.log(right / left) if right > left else 1.0
            return low + (high - low) * share
    return curve[-1][1]
