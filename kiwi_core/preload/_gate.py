"""Loading the gate into this process, under the driver's own name."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core.preload._places import ALIAS_NAME, compiled_gate

if TYPE_CHECKING:
    from collections.abc import Iterator

DRIVER = "libcuda.so.1"
_CACHE = Path("/etc/ld.so.cache")
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEAD = struct.Struct("=20s2I5I")
_CACHE_ENTRY = struct.Struct("=i3IQ")
_CACHE_FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03}
"""How the loader's cache marks libraries for glibc on this machine."""


class GateState(Enum):
    LOADED = "loaded"
    """Every look-up of the driver by its name finds the gate."""
    TOO_LATE = "too-late"
    """The driver is loaded already: its functions may have been looked up."""
    UNAVAILABLE = "unavailable"
    """There is no driver here, or no gate that could be loaded."""


@dataclass(frozen=True, slots=True)
class Gate:
    """``reason`` says in words why it is not loaded; ``driver`` is the real one behind the gate
    (``None`` also where the program was started under the preloaded library)."""

    state: GateState
    reason: str = ""
    driver: Path | None = None


def load_gate(real: Path | None = None, library: Path | None = None) -> Gate:
    """Put the gate in front of the CUDA driver of this process, before anybody loads that.

    ``real`` is the driver's file; by default the one that the dynamic loader would find.
    ``library`` is the gate; by default the compiled one (``compiled_gate``). Compiles nothing and
    does not load the driver, which the program's first call does. Idempotent.
    """
    if hasattr(ctypes.CDLL(None), "kiwi_preload_version"):
        return Gate(GateState.LOADED, "The program was started under Kiwi's preloaded library.")
    for name in (DRIVER, "libcuda.so"):
        if (there := _loaded(name)) is not None and not hasattr(there, "kiwi_gate_start"):
            return Gate(
                GateState.TOO_LATE, "This program loaded the CUDA driver before Kiwi's gate."
            )
    driver = real or find_driver()
    if driver is None:
        return Gate(GateState.UNAVAILABLE, "There is no CUDA driver on this machine.")
    library = library or compiled_gate()
    if library is None:
        return Gate(GateState.UNAVAILABLE, "Kiwi's gate has not been compiled on this machine.")
    return _load(library, driver)


def _load(library: Path, driver: Path) -> Gate:
    try:
        gate = ctypes.CDLL(str(library))  # local: nothing that is linked already finds it
        if not gate.kiwi_gate_start(os.fsencode(driver.absolute())):
            return Gate(GateState.TOO_LATE, "The gate stands before another CUDA driver already.")
        alias = library.with_name(ALIAS_NAME)
        if alias.is_file() and _loaded("libcuda.so") is None:
            ctypes.CDLL(str(alias))
    except (OSError, AttributeError) as error:
        return Gate(GateState.UNAVAILABLE, f"Kiwi's gate cannot be loaded: {error}.")
    return Gate(GateState.LOADED, driver=driver)


def _loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def find_driver() -> Path | None:
    """The driver that the dynamic loader would find by its name."""
    for path in _candidates():
        if "/stubs/" not in str(path) and path.is_file():  # the toolkit's, for linking
            return path
    return None


def _candidates() -> Iterator[Path]:
    for directory in os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":"):
        if directory:
            yield Path(directory) / DRIVER
    yield from _in_cache()
    machine = os.uname().machine
    for home in ("/lib", "/usr/lib"):
        yield from (Path(home + end) / DRIVER for end in (f"/{machine}-linux-gnu", "64", ""))
    yield Path("/usr/lib/wsl/lib") / DRIVER


def _in_cache() -> Iterator[Path]:
    """Where ldconfig found it. A cache of another format counts as none."""
    try:
        data = _CACHE.read_bytes()
    except OSError:
        return
    start = data.find(_CACHE_MAGIC)  # an old format may stand before it
    if start < 0 or len(data) < start + _CACHE_HEAD.size:
        return
    count = _CACHE_HEAD.unpack_from(data, start)[1]
    wanted = _CACHE_FLAGS.get(os.uname().machine)
    end = start + _CACHE_HEAD.size + count * _CACHE_ENTRY.size
    entries = data[start + _CACHE_HEAD.size : end]
    if len(entries) % _CACHE_ENTRY.size:
        return
    name = DRIVER.encode() + b"\0"
    for flags, key, value, _, _ in _CACHE_ENTRY.iter_unpack(entries):
        if flags == wanted and data.startswith(name, start + key):
            found = data[start + value : data.find(b"\0", start + value)]
            yield Path(os.fsdecode(found))
