"""One worker process of a run: joins the others, trains its part, leaves its records.

Started by the supervisor as `python -m reparto.cli.worker RUN_DIR`; everything else it needs stands
in RUN_DIR/control/start.json and in RANK and WORLD_SIZE. Rank 0 is the one writer of metrics,
ledger and result.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from reparto.cli.rundir import write_private
from reparto.errors import PeerLost, RepartoError, UserError
from reparto.recover.nodes import placed_rank
from reparto.recover.worker import (
    StopRequest,
    leave_with_parent,
    limit_memory,
    memory_held,
    memory_limit,
    memory_peak,
)
from reparto.units import human_bytes

if TYPE_CHECKING:
    from reparto.comm.backend import Store


#: how torch, the C++ library and Python's threads say that the kernel gave no memory
_NO_MEMORY = ("can't allocate memory", "bad_alloc", "Cannot allocate memory")


def main() -> None:
    """Run as a worker; the exit status is that of the error, if any."""
    run_dir = Path(sys.argv[1])
    control = run_dir / "control"
    world_size = int(os.environ["WORLD_SIZE"])
    rank = placed_rank(
        int(os.environ["RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        nodes=world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        placement=os.environ["REPARTO_PLACEMENT"],
    )
    start = json.loads((control / "start.json").read_text(encoding="utf-8"))
    leave_with_parent(_supervisor(start))
    os.umask(0o077)
    write_private(control / f"rank-{rank}.pid", str(os.getpid()))
    stop = StopRequest()
    try:
        work(run_dir, start, rank, world_size, stop, store=_shared_store(start))
        stop.close()
    except BaseException as error:
        last_words(control, rank, error)
        # other threads may wait for peers that are gone: leave without them
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(error.exit_code if isinstance(error, RepartoError) else 4)


def _supervisor(start: Mapping[str, object]) -> int:
    """Process id of this host's supervisor, which has started us."""
    several = os.environ.get("REPARTO_SUPERVISOR")
    return int(several or str(start["supervisor_pid"]))


def _shared_store(start: Mapping[str, object]) -> Store | None:
    """The store that several hosts share; None on one host."""
    address = start.get("store")
    if not isinstance(address, list):
        return None
    from reparto.comm.backend import client_store

    return client_store(str(address[0]), int(address[1]), prefix="workers", timeout_s=120.0)


def last_words(control: Path, rank: int, error: BaseException) -> None:
    from reparto.recover.supervise import write_error

    traceback.print_exc()
    text = _words(error)
    where: Mapping[str, str] = error.as_dict() if isinstance(error, UserError) else {}
    write_error(
        control,
        rank,
        {
            "kind": type(error).__name__,
            "message": text,
            "exit_code": error.exit_code if isinstance(error, RepartoError) else 4,
            "secondary": isinstance(error, PeerLost),
            "where": where,
        },
    )


def _words(error: BaseException) -> str:
    if isinstance(error, RepartoError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or any(one in text for one in _NO_MEMORY):
        limit, held = memory_limit(), max(memory_held(), memory_peak())
        if limit:
            return (
                f"the memory limit of this worker ({human_bytes(limit)}, compute.memory_gb) is "
                f"reached: it held up to {human_bytes(held)} and asked for more "
                f"({text.splitlines()[0]}); shard more (shard=parameters), cut more (tensor, "
                "pipeline), use more microbatches (num_microbatches) or recompute=full"
            )
        return (
            f"out of memory ({text.splitlines()[0]}); shard more (shard=parameters), use more "
            "microbatches (num_microbatches) or recompute=full"
        )
    return text


def work(
    run_dir: Path,
    start: Mapping[str, object],
    rank: int,
    world_size: int,
    stop: StopRequest,
    *,
    store: Store | None = None,
) -> None:
    """Everything between joining and leaving. `store` is a launcher's; else a file of our own."""
    import torch

    from reparto.cli.workroom import Room
    from reparto.comm.backend import file_store, finish_process_group
    from reparto.comm.mesh import SignatureCheck, join_mesh
    from reparto.config.run import read_run
    from reparto.data.prepared import open_prepared
    from reparto.partition.grid import Grid
    from reparto.trace import Ring, chrome_trace

    run = read_run(run_dir / "run.toml")
    limit_memory(run.compute.memory_bytes)
    control = run_dir / "control"
    torch.set_num_threads(int(str(start["threads"])))
    generation = int((control / "generation").read_text())
    if store is None:
        store = file_store(str(control / f"generation-{generation}" / "workers"), world_size)
    ring = Ring(control / f"rank-{rank}.ring", rank=rank)
    check = None
    if run.communicate.check == "collective":
        check = SignatureCheck(store, ring=ring, generation=generation)
    mesh = join_mesh(
        Grid.of(run.partition),
        rank,
        backend=run.communicate.backend,
        store=store,
        ring=ring,
        timeout_s=run.communicate.timeout_s,
        check=check,
    )
    prepared = open_prepared(Path(str(start["prepared"])))
    room = Room(run_dir=run_dir, run=run, mesh=mesh, prepared=prepared, start=start)
    began = time.monotonic()
    room.train(stop)
    (run_dir / "trace").mkdir(mode=0o700, exist_ok=True)
    write_private(run_dir / "trace" / f"rank-{rank}.json", chrome_trace(ring.records(), rank=rank))
    mesh.world.barrier(tag="end").wait()
    room.finish(time.monotonic() - began)
    ring.close()
    finish_process_group()


if __name__ == "__main__":
    main()
