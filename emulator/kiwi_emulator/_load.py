"""Load the emulated libraries into a process: a child by its environment, or this process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_emulator._state import ENV_STATE

if TYPE_CHECKING:
    from kiwi_emulator._build import EmulatedLibraries

_LIBRARY_PATH = "LD_LIBRARY_PATH"
_handles: list[ctypes.CDLL] = []


def environment(state: Path, libs: EmulatedLibraries) -> dict[str, str]:
    """Return the variables that make a child process find the emulated libraries."""
    before = os.environ.get(_LIBRARY_PATH, "")
    path = library_path(libs.libcuda, libs.libnvml, before=before)
    return {ENV_STATE: os.path.abspath(state), _LIBRARY_PATH: path}


def library_path(*libraries: Path | str, before: str) -> str:
    """Return an ``LD_LIBRARY_PATH`` that finds ``libraries`` first; ``before`` is its old value."""
    directories = [os.path.dirname(os.path.abspath(library)) for library in libraries]
    return ":".join(dict.fromkeys(part for part in [*directories, *before.split(":")] if part))


def activate(state: Path, libs: EmulatedLibraries) -> None:
    """Make this process (and its children) use the emulated libraries.

    Call this before the first driver call: code that loads ``libcuda.so.1`` later gets the library
    that is already loaded. Idempotent. Raise ``RuntimeError`` if another libcuda is loaded.
    """
    loaded = loaded_libcuda()
    if loaded is not None and not _same_file(loaded, libs.libcuda):
        raise RuntimeError(
            f"This process has already loaded {loaded}: the emulated driver cannot be mixed with "
            "another one. Start a new process with the emulator's environment, or leave out "
            "--emulate."
        )
    named = os.environ.get(ENV_STATE)
    if loaded is not None and named and os.path.abspath(named) != os.path.abspath(state):
        raise RuntimeError(
            f"This process already uses the emulated GPUs of {named}; it cannot change to {state}."
        )
    os.environ.update(environment(state, libs))
    load(libs.libcuda, libs.libnvml)


def load(libcuda: Path | str | None, libnvml: Path | str) -> None:
    """Load the two libraries into this process, whose environment must already name the state file
    (as a parent prepares it for a child). ``None``: a library in front of the driver loads the
    driver itself. Idempotent."""
    if not _handles:
        if libcuda is not None:
            _handles.append(ctypes.CDLL(str(libcuda), ctypes.RTLD_GLOBAL))
        _handles.append(ctypes.CDLL(str(libnvml), ctypes.RTLD_GLOBAL))


def loaded_libcuda() -> Path | None:
    """Return the libcuda that this process has mapped, if any."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.partition("/")[2].rstrip("\n").removesuffix(" (deleted)")
            if os.path.basename(path).startswith("libcuda.so"):
                return Path("/" + path)
    return None


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
