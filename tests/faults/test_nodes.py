"""Several hosts: what is wrong with a rendezvous is told apart, and two real hosts train as one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.runs import RUN, losses, reparto

from reparto.comm.backend import client_store, server_store
from reparto.errors import Fault, UserError
from reparto.recover.nodes import (
    Nodes,
    claim_seat,
    knock,
    listen,
    local_interface,
    resolve,
    roll_call,
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _nodes(rank: int = 0, host: str = "127.0.0.1", count: int = 2) -> Nodes:
    return Nodes(count=count, rank=rank, host=host, port=_free_port())


@pytest.mark.parametrize(
    ("nodes", "rank", "rendezvous", "where"),
    [
        (2, None, "a:1", "--node-rank"),
        (2, 2, "a:1", "--node-rank"),
        (2, 0, None, "--rendezvous"),
        (2, 0, "host", "--rendezvous"),
        (2, 0, "host:port", "--rendezvous"),
        (2, 0, "host:70000", "--rendezvous"),
        (0, 0, "a:1", "--nodes"),
    ],
)
def test_incomplete_options_are_refused(
    nodes: int, rank: int | None, rendezvous: str | None, where: str
) -> None:
    with pytest.raises(UserError) as caught:
        Nodes.parse(nodes, rank, rendezvous)
    assert caught.value.where == where


def test_one_host_needs_nothing() -> None:
    assert Nodes.parse(1, None, None) is None


def test_a_wrong_name_and_a_silent_host_are_told_apart() -> None:
    with pytest.raises(UserError, match="cannot be resolved"):
        resolve(_nodes(host="no-such-host.invalid"))
    silent = _nodes(rank=1)
    with pytest.raises(Fault, match=r"resolves to 127\.0\.0\.1, but nothing listens"):
        knock(silent, "127.0.0.1", timeout_s=0.5, tell=lambda words: None)


def test_a_public_address_is_refused() -> None:
    with pytest.raises(UserError, match="public address"):
        resolve(_nodes(host="8.8.8.8"))


def test_the_store_listens_on_the_named_address_only() -> None:
    nodes = _nodes()
    store = server_store(listen(nodes, "127.0.0.1"), "127.0.0.1", timeout_s=5)
    store.set("key", b"value")  # type: ignore[arg-type]
    with socket.socket() as other:
        other.settimeout(1)
        mine = local_interface("10.255.255.254", 9)[1] if _has_route() else None
        if mine is not None and mine != "127.0.0.1":
            with pytest.raises(OSError):
                other.connect((mine, nodes.port))
    with pytest.raises(UserError, match="cannot listen"):
        listen(nodes, "127.0.0.1")


def _has_route() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.254", 9))
        except OSError:
            return False
    return True


def test_two_nodes_with_one_rank_and_a_missing_node_are_named() -> None:
    nodes = _nodes()
    store = server_store(listen(nodes, "127.0.0.1"), "127.0.0.1", timeout_s=5)
    claim_seat(store, nodes)
    other = client_store("127.0.0.1", nodes.port, prefix="", timeout_s=5)
    with pytest.raises(UserError, match=f"node rank 0 is taken by .*process {os.getpid()}"):
        claim_seat(other, nodes)
    with pytest.raises(Fault, match="node 1 did not come"):
        roll_call(store, nodes, timeout_s=0.3, tell=lambda words: None)
    claim_seat(other, Nodes(count=2, rank=1, host=nodes.host, port=nodes.port))
    roll_call(store, nodes, timeout_s=5, tell=lambda words: None)


def _can_make_namespaces() -> str:
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (iproute2) are not installed"
    done = subprocess.run(["ip", "netns", "add", "rp-probe"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "rp-probe"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "this kernel makes no network namespaces"


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a link of 1 Gbit/s; gone afterwards."""
    why_not = _can_make_namespaces()
    if why_not:
        pytest.skip(why_not)
    names = [f"rp{os.getpid()}{side}" for side in "ab"]
    ends = [f"v{os.getpid() % 100000}{side}" for side in "ab"]

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            run("ip", "link", "set", end, "netns", name)
            run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", end, "up")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf",
                "rate", "1gbit", "burst", "1mb", "latency", "50ms")  # fmt: skip
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.slow
def test_two_hosts_train_as_one(two_hosts: tuple[str, str], tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN + "\n[compute]\nthreads = 1\n")
    alone = reparto("train", str(run_file), "--run-dir", str(tmp_path / "one"), cache=tmp_path)
    assert alone.returncode == 0, alone.stderr
    told: dict[int, subprocess.CompletedProcess[str]] = {}

    def host(rank: int) -> None:
        told[rank] = subprocess.run(
            ["ip", "netns", "exec", two_hosts[rank], sys.executable, "-m", "reparto", "train",
             str(run_file), "--run-dir", str(tmp_path / "two"), "--nodes", "2",
             "--node-rank", str(rank), "--rendezvous", "10.77.0.1:29555"],
            capture_output=True, text=True, timeout=240, check=False,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        )  # fmt: skip

    threads = [threading.Thread(target=host, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in (0, 1):
        assert told[rank].returncode == 0, told[rank].stderr
    assert "network must be trusted" in told[0].stderr
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
