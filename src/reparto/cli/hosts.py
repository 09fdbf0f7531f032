"""`reparto train --nodes N --node-rank R --rendezvous HOST:PORT`: one command on each host.

Node 0 checks the run, prepares the data and makes the run folder, which all hosts must see; then
every node starts its own workers. A fault on any host ends the run on all of them, because the
collectives break; it is taken up again by the same commands with --resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from reparto.cli.train import check_run, set_up, watch
from reparto.comm.backend import client_store, server_store
from reparto.config.run import Run
from reparto.errors import Fault, UserError
from reparto.recover.nodes import Nodes, claim_seat, knock, listen, local_interface, resolve
from reparto.recover.nodes import roll_call as call_roll

#: seconds that node 0 may take to prepare the data
_PREPARE_S = 600.0


def train_on_hosts(
    run: Run, path: Path, nodes: Nodes, *, stop_after: int | None, resume: bool, out: Console
) -> Mapping[str, object] | None:
    """This host's part; returns the result on node 0, None elsewhere."""
    world = run.partition.world_size
    if world % nodes.count:
        raise UserError(
            f"{world} ranks cannot be shared by {nodes.count} hosts alike",
            where="--nodes",
            legal=f"a divisor of {world}",
        )
    check_run(run)
    address = resolve(nodes)
    timeout_s = run.communicate.timeout_s
    if nodes.rank == 0:
        store = server_store(listen(nodes, address), address, timeout_s=_PREPARE_S)
    else:
        knock(nodes, address, timeout_s=timeout_s, tell=out.print)
        store = client_store(address, nodes.port, prefix="", timeout_s=_PREPARE_S)
    claim_seat(store, nodes)
    interface, _ = local_interface(address, nodes.port)
    if nodes.rank == 0:
        out.print(
            f"meeting at {address}:{nodes.port}: the store there is not authenticated, so this "
            "network must be trusted",
            style="yellow",
        )
        call_roll(store, nodes, timeout_s=timeout_s, tell=out.print)
        start = dict(
            set_up(run, path, stop_after=stop_after, resume=resume, out=out,
                   local_world_size=world // nodes.count)
        )  # fmt: skip
        start["store"] = [address, nodes.port]
        (path / "control" / "start.json").write_text(json.dumps(start))
        (path / "control" / "generation").write_text("1")
        store.set("start", json.dumps(start).encode())
    else:
        start = json.loads(store.get("start"))
        if not (path / "control" / "start.json").is_file():
            raise UserError(
                f"{path} is not the folder that node 0 made",
                where="--run-dir",
                legal="the same folder on all hosts, on a shared file system",
            )
    outcome, _ = watch(
        run, path, start, stop_after=stop_after, interface=interface, node=nodes.rank,
        nodes=nodes.count, store=store, out=out if nodes.rank == 0 else Console(quiet=True),
    )  # fmt: skip
    if not outcome.ok:
        cause = outcome.failures[0]
        raise Fault(
            f"node {nodes.rank}: rank {cause.rank}, step {cause.step}, {cause.doing}: "
            f"{cause.message}\n  next: the same commands on all hosts with --resume"
        )
    if nodes.rank != 0:
        out.print(f"node {nodes.rank}: done")
        return None
    found: Mapping[str, object] = json.loads((path / "control" / "result.json").read_text())
    return found
