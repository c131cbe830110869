"""Puts the preloaded library and the gate into a wheel, compiled for one machine and an old glibc.

Only where ``KIWI_WHEEL_MACHINE`` names the machine (``make wheels`` does): any other build is pure
Python, and the library is compiled on first use where there is a compiler.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = "KIWI_WHEEL_MACHINE"
REQUIREMENTS = ["ziglang>=0.13", "nvidia-cuda-runtime>=13.4,<14"]
"""The compiler that knows every glibc, and the driver's header (not ours to ship)."""


def machine() -> str:
    return os.environ.get(MACHINE, "")


def add(root: Path, work: Path, build_data: dict[str, Any]) -> None:
    """Raises ``RuntimeError`` with a remedy where it cannot be compiled."""
    if not machine():
        return
    sys.path.insert(0, str(root))
    from kiwi_core.preload._build import ALIAS_NAME, GATE_NAME, NAME, TARGETS, cross

    if machine() not in TARGETS:
        raise RuntimeError(f"{MACHINE} is {machine()!r}; it may be {' or '.join(TARGETS)}.")
    library = work / machine() / NAME
    cross(machine(), library)
    for name in (NAME, GATE_NAME, ALIAS_NAME):
        home = f"kiwi_core/preload/lib/{machine()}/{name}"
        build_data["force_include"][str(library.with_name(name))] = home
    build_data["pure_python"] = False
    build_data["tag"] = f"py3-none-manylinux2014_{machine()}"  # that is glibc 2.17
