"""The kernel module of NVIDIA's driver, as its text in ``/proc`` describes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

OPEN_HANGS: Final = 595
"""Seen with 595.71.05 of the open module, four times of four, and reported once by others
(NVIDIA/cuda-checkpoint#53). There is no report on newer ones, so the worst is assumed."""

NCCL_DIES_SINCE: Final = 590
"""Major version since which the driver ends programs with an NCCL communicator when it moves them.
Seen on 595; 580 does no harm; 610 has no report, so the worst is assumed."""


class Module(NamedTuple):
    """``version`` is the text "595.71.05", ``major`` its first number; 0 if it is unknown."""

    version: str
    major: int
    open: bool

    @property
    def kills_hang(self) -> bool:
        """Return whether the machine may hang when a program is killed whose memory was paged out
        and in.
        """
        return self.open and self.major >= OPEN_HANGS


def module_of(root: Path = Path("/")) -> Module | None:
    """Return the loaded module, if any. ``root`` is the directory that holds ``/proc``."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build …"
    first = text.partition("\n")[0]
    found = re.search(r"\b(\d{3,})\.\d+(?:\.\d+)?\b", first)
    version = found[0] if found else ""
    return Module(version, int(found[1]) if found else 0, "Open Kernel Module" in first)
