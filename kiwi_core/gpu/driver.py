"""The CUDA driver's checkpoint calls on other processes, by process id.

Movers (``kiwi_core/movers``) make one call at a time, since a call may take any time;
only ``lock`` takes a limit. ``GpuError`` carries the driver's number.

Source: CUDA driver API, "CUDA Checkpointing". The calls are those of ``cuda.bindings``: importing
``cuda.core`` takes each mover half a second, and it raises on the states of newer drivers (4, 5).
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.errors import CallerError, GpuError
from kiwi_core.gpu import processes
from kiwi_core.gpu.results import (
    NOT_SUPPORTED,
    UPGRADE,
    binding_error,
    cuda_error,
    no_driver_error,
    too_old_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKPOINT_SINCE: Final = (12, 8)
"""First CUDA version whose driver has the calls (driver 570)."""

BINDINGS_REMEDY: Final = "pip install 'cuda-bindings>=12.9.1,!=13.0.0,!=13.0.1'"

_CALLS: Final = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")

_NOT_FOUND: Final = 500
_NO_STATE: Final = frozenset({1, 3})
"""INVALID_VALUE and NOT_INITIALIZED both mean that the process has not initialised CUDA."""

_lock = threading.Lock()
_initialised_pid = -1


class CheckpointState(Enum):
    """The state of a process as the driver reports it, with the numbers of ``CUprocessState``."""

    NOT_A_CUDA_PROCESS = -1
    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    """Permanent: the contents are gone."""
    CHECKPOINTING = 4
    RESTORING = 5
    """4 and 5: this or another process has a call in progress on it (drivers 13.4 and newer)."""


_NEWER_STATES: Final = {
    str(state.value): state for state in (CheckpointState.CHECKPOINTING, CheckpointState.RESTORING)
}


@dataclass(frozen=True)
class DriverInfo:
    """``library`` is the loaded file: an emulated driver hides a real one. ``why_not`` says why
    there are no checkpoints; empty if there are."""

    version: tuple[int, int]
    library: str
    checkpoint: bool
    why_not: str = ""


def init() -> None:
    """Call ``cuInit`` once per process (up to 2.7 s on big machines). Raise ``GpuError`` (no GPU,
    no driver …); a later call tries again. A forked child cannot use CUDA, only a new process."""
    global _initialised_pid
    with _lock:
        if _initialised_pid == os.getpid():
            return
        _result("starting the CUDA driver", _bindings().cuInit, 0)
        _initialised_pid = os.getpid()


def driver_version() -> tuple[int, int]:
    """Return the CUDA version that the driver supports, as ``(13, 4)``."""
    init()
    number = int(_result("reading the driver's version", _bindings().cuDriverGetVersion))
    return number // 1000, number % 1000 // 10


def library_path() -> str:
    """Return the path of the libcuda that this process has loaded; empty if none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = "/" + line.partition("/")[2].rstrip("\n")
            if os.path.basename(path).startswith("libcuda.so"):
                return path
    return ""


def bindings_gap() -> str:
    """Return what the installed cuda-bindings lack, as a sentence; empty if they have all calls.
    13.0.0 and 13.0.1 lack the restore: memory that is moved out would never come back."""
    lacking = [call for call in _CALLS if not hasattr(_bindings(), f"cuCheckpointProcess{call}")]
    if not lacking:
        return ""
    names = ", ".join(f"cuCheckpointProcess{call}" for call in lacking)
    return f"cuda-bindings {metadata.version('cuda-bindings')} have no {names}."


def _driver_gap(version: tuple[int, int]) -> str:
    """Return what the driver lacks, as a sentence; empty if it has all calls. Nothing may be moved
    out on a machine that could not bring it back."""
    if version < CHECKPOINT_SINCE:
        return str(too_old_error("asking for checkpoints"))
    lacking = [name for call in _CALLS if not _has(name := f"cuCheckpointProcess{call}", version)]
    return f"The CUDA driver has no {', '.join(lacking)}. {UPGRADE}" if lacking else ""


def _has(name: str, version: tuple[int, int]) -> bool:
    number = version[0] * 1000 + version[1] * 10
    status, address, *_ = _bindings().cuGetProcAddress(name.encode(), number, 0)
    return int(status) == 0 and bool(int(address))


