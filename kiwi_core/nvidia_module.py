"""The kernel module of NVIDIA's driver, by the text that it shows in ``/proc``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

OPEN_HANGS: Final = 595
"""Seen with 595.71.05 of the open module, four times of four and once by somebody else
(NVIDIA/cuda-checkpoint#53). Where nobody has told of a newer one, the worst is assumed."""


class Module(NamedTuple):
    """``version`` as text ("595.71.05"), and its first number: 0 where it cannot be told."""

    version: str
    major: int
    open: bool

    @property
    def kills_hang(self) -> bool:
        """Can it hang the machine to kill a program whose memory was moved out and back?"""
        return self.open and self.major >= OPEN_HANGS


def module_of(root: Path = Path("/")) -> Module | None:
    """Return the module that is loaded. ``root`` is where ``/proc`` is."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build …"
    first = text.partition("\n")[0]
    found = re.search(r"\b(\d{3,})\.\d+(?:\.\d+)?\b", first)
    version = found[0] if found else ""
    return Module(version, int(found[1]) if found else 0, "Open Kernel Module" in first)
