"""Plan, run, measure and recover distributed training. See docs/READING.md for a reading order."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reparto.api.launch import launch
    from reparto.api.session import Session
    from reparto.config.model import ModelConfig
    from reparto.config.plan import Plan
    from reparto.config.run import Run, Synchronize
    from reparto.errors import CheckFailed, Fault, UserError
    from reparto.parallel.compose import Parallel
    from reparto.train.step import Trainer

__all__ = [
    "CheckFailed",
    "Fault",
    "ModelConfig",
    "Parallel",
    "Plan",
    "Run",
    "Session",
    "Synchronize",
    "Trainer",
    "UserError",
    "launch",
]

_HOME = {
    "CheckFailed": "reparto.errors",
    "Fault": "reparto.errors",
    "UserError": "reparto.errors",
    "ModelConfig": "reparto.config.model",
    "Plan": "reparto.config.plan",
    "Run": "reparto.config.run",
    "Session": "reparto.api.session",
    "Synchronize": "reparto.config.run",
    "launch": "reparto.api.launch",
    "Parallel": "reparto.parallel.compose",
    "Trainer": "reparto.train.step",
}


def __getattr__(name: str) -> object:
    """Imported when asked for, so that the command line starts without torch."""
    if name not in _HOME:
        raise AttributeError(f"module `reparto` has no attribute `{name}`")
    return getattr(import_module(_HOME[name]), name)
