"""Two racks on one machine: network namespaces of four workers' room each, and a slow link.

A namespace has interfaces, addresses and sockets of its own, so processes in two of them meet over
the network only, as two hosts would. The link between is a pair of virtual interfaces whose both
ends send no faster than asked (a token bucket). Making them takes root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Racks:
    """Two namespaces that see each other."""

    names: tuple[str, str]
    "of the namespaces, as `ip netns exec` takes them"
    address: str
    "of the first rack, seen from both"
    ends: tuple[str, str]
    "interfaces of the link, one in each rack"

    def inside(self, rack: int, command: list[str]) -> list[str]:
        """The command line that runs `command` in a rack."""
        return ["ip", "netns", "exec", self.names[rack], *command]

    def bytes_sent(self) -> int:
        """Bytes both ends of the link have sent so far, headers included, by the kernel's count."""
        total = 0
        for name, end in zip(self.names, self.ends, strict=True):
            path = f"/sys/class/net/{end}/statistics/tx_bytes"
            total += int(_run("ip", "netns", "exec", name, "cat", path))
        return total


def why_not() -> str:
    """What is missing here; empty if racks can be made."""
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (package iproute2) are not installed"
    trial = f"rpt{os.getpid()}"
    try:
        _run("ip", "netns", "add", trial)
    except RuntimeError as error:
        return f"this kernel makes no network namespaces ({error})"
    _run("ip", "netns", "del", trial)
    return ""


@contextmanager
def two_racks(*, rate_mbit: float) -> Iterator[Racks]:
    """Make them, and take them away again whatever happens.

    The link goes with the namespaces. Names carry this process's id, so that two of these can run
    at once and a stranger's namespaces are never touched.
    """
    names = (f"rpa{os.getpid()}", f"rpb{os.getpid()}")
    ends = (f"va{os.getpid()}", f"vb{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        _run("ip", "link", "add", ends[0], "netns", names[0], "type", "veth",
             "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            _run("ip", "-n", name, "addr", "add", f"10.87.0.{number}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", end, "up")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf",
                 "rate", f"{rate_mbit:g}mbit", "burst", "256kb", "latency", "200ms")  # fmt: skip
        yield Racks(names=names, address="10.87.0.1", ends=ends)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
