"""The library that stands before the CUDA driver in programs: Kiwi's gate, which can also own their
GPU memory.

For whoever starts programs under Kiwi::

    program_env |= preload.environment(preload.library(), before=program_env)

For a Python process itself, before anything in it has loaded the driver::

    gate = preload.load_gate("/usr/lib/x86_64-linux-gnu/libcuda.so.1")

docs/preload.md says what it does.  Imports nothing of Kiwi, and nothing but the standard library.
"""

from __future__ import annotations

from kiwi_core.preload._build import NAME, Unavailable, environment, find_compiler, library
from kiwi_core.preload._gate import Gate, GateState, guarded, load_gate

__all__ = [
    "NAME",
    "Gate",
    "GateState",
    "Unavailable",
    "environment",
    "find_compiler",
    "guarded",
    "library",
    "load_gate",
]
