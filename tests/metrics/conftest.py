"""Put this folder and the scheduler's tests on the path: ``world`` and ``simulation`` drive real
schedulers."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "sched")]
