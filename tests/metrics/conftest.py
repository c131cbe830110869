"""Puts the scheduler's tests on the path: ``world`` and ``simulation`` drive real schedulers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "sched"))
