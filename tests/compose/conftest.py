"""The harness of the oracle tests serves this folder too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
