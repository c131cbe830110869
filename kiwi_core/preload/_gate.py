"""Load the gate into this process, under the driver's own name."""

from __future__ import annotations

import ctypes
import os
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kiwi_core.preload._paths import ALIAS_NAME, GATE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DRIVER = "libcuda.so.1"
ALSO = "libcuda.so"
"""Name that some programs load: the symbolic link of the development packages."""


class GateState(Enum):
    LOADED = "loaded"
    """Every look-up of the driver by name finds the gate."""
    TOO_LATE = "too-late"
    """The driver is already loaded: a program may have looked up its functions."""
    UNAVAILABLE = "unavailable"
    """No gate can be loaded."""


class GateLibrary(NamedTuple):
    """State of the gate in this process; ``reason`` says in words why it is not loaded."""

    state: GateState
    reason: str = ""


def guarded() -> bool:
    """Return whether this process has the gate, by ``load_gate`` or by LD_PRELOAD."""
    if hasattr(ctypes.CDLL(None), "kiwi_preload_version"):
        return True
    there = _loaded(DRIVER)
    return there is not None and _is_gate(there)


def load_gate(real: Path | str, library: Path | None = None) -> GateLibrary:
    """Put the gate in front of the CUDA driver of this process, before any code loads the driver.

    ``real`` is the driver's file. The program's first call to the driver loads it; until then
    another call of this function may name another file. ``library`` is the gate; by default, the
    gate beside the library that ``ready.find`` returns. This function compiles nothing.
    """
    if hasattr(ctypes.CDLL(None), "kiwi_preload_version"):
        return GateLibrary(GateState.LOADED)
    for name in (DRIVER, ALSO):
        if (there := _loaded(name)) is not None and not _is_gate(there):
            return _too_late()
    library = library or _compiled()
    if library is None:
        return GateLibrary(
            GateState.UNAVAILABLE, "Kiwi's gate has not been compiled on this machine."
        )
    return _load(library, os.path.abspath(real))


def find_untouched() -> Callable[[], int] | None:
    """Return the library's ``kiwi_preload_driver_untouched``, or ``None`` without a gate.

    That function returns 1 as long as no call of this process has initialised the driver and every
    call has to pass the gate."""
    return _function("kiwi_preload_driver_untouched")


def make_interruptible() -> None:
    """Let SIGINT end the wait of a call at the gate where that does no harm: the call fails with
    ``CUDA_ERROR_DEVICE_UNAVAILABLE``, and Python raises ``KeyboardInterrupt``. Do nothing without a
    gate.
    """
    if (interruptible := _function("kiwi_preload_interruptible")) is not None:
        interruptible(ctypes.cast(ctypes.pythonapi.Py_AddPendingCall, ctypes.c_void_p))


def _function(name: str) -> Callable[..., int] | None:
    """Return a function of the library, or ``None`` without one. It must not wait: it runs under
    the GIL."""
    everything = ctypes.PyDLL(None)
    if hasattr(everything, "kiwi_preload_version"):
        return getattr(everything, name, None)
    there = _loaded(DRIVER)
    if there is None or not _is_gate(there):
        return None
    return getattr(ctypes.PyDLL(DRIVER, os.RTLD_NOLOAD), name, None)


def _load(library: Path, real: str) -> GateLibrary:
    try:
        gate = ctypes.CDLL(str(library))  # local: code that is already linked does not find it
        if not gate.kiwi_gate_start(os.fsencode(real)):
            return _too_late()
        alias = library.with_name(ALIAS_NAME)
        if _loaded(ALSO) is None:
            ctypes.CDLL(str(alias))
    except (OSError, AttributeError) as error:
        return GateLibrary(GateState.UNAVAILABLE, f"Kiwi's gate cannot be loaded: {error}.")
    return GateLibrary(GateState.LOADED)


def _too_late() -> GateLibrary:
    reason = (
        "This program had loaded the CUDA driver before Kiwi could put its gate in front of it."
    )
    return GateLibrary(GateState.TOO_LATE, reason)


def _compiled() -> Path | None:
    from kiwi_core.preload import ready

    library = ready.find()
    gate = library.with_name(GATE_NAME) if library is not None else None
    return gate if gate is not None and gate.is_file() else None


def _is_gate(library: ctypes.CDLL) -> bool:
    return hasattr(library, "kiwi_gate_start")


def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
