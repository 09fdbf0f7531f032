"""Starting workers on this host, watching them, and saying what happened to them.

TorchElastic's `LocalElasticAgent` starts and ends the processes. It is given a rendezvous of our
own, a FileStore in the run folder, one for each generation, so nothing listens: the usual launch
call opens a store on every interface even for one host and a loopback address.

The agent runs in a side thread; the main thread stays free for signals and for showing progress. A
stop is a SIGTERM to every worker, which ends its step, agrees with the others, saves and leaves.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from reparto.recover.detect import Outcome, describe
from reparto.recover.nodes import placed_rank
from reparto.trace import read_ring

#: seconds a worker has after SIGTERM when the others have failed; then SIGKILL
_GRACE_S = 4


class HostRendezvous(RendezvousHandler):
    """One host, one agent: each generation gets a fresh file as its store."""

    def __init__(
        self, control: Path, run_id: str, *, node: int = 0, nodes: int = 1, store: object = None
    ) -> None:
        """`store` is the one that several hosts share; one host needs none."""
        self._control = control
        self._run_id = run_id
        self._node, self._nodes, self._store = node, nodes, store
        earlier = [int(one.name.split("-")[1]) for one in control.glob("generation-*")]
        self._generation = max(earlier, default=0)  # a resume never meets keys of an earlier life
        self._closed = False

    def get_backend(self) -> str:
        return "reparto-file"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        # workers find their own store by the generation; this address is never bound or dialled
        nowhere = RendezvousStoreInfo(master_addr="127.0.0.1", master_port=1)
        self._generation += 1
        if self._store is not None:
            shared = dist.PrefixStore("agents", self._store)  # type: ignore[attr-defined, arg-type]
            return RendezvousInfo(shared, self._node, self._nodes, nowhere)
        folder = self._control / f"generation-{self._generation}"
        folder.mkdir(mode=0o700)
        store = dist.FileStore(str(folder / "agent"), 1)  # type: ignore[attr-defined]
        (self._control / "generation").write_text(str(self._generation))
        return RendezvousInfo(store, 0, 1, nowhere)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


class Supervisor:
    """The workers of one run on this host."""

    def __init__(
        self,
        run_dir: Path,
        *,
        world_size: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        node: int = 0,
        nodes: int = 1,
        store: object = None,
        placement: str = "block",
    ) -> None:
        """`arguments` follow the Python executable; `environment` is added to this process's.

        world_size  workers of the whole run, over all hosts
        node        this host's number of `nodes`, which share `store`
        placement   how ranks are dealt out to hosts (`nodes.placed_rank`)
        """
        self._control = run_dir / "control"
        self._world_size, self._nodes, self._placement = world_size, nodes, placement
        _quiet()
        os.environ.update(environment)  # the agent hands its own environment on
        os.environ.pop("TORCHELASTIC_HEALTH_CHECK_PORT", None)  # or the agent would listen
        spec = WorkerSpec(
            role="worker",
            local_world_size=world_size // nodes,
            entrypoint=sys.executable,
            args=tuple(arguments),
            rdzv_handler=HostRendezvous(
                self._control, run_dir.name, node=node, nodes=nodes, store=store
            ),
            max_restarts=0,
            monitor_interval=0.1,
            master_addr="127.0.0.1",
            master_port=1,
        )
        logs = DefaultLogsSpecs(log_dir=str(run_dir / "logs"), redirects=Std.ALL)
        self._agent = LocalElasticAgent(
            spec, logs, exit_barrier_timeout=5, shutdown_timeout=_GRACE_S
        )
        self._asked: set[int] = set()
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="reparto-agent", daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._agent.run()
        except BaseException as error:
            self._error = error

    def start(self) -> None:
        """Start the workers; returns at once."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Return when the workers have ended, or after `seconds`."""
        self._thread.join(seconds)

    def worker_pids(self) -> dict[int, int]:
        """rank -> process id, of workers that have come far enough to say so and still live."""
        found: dict[int, int] = {}
        for path in self._control.glob("rank-*.pid"):
            rank, pid = int(path.stem.removeprefix("rank-")), int(path.read_text() or 0)
            try:
                process = psutil.Process(pid)
                if process.ppid() == os.getpid():
                    found[rank] = pid
            except psutil.NoSuchProcess:
                continue
        return found

    def ask_to_stop(self) -> None:
        """Every worker ends its step, saves and leaves. Each is told once, however often called:
        a second signal could meet an interpreter that is on its way out and has no handler."""
        fresh = set(self.worker_pids().values()) - self._asked
        self._asked |= fresh
        self._signal(fresh, signal.SIGTERM)

    def kill(self) -> None:
        """Every worker ends now."""
        self._signal(self.worker_pids().values(), signal.SIGKILL)

    def _signal(self, pids: Iterable[int], which: signal.Signals) -> None:
        for pid in pids:
            try:
                os.kill(pid, which)
            except ProcessLookupError:
                continue

    def outcome(self) -> Outcome:
        """What happened, once `alive` is False: the cause first, its consequences after it."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        if not self._result.is_failed():
            return Outcome(failures=())
        exits = {  # the agent counts seats
            placed_rank(
                seat,
                local_world_size=self._world_size // self._nodes,
                nodes=self._nodes,
                placement=self._placement,
            ): one.exitcode
            for seat, one in self._result.failures.items()
        }
        errors = {}
        for rank in range(self._world_size):
            path = self._control / f"error-{rank}.json"
            if path.exists():
                errors[rank] = json.loads(path.read_text())
        rings = {}
        for rank in range(self._world_size):
            path = self._control / f"rank-{rank}.ring"
            if path.exists():
                rings[rank] = read_ring(path)
        return Outcome(failures=describe(exits, errors, rings))


def _quiet() -> None:
    """What the agent would print, we say ourselves, once and with the cause first."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def write_error(control: Path, rank: int, body: Mapping[str, object]) -> None:
    """A worker's last words, for the supervisor. Whole or not at all."""
    path = control / f"error-{rank}.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({**body, "time_s": time.monotonic()}))
    os.replace(fresh, path)
