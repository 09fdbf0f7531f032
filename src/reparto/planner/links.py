"""Seconds of a collective on a hierarchy of links.

A group of n ranks, `stride` apart, has some members inside each tier. A ring passes every byte
through every tier, so the slowest tier sets its pace; members inside one node share that node's
network cards, and ranks of the node that are in *other* groups of the same axis use them at the
same time. So a group with L members in a node has L shares of its network, no more:

    bandwidth of a tier = gb_s x members inside the tier below
    seconds = steps x latency + wire bytes / slowest bandwidth

Every collective also costs `start_us`: launching it and waiting for the last rank to arrive.
Bytes come from `partition/volume.py`. Source of the ring and its latency: Thakur 2005, section 4;
a hierarchy whose inside is much faster costs what the outer ring costs, which is this formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from reparto.config.cluster import Cluster, CollectiveCurve
from reparto.partition.volume import Operation, wire_bytes
from reparto.planner.constants import Constants


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that differ along one axis: how many, and how far apart neighbours are."""

    size: int
    "members"
    stride: int
    "distance between neighbouring members, in ranks"

    @property
    def span(self) -> int:
        """Neighbouring ranks that cover the whole group."""
        return (self.size - 1) * self.stride + 1


class Links:
    """The links of one cluster under one set of constants."""

    def __init__(self, cluster: Cluster, constants: Constants) -> None:
        self.tiers = cluster.tiers
        self.constants = constants
        self.shares = [
            constants["node_link"] if index == 0 else constants["network_link"]
            for index in range(len(cluster.tiers))
        ]
        measured = cluster.measured
        self.curves: tuple[CollectiveCurve, ...] = measured.collectives if measured else ()

    def members(self, group: Group, tier: int) -> int:
        """Members of the group inside one unit of a tier."""
        return max(1, min(group.size, self.tiers[tier].size // group.stride))

    def slowest(self, group: Group) -> tuple[float, float]:
        """(bytes a second, seconds of latency a step) that a ring of the group gets."""
        bandwidth = math.inf
        latency = 0.0
        below = 1
        for index, tier in enumerate(self.tiers):
            inside = self.members(group, index)
            if inside > below or (inside == 1 and index == len(self.tiers) - 1):
                bandwidth = min(bandwidth, tier.gb_s * 1e9 * below * self.shares[index])
                latency = max(latency, tier.latency_us * 1e-6)
            below = inside
            if inside == group.size:
                break
        return bandwidth, latency

    def collective_s(self, operation: Operation, payload_bytes: float, group: Group) -> float:
        """Seconds of one collective of the group, nothing else on its links."""
        n = group.size
        if n <= 1 or payload_bytes <= 0:
            return 0.0
        curve = self._curve(operation, n)
        if curve is not None:
            return _on_curve(curve.points, payload_bytes)
        if operation == "all_to_all":
            return self._all_to_all_s(payload_bytes, group)
        bandwidth, latency = self.slowest(group)
        steps = {"all_reduce": 2 * (n - 1), "broadcast": 1, "send": 1, "recv": 1}.get(
            operation, n - 1
        )
        # libraries change from ring to tree when the ring's steps would dominate
        steps = min(steps, 2 * math.ceil(math.log2(n)) + 2)
        wire = wire_bytes(operation, payload_bytes, n)
        if operation in ("send", "recv"):
            inside = group.span <= self.tiers[0].size
            bandwidth *= self.constants["message_node" if inside else "message_network"]
        return self.constants["start_us"] * 1e-6 + steps * latency + wire / bandwidth

    def dispatch_s(self, token_bytes: float, copies: int, group: Group) -> float:
        """Tokens to the ranks of their experts: a token crosses to a unit of a tier only once.

        token_bytes  one copy of every token of this rank
        copies       experts a token goes to, each on a random rank of the group

        Of `units` equal units, `copies` random choices meet units (1 - (1 - 1/units)^copies).
        Source: DeepSeek-V3, section 3.2.2 (node-limited routing is not assumed here).
        """
        n = group.size
        slowest = latency = 0.0
        below = 1
        for index, tier in enumerate(self.tiers):
            inside = self.members(group, index)
            if inside > below:
                units = n / below
                met = units * (1 - (1 - 1 / units) ** copies) * (1 - 1 / units)
                rate = tier.gb_s * 1e9 * self.shares[index]
                slowest = max(slowest, token_bytes * met / rate)
                latency = tier.latency_us * 1e-6
            below = inside
        return slowest + latency * min(n - 1, 16)

    def _all_to_all_s(self, payload_bytes: float, group: Group) -> float:
        """Each tier carries what leaves the tier below; tiers work at the same time."""
        n = group.size
        slowest = 0.0
        below = 1
        latency = 0.0
        for index, tier in enumerate(self.tiers):
            inside = self.members(group, index)
            if inside > below:
                leaving = payload_bytes * (n - below) / n
                slowest = max(slowest, leaving / (tier.gb_s * 1e9 * self.shares[index]))
                latency = tier.latency_us * 1e-6
            below = inside
        return slowest + latency * min(n - 1, 16)

    def _curve(self, operation: str, size: int) -> CollectiveCurve | None:
        fitting = [curve for curve in self.curves if curve.operation == operation]
        return min(fitting, key=lambda curve: abs(curve.group_size - size)) if fitting else None


def _on_curve(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Log-log between points; below the first its time, above the last at the last rate."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            share = math.log(x / left) / math.log(right / left)
            return float(low * (high / low) ** share)
    last, seconds = points[-1]
    return seconds * x / last
