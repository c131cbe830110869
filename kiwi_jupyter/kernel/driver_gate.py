"""Puts Kiwi's gate in front of the driver in this kernel, before any user code runs.

A library that is loaded first under the driver's SONAME is what every later look-up of
``libcuda.so.1`` finds, so neither root nor LD_PRELOAD is needed. Where the server has started the
kernel with LD_PRELOAD, the gate is there already. Children get it by LD_PRELOAD in either case.

A kernel without a gate works as ever, but others have to wait until its cells are over. Its user is
told why, and what to do.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kiwi_core import interpreter, preload
from kiwi_core.config import pager_of
from kiwi_core.preload import ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SONAME: Final = "libcuda.so.1"
LINKER_CACHE: Final = "/etc/ld.so.cache"
DEFAULT_PLACES: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
"""Directories that the dynamic linker searches for libraries that are not in its cache."""

REMEDIES: Final = {
    preload.GateState.TOO_LATE: (
        "Restart this kernel, and let Kiwi's extension be loaded before anything uses the GPU."
    ),
    preload.GateState.UNAVAILABLE: "`kiwi doctor` says what this machine lacks.",
}

NOT_COMPILED: Final = (
    "Kiwi's gate is being compiled for the first time on this machine, and this kernel started"
    " before that was done. Restart it in a minute."
)


class DriverGate:
    """The gate of this kernel. ``prepare`` is called when the kernel starts, ``before_driver``
    before Kiwi loads a driver itself. ``why`` says why there is no gate; "": there is one, or there
    is no driver. ``real`` is the driver that programs find by its name; "": none.
    """

    def __init__(self) -> None:
        self.why = ""
        self.real = ""
        self._in_front = False
        """Whether the gate is in this process, and there is a driver behind it (loaded or not)."""
        self._ask: Callable[[], int] | None = None

    @property
    def in_front(self) -> bool:
        """Return whether the gate stands in front of the driver that this process will use."""
        return self._in_front

    def untouched(self) -> bool:
        """Return whether nothing in this process has initialised the driver, and every later call
        that does so passes the gate. Then nothing in the process can use the GPU unseen. Takes some
        microseconds.
        """
        if not self._in_front:
            return False
        if self._ask is None:
            self._ask = preload.find_untouched()
            self._in_front = self._ask is not None
        return self._ask is not None and self._ask() == 1

    def driver_loaded(self) -> bool:
        """Return whether something in this process has loaded a driver. Takes some microseconds."""
        try:
            ctypes.CDLL(SONAME, os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            return False
        return True

    def prepare(self) -> None:
        """Load the gate, if this machine has a driver."""
        self.real = _real_driver()
        if not self.real:
            return
        if not preload.guarded():
            self._guard(self.real)
        self._look()

    def before_driver(self, real: str) -> bool:
        """Load the gate in front of ``real``, which Kiwi is about to load. A library that was being
        compiled when the kernel started may be there now. Return whether the gate loads ``real`` by
        itself.
        """
        gated = not _preloaded() and self._guard(real)
        self._look()
        return gated

    def _look(self) -> None:
        self._in_front = preload.guarded()
        if self._in_front:
            preload.make_interruptible()

    def _guard(self, real: str) -> bool:
        library = self._find()
        if library is None:
            return False
        os.environ.update(preload.environment(library, os.environ))  # for what this starts
        os.environ.setdefault(preload.ENV_OWN, preload.OWN_BY_PAGER[pager_of(os.environ)])
        gate = preload.load_gate(real)
        loaded = gate.state is preload.GateState.LOADED
        remedy = REMEDIES.get(gate.state, "")
        self.why = "" if loaded else f"{gate.reason} {remedy}"
        return loaded

    def _find(self) -> Path | None:
        library = ready.find()
        if library is None:
            self.why = NOT_COMPILED
            try:
                _compile_ahead()
            except preload.Unavailable as error:
                self.why = str(error)
            except OSError as error:
                self.why = f"Kiwi's gate could not be compiled: {error}."
        return library


def _preloaded() -> bool:
    """Return whether LD_PRELOAD has brought the library."""
    return hasattr(ctypes.CDLL(None), "kiwi_preload_version")


def _compile_ahead() -> None:
    """Compile the library in another process. Raise ``Unavailable`` if there is no compiler at all,
    and ``OSError``.
    """
    preload.find_compiler()
    subprocess.Popen(
        interpreter.module("kiwi_core.preload.ready"),
        cwd=interpreter.DIRECTORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in this kernel, and the kernel's end, must not stop it
    )


def _real_driver() -> str:
    """Return the path that the dynamic linker would load for ``libcuda.so.1``; "" for none. The
    library is not loaded: once loaded, it would be in front of the gate.
    """
    places = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    candidates = [os.path.join(place, SONAME) for place in places]
    with suppress(OSError), open(LINKER_CACHE, "rb") as cache:
        candidates += map(os.fsdecode, re.findall(rb"(/[^\0]*/libcuda\.so\.1)\0", cache.read()))
    candidates += [f"{place}/{SONAME}" for place in DEFAULT_PLACES]
    machine = _machine("/proc/self/exe")
    return next((path for path in candidates if _machine(path) == machine), "")


def _machine(path: str) -> bytes:
    """Return what kind of machine an ELF file is for: its class, byte order and number."""
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError:
        return b"none"
    return head[:6] + head[18:20]