def capabilities() -> DriverInfo:
    """Return what this machine's driver can do. Raise ``GpuError`` if there is no driver."""
    version = driver_version()
    why_not = bindings_gap() or _driver_gap(version)
    if not why_not:
        try:
            # Ask about any other process: only "not supported" and "not found" matter.
            checkpoint_state(os.getppid())
        except GpuError as error:
            if error.driver_code in (_NOT_FOUND, NOT_SUPPORTED):
                why_not = str(error)
    return DriverInfo(version, library_path(), not why_not, why_not)


def checkpoint_state(pid: int) -> CheckpointState:
    """Ask the driver, which takes well under a millisecond. A ``pid`` that is dead, is a thread, or
    has not initialised CUDA is ``NOT_A_CUDA_PROCESS``."""
    if not processes.is_process(pid):
        return CheckpointState.NOT_A_CUDA_PROCESS
    init()
    what = f"asking for the state of process {pid}"
    try:
        return CheckpointState(int(_result(what, _bindings().cuCheckpointProcessGetState, pid)))
    except ValueError as error:
        # Bindings before 13.4 do not know the states 4 and 5: "4 is not a valid CUprocessState".
        number = str(error).partition(" ")[0]
        if number in _NEWER_STATES:
            return _NEWER_STATES[number]
        raise cuda_error(what, None, f"a state that Kiwi does not know ({error})") from error
    except GpuError as error:
        if error.driver_code in _NO_STATE:
            return CheckpointState.NOT_A_CUDA_PROCESS
        raise


def lock(pid: int, timeout_ms: int) -> None:
    """RUNNING -> LOCKED: block the process's CUDA calls and wait for its submitted work, at most
    ``timeout_ms`` (> 0: the driver's 0 would mean for ever). After that, raise
    ``GpuError("lock-timeout")``; the process runs on."""
    if timeout_ms <= 0:
        raise CallerError("bad-timeout", f"A lock needs a timeout above 0 ms, not {timeout_ms}.")
    args = _bindings().CUcheckpointLockArgs()
    args.timeoutMs = timeout_ms
    _change(f"lock of process {pid}", "Lock", pid, args)


def checkpoint(pid: int) -> None:
    """LOCKED -> CHECKPOINTED: move its memory to host memory and release all GPU resources."""
    _change(f"page-out of process {pid}", "Checkpoint", pid, None)


def restore(pid: int) -> None:
    """CHECKPOINTED -> LOCKED: bring its memory back to the same addresses. Make sure that there is
    room first: after a failure for lack of it, the process can never be restored again
    (NVIDIA/cuda-checkpoint#44)."""
    _change(f"page-in of process {pid}", "Restore", pid, None)


def unlock(pid: int) -> None:
    """LOCKED -> RUNNING."""
    _change(f"unlock of process {pid}", "Unlock", pid, None)


def _change(what: str, call: str, pid: int, args: object) -> None:
    if not processes.is_process(pid):
        # The driver would accept a thread id and act on its process, or on none, according to its
        # documentation.
        raise GpuError("no-such-process", f"{pid} is not a live process (or it is a thread's id).")
    gap = bindings_gap()
    if gap:
        raise GpuError("bindings", f"The {what} was not tried: {gap}", BINDINGS_REMEDY)
    init()
    _result(what, getattr(_bindings(), f"cuCheckpointProcess{call}"), pid, args)


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except Exception as error:
        raise binding_error("importing cuda.bindings", error, BINDINGS_REMEDY) from error
    return driver


def _result(what: str, function: Callable[..., tuple[Any, ...]], *args: object) -> Any:
    try:
        status, *values = function(*args)
    except RuntimeError as error:
        # The bindings raise if the library, or this function of it, cannot be found.
        if "not found" in str(error) and "cuCheckpoint" in str(error):
            raise too_old_error(what) from error
        raise no_driver_error(str(error)) from error
    except ValueError:
        raise  # a state that the bindings do not know: see ``checkpoint_state``
    except Exception as error:
        raise binding_error(what, error, BINDINGS_REMEDY) from error
    if int(status) != 0:
        raise cuda_error(what, int(status), getattr(status, "name", ""))
    return values[0] if values else None
