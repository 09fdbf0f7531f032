"""What a worker process does about signals, its supervisor and its memory. No torch.

A worker leaves when its supervisor is gone: the kernel sends it a signal then (Linux), so no worker
lives on under process 1 holding memory. A stop asked by SIGTERM or SIGINT is only noted; the loop
tells the other ranks in the step's word, and all stop after the same step.

A memory limit is RLIMIT_DATA: what the kernel counts is private writable memory (heap, weights,
stacks of threads), whether touched or not. RLIMIT_AS was rejected because it also counts program
text and the memory that workers share for messages, some of it once for every neighbour; a control
group counts best of all, but making one takes rights that few users have.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from types import FrameType

from reparto.errors import UserError
from reparto.units import human_bytes

_PR_SET_PDEATHSIG = 1


def leave_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the process that started us is gone.

    `parent` is the id of the supervisor; if it is gone already, leave at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(4)


def limit_memory(num_bytes: int) -> None:
    """Let this process have so much private memory and no more; 0 leaves it as it is.

    Raises `UserError` where the limit cannot be enforced.
    """
    if not num_bytes:
        return
    if sys.platform != "linux":
        raise UserError(
            "only Linux counts all private memory of a process against a limit",
            where="compute.memory_gb",
            legal="0",
            nearest="0",
        )
    held = memory_held()
    if held >= num_bytes:
        raise UserError(
            f"python and torch alone take {human_bytes(held)} of a worker, which may have "
            f"{human_bytes(num_bytes)}",
            where="compute.memory_gb",
            legal=f"more than {held / (1 << 30):.2f} GiB, and the training on top",
            nearest=f"{2 * held / (1 << 30):.1f}",
        )
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, most))


def memory_limit() -> int:
    """Bytes of private memory this process may have; 0: no limit."""
    found, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return 0 if found == resource.RLIM_INFINITY else found


def memory_held() -> int:
    """Bytes that count against the limit now; 0 where the system does not tell."""
    return _status_bytes().get("VmData", 0)


def memory_peak() -> int:
    """Most bytes of private memory this process has had in use.

    The kernel keeps the peak of all resident memory only; what is mapped from files and shared with
    other workers now is taken off. Without /proc nothing can be taken off.
    """
    status = _status_bytes()
    if "VmHWM" not in status:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return status["VmHWM"] - status.get("RssFile", 0) - status.get("RssShmem", 0)


def _status_bytes() -> dict[str, int]:
    """Lines of /proc/self/status that are sizes."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in pairs}


class StopRequest:
    """True once a signal has asked this process to stop."""

    def __init__(self) -> None:
        self.asked = False
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def close(self) -> None:
        """The work is done: a signal must not turn a good end into a bad one any more."""
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)

    def __call__(self) -> bool:
        return self.asked
