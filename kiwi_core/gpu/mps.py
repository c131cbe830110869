"""NVIDIA's Multi-Process Service (MPS), as far as ``/proc`` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CONTROL: Final = "nvidia-cuda-mps"
"""``/proc/<pid>/comm`` of nvidia-cuda-mps-control and -server: the kernel keeps 15 characters."""

RUNS: Final = "NVIDIA's Multi-Process Service runs: the driver cannot checkpoint its clients."
REMEDY: Final = "Stop it: echo quit | nvidia-cuda-mps-control"


def runs(root: Path = Path("/")) -> bool:
    """Return whether an MPS daemon runs. ``root`` holds ``/proc``; tests pass another."""
    return _CONTROL in commands(root)


def commands(root: Path) -> set[str]:
    """Return the command names of the processes that this PID namespace shows."""
    return {_comm(path) for path in (root / "proc").glob("[0-9]*")}


def _comm(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""
