"""The library that stands before the CUDA driver in programs: Kiwi's gate, which can also own their
GPU memory.

For whoever starts programs under Kiwi::

    program_env |= preload.environment(preload.library(), before=program_env)

For a Python process itself, before anything in it has loaded the driver::

    gate = preload.load_gate("/usr/lib/x86_64-linux-gnu/libcuda.so.1")

docs/preload.md says what it does.  Imports nothing of Kiwi, and nothing but the standard library.
What compiles is imported when it is needed: kernels import this package at their start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiwi_core.preload._gate import (
    Gate,
    GateState,
    find_untouched,
    guarded,
    load_gate,
)
from kiwi_core.preload._places import NAME, Unavailable, environment

if TYPE_CHECKING:
    from kiwi_core.preload._build import find_compiler, library

__all__ = [
    "NAME",
    "Gate",
    "GateState",
    "Unavailable",
    "environment",
    "find_compiler",
    "find_untouched",
    "guarded",
    "library",
    "load_gate",
]


def __getattr__(name: str) -> Any:
    if name not in ("find_compiler", "library"):
        raise AttributeError(name)
    from kiwi_core.preload import _build

    return getattr(_build, name)
