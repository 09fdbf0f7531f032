"""Real processes that stay for the whole session and do the cases they are told to, over gloo or
through the memory of this host.

Importing torch costs seconds, so one process imports it once and forks a worker for every rank,
before anything of torch has been used. Each worker talks over a socket pair in lines of JSON; they
meet over a FileStore, so nothing listens but gloo itself, on the loopback address. Every answer has
a time limit. At the end workers leave when their socket closes, and who does not is killed by id.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import psutil

START_S, ANSWER_S, GLOO_S, LATE_S = 120.0, 60.0, 30.0, 4.0


class Pool:
    """`world_size` processes, one a rank."""

    def __init__(self, world_size: int, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._log = folder / "workers.log"
        pairs = [socket.socketpair() for _ in range(world_size)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        with open(self._log, "w") as log:
            self._parent = subprocess.Popen(
                [sys.executable, __file__, str(folder / "store"), *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=log,  # gloo greets on stdout
                stderr=log,
                env=environment,
            )
        self._sockets: list[socket.socket] = []
        self._lines: list[TextIO] = []
        self._pids: list[int] = []
        for ours, theirs in pairs:
            theirs.close()
            self._sockets.append(ours)
            self._lines.append(ours.makefile("rw"))
        self._pids = [int(str(pid)) for pid in self._gather(START_S)]

    def run(self, case: str, *, over: str = "gloo", **arguments: object) -> list[object]:
        """Do a case of `collective_cases.py` on every rank; their values in rank order.

        over  `gloo` or `shared`, the memory of this host
        """
        for line in self._lines:
            line.write(json.dumps({"case": case, "over": over, "arguments": arguments}) + "\n")
            line.flush()
        return self._gather(ANSWER_S)

    def _gather(self, limit_s: float) -> list[object]:
        answers: list[dict[str, object]] = []
        for rank, (one, lines) in enumerate(zip(self._sockets, self._lines, strict=True)):
            one.settimeout(limit_s)
            try:
                text = lines.readline()
            except OSError:  # a time-out too
                text = ""
            if not text:
                self.close(grace_s=0.5)
                raise AssertionError(
                    f"rank {rank} gave no answer; last words:\n{self._log.read_text()[-3000:]}"
                )
            answers.append(json.loads(text))
        errors = [f"rank {r}: {one['error']}" for r, one in enumerate(answers) if "error" in one]
        assert not errors, "\n".join(errors)
        return [one["value"] for one in answers]

    def close(self, grace_s: float = 20.0) -> None:
        """End all workers: asked first, then killed, each by its own id."""
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the worker has gone already
            finally:
                one.close()
        try:
            self._parent.wait(grace_s)
        except subprocess.TimeoutExpired:
            for pid in self._pids:
                if psutil.pid_exists(pid) and psutil.Process(pid).ppid() == self._parent.pid:
                    psutil.Process(pid).kill()
            self._parent.kill()
            self._parent.wait(10)


def serve(rank: int, world_size: int, store_path: str, descriptor: int) -> None:
    """One worker: joins, then does one case a line until its socket closes."""
    from collective_cases import CASES, PLAN, Place

    from reparto.comm.backend import file_store, start_process_group
    from reparto.comm.mesh import SignatureCheck, torch_mesh
    from reparto.comm.shared import Host
    from reparto.config.plan import Plan
    from reparto.partition.grid import Grid
    from reparto.trace import Ring

    store = file_store(store_path, world_size)
    start_process_group(
        backend="gloo", rank=rank, world_size=world_size, store=store, timeout_s=GLOO_S
    )
    ring = Ring(None, rank=rank, capacity=1024)
    grid = Grid.of(Plan.parse(PLAN))
    host = Host(file_store(store_path + "-host", world_size), rank=rank, world_size=world_size,
                timeout_s=GLOO_S)  # fmt: skip
    assert host.shares(range(world_size))

    def new_check(generation: int) -> SignatureCheck:
        impatient = file_store(f"{store_path}-{generation}", world_size)
        impatient.set_timeout(timedelta(seconds=LATE_S))
        return SignatureCheck(impatient, ring=ring, generation=generation)

    def place(over: str, host: Host | None) -> Place:
        signatures = file_store(f"{store_path}-signatures-{over}", world_size)
        check = SignatureCheck(signatures, ring=ring, generation=1)
        mesh = torch_mesh(grid, rank, ring=ring, timeout_s=GLOO_S, host=host)
        if host is not None:  # a second mesh needs mail of its own
            host = Host(file_store(store_path + "-checked", world_size), rank=rank,
                        world_size=world_size, timeout_s=GLOO_S)  # fmt: skip
        checked = torch_mesh(
            grid, rank, ring=ring, timeout_s=GLOO_S, check=check, purposes=("world", "shard"),
            host=host,
        )  # fmt: skip
        return Place(
            mesh=mesh,
            checked={"world": checked.world, "shard": checked.group("shard")},
            new_check=new_check,
        )

    places = {"gloo": place("gloo", None), "shared": place("shared", host)}
    with socket.socket(fileno=descriptor) as mine, mine.makefile("rw") as lines:

        def say(answer: object) -> None:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

        say({"value": os.getpid()})
        for line in lines:
            told = json.loads(line)
            try:
                say({"value": CASES[told["case"]](places[told["over"]], **told["arguments"])})
            except Exception as error:
                traceback.print_exc()
                say({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Import once, fork a worker a rank, and stay until all have left."""
    store_path, *told = sys.argv[1:]
    descriptors = [int(one) for one in told]

    import torch

    import reparto.comm.mesh  # noqa: F401  before the fork, so that it happens once

    torch.set_num_threads(1)
    for rank, descriptor in enumerate(descriptors):
        if os.fork() == 0:
            for other in descriptors:
                if other != descriptor:
                    os.close(other)
            try:
                serve(rank, len(descriptors), store_path, descriptor)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # peers may have left already: nothing is taken leave of
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in descriptors:
        os.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
