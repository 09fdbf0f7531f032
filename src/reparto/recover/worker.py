"""What a worker process does about signals and about its supervisor. No torch.

A worker leaves when its supervisor is gone: the kernel sends it a signal then (Linux), so no worker
lives on under process 1 holding memory. A stop asked by SIGTERM or SIGINT is only noted; the loop
tells the other ranks in the step's word, and all stop after the same step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1


def leave_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the process that started us is gone.

    `parent` is the id of the supervisor; if it is gone already, leave at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(4)


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
