"""Put the preloaded library and the gate into a wheel, compiled for one machine and an old glibc.

This happens only if ``KIWI_WHEEL_MACHINE`` names the machine (``make wheels`` sets it). Any other
build is pure Python, and a compiler builds the library on first use.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = "KIWI_WHEEL_MACHINE"
REQUIREMENTS = ["ziglang>=0.13", "nvidia-cuda-runtime>=13.4,<14"]
"""The compiler that knows every glibc, and the driver's header, which Kiwi may not ship."""


def machine() -> str:
    return os.environ.get(MACHINE, "")


def add(root: Path, work: Path, build_data: dict[str, Any]) -> None:
    """Compile and add the library. Raises ``RuntimeError`` with a remedy if that fails."""
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
    build_data["tag"] = f"py3-none-manylinux2014_{machine()}"  # this is glibc 2.17
