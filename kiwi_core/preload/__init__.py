"""The library between a program and the CUDA driver: Kiwi's gate, which can also own the program's
GPU memory.

To start a program under Kiwi::

    program_env |= preload.environment(preload.library(), before=program_env)

To load the gate into this Python process, before anything in it has loaded the driver::

    gate = preload.load_gate("/usr/lib/x86_64-linux-gnu/libcuda.so.1")

docs/preload.md describes the library. Of Kiwi the package imports only ``compiled``; the compiling
module, which is imported on first use because kernels import the package when they start, also
imports the two figures that the library and the daemon share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kiwi_core.compiled import Unavailable, find_compiler
from kiwi_core.preload._gate import (
    GateLibrary,
    GateState,
    find_untouched,
    guarded,
    load_gate,
    make_interruptible,
)
from kiwi_core.preload._paths import ENV_OWN, NAME, OWN_BY_PAGER, environment

if TYPE_CHECKING:
    from kiwi_core.preload._build import library

__all__ = [
    "ENV_OWN",
    "NAME",
    "OWN_BY_PAGER",
    "GateLibrary",
    "GateState",
    "Unavailable",
    "environment",
    "find_compiler",
    "find_untouched",
    "guarded",
    "library",
    "load_gate",
    "make_interruptible",
]


def __getattr__(name: str) -> Any:
    if name != "library":
        raise AttributeError(name)
    from kiwi_core.preload._build import library

    return library
