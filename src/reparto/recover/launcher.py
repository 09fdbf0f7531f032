"""Which launcher started this process, and which rank it gave it. The environment is read here.

| launcher | told by | where ranks meet |
|---|---|---|
| torchrun | RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT | the store that torchrun listens with |
| Open MPI | OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE | a file in the run folder |
| Slurm | SLURM_PROCID, SLURM_NTASKS, SLURM_STEP_ID | a file in the run folder |

Under a launcher reparto joins and starts no processes; the launcher sees exit statuses and restarts
by them. Open MPI and Slurm give no store, so ranks meet through the run folder, which all must see;
that opens no listener.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from reparto.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What a launcher said about this process."""

    launcher: str
    "torchrun, mpirun or srun"
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    "ranks on this host"
    job: str
    "the same word on all ranks of one launch, another one at the next"
    store: tuple[str, int] | None
    "address of a store that already listens; None: meet through the run folder"


def joined(environment: Mapping[str, str] = os.environ) -> Joined | None:
    """The launcher of this process; None if a person started it. Raises `UserError` if garbled."""
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= environment.keys():
        return _torchrun(environment)
    if "OMPI_COMM_WORLD_SIZE" in environment:
        size = _number(environment, "OMPI_COMM_WORLD_SIZE")
        return Joined(
            launcher="mpirun",
            rank=_number(environment, "OMPI_COMM_WORLD_RANK"),
            world_size=size,
            local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
            local_world_size=_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", size),
            job=_word(environment.get("PMIX_NAMESPACE") or f"mpi-{os.getppid()}"),
            store=None,
        )
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        size = _number(environment, "SLURM_NTASKS", _number(environment, "SLURM_STEP_NUM_TASKS", 1))
        return Joined(
            launcher="srun",
            rank=_number(environment, "SLURM_PROCID"),
            world_size=size,
            local_rank=_number(environment, "SLURM_LOCALID", 0),
            local_world_size=_slurm_local(environment, size),
            job=_word(f"{environment.get('SLURM_JOB_ID', '0')}.{environment['SLURM_STEP_ID']}"),
            store=None,
        )
    return None


def _torchrun(environment: Mapping[str, str]) -> Joined:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise UserError(
                f"RANK and WORLD_SIZE are set, but {name} is not",
                where="environment",
                legal="all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (torchrun), or none",
                nearest="unset RANK WORLD_SIZE",
            )
    size = _number(environment, "WORLD_SIZE")
    address, port = environment["MASTER_ADDR"], _number(environment, "MASTER_PORT")
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Joined(
        launcher="torchrun",
        rank=_number(environment, "RANK"),
        world_size=size,
        local_rank=_number(environment, "LOCAL_RANK", 0),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", size),
        job=_word(f"{environment.get('TORCHELASTIC_RUN_ID', 'none')}-{port}-{restarts}"),
        store=(address, port),
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdigit():
        raise UserError(f"{name} is {text!r}", where="environment", legal="a whole number")
    return int(text)


def _slurm_local(environment: Mapping[str, str], size: int) -> int:
    """`2(x3),1` -> tasks of the first node; close enough for the number of threads."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    first = text.split(",")[0].split("(")[0]
    return int(first) if first.isdigit() else size


def _word(text: str) -> str:
    return "".join(one if one.isalnum() or one in "._-" else "-" for one in text)[:60]
