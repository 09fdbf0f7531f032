"""Several hosts: meeting at HOST:PORT, claiming a seat, and telling apart what can go wrong.

    node 0      binds HOST:PORT itself and hands the socket to torch's store, so the store listens
                on that address and no other
    other nodes resolve the name, try to connect, and only then let the store do it, because the
                store alone says "timed out" for a wrong name and for a silent host alike
    all         claim their seat with compare-and-set, so that two nodes with one rank are told so

The store carries group bootstrap and is not authenticated: whoever reaches HOST:PORT can disturb
the run. So it must be a trusted network, and the tool says that; a public address is refused unless
the user says he trusts it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from reparto.errors import Fault, UserError


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What the command line says about this host's place."""

    count: int
    rank: int
    host: str
    port: int

    @classmethod
    def parse(cls, nodes: int, node_rank: int | None, rendezvous: str | None) -> Nodes | None:
        """None for a run on one host. Raises `UserError` for anything incomplete."""
        if nodes == 1 and node_rank is None and rendezvous is None:
            return None
        if nodes < 1:
            raise UserError(f"{nodes} hosts", where="--nodes", legal=">= 1")
        if node_rank is None or not 0 <= node_rank < nodes:
            raise UserError(
                "is missing" if node_rank is None else f"{node_rank} of {nodes} hosts",
                where="--node-rank",
                legal=f"0 to {nodes - 1}",
            )
        host, colon, port = (rendezvous or "").rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(
                f"`{rendezvous}` is not HOST:PORT" if rendezvous else "is missing",
                where="--rendezvous",
                legal="name or address of host 0, and a free port of it, as 10.0.0.1:29500",
            )
        return cls(count=nodes, rank=node_rank, host=host, port=int(port))


def placed_rank(seat: int, *, local_world_size: int, nodes: int, placement: str) -> int:
    """The rank of a worker, by its seat (node x workers of a node + place on the node).

    block: the seat itself; cyclic: place on the node x nodes + node.
    """
    if placement == "block":
        return seat
    node, place = divmod(seat, local_world_size)
    return place * nodes + node


def resolve(nodes: Nodes) -> str:
    """The address of HOST. Raises `UserError` if the name is not known here."""
    try:
        found = socket.getaddrinfo(nodes.host, nodes.port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"the name `{nodes.host}` cannot be resolved here ({error.strerror})",
            where="--rendezvous",
            legal="a name this host knows, or an address",
        ) from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_global:
        raise UserError(
            f"`{nodes.host}` is the public address {address}; the store is not authenticated",
            where="--rendezvous",
            legal="a loopback or private address",
        )
    return address


def listen(nodes: Nodes, address: str) -> socket.socket:
    """Node 0's listening socket, on that address alone."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, nodes.port))
    except OSError as error:
        listener.close()
        mine = "is no address of this host" if error.errno == 99 else error.strerror
        raise UserError(
            f"cannot listen on {address}:{nodes.port}: {mine}{_holder(nodes.port)}",
            where="--rendezvous",
            legal="an address of host 0 and a free port",
        ) from error
    listener.listen(128)
    return listener


def _holder(port: int) -> str:
    for one in psutil.net_connections(kind="tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
            return f" (port {port} is held by process {one.pid})"
    return ""


def knock(nodes: Nodes, address: str, *, timeout_s: float, tell: Callable[[str], None]) -> None:
    """Other nodes: wait until something listens at HOST:PORT. Raises `Fault` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    told = time.monotonic() + 3.0
    while True:
        try:
            socket.create_connection((address, nodes.port), timeout=2.0).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise Fault(
                    f"node {nodes.rank}: {nodes.host} resolves to {address}, but nothing listens "
                    f"on port {nodes.port} after {timeout_s:.0f} s ({error.strerror or error}); "
                    "start node 0 first, or look at the route and the firewall"
                ) from error
            if time.monotonic() > told:
                tell(f"waiting for node 0 at {address}:{nodes.port}")
                told += 10.0
            time.sleep(0.2)


def local_interface(address: str, port: int) -> tuple[str, str]:
    """`(interface, own address)` by which this host reaches `address`."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect((address, port))
        mine = str(probe.getsockname()[0])
    finally:
        probe.close()
    for name, entries in psutil.net_if_addrs().items():
        if any(one.address == mine for one in entries):
            return name, mine
    raise Fault(f"no interface of this host has the address {mine}")


def claim_seat(store: object, nodes: Nodes) -> None:
    """Take this node's seat, once. Raises `UserError` if somebody else sits there."""
    mine = f"{socket.gethostname()} process {os.getpid()} {secrets.token_hex(4)}"
    seat = store.compare_set(f"seat/{nodes.rank}", "", mine)  # type: ignore[attr-defined]
    holder = seat.decode() if isinstance(seat, bytes) else str(seat)
    if holder != mine:
        raise UserError(
            f"node rank {nodes.rank} is taken by {' '.join(holder.split()[:-1])}",
            where="--node-rank",
            legal=f"another of 0 to {nodes.count - 1}, each once",
        )


def roll_call(
    store: object, nodes: Nodes, *, timeout_s: float, tell: Callable[[str], None]
) -> None:
    """Wait until every seat is taken. Raises `Fault` naming the nodes that did not come."""
    end = time.monotonic() + timeout_s
    told = time.monotonic() + 3.0
    while True:
        missing = [
            rank
            for rank in range(nodes.count)
            if not store.check([f"seat/{rank}"])  # type: ignore[attr-defined]
        ]
        if not missing:
            return
        names = ", ".join(map(str, missing))
        if time.monotonic() > end:
            raise Fault(f"node {names} did not come within {timeout_s:.0f} s; nothing was started")
        if time.monotonic() > told:
            tell(f"missing: node {names}")
            told += 10.0
        time.sleep(0.1)
