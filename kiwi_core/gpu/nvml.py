"""The GPUs as NVML sees them: frozen snapshots, from any thread.

NVML is initialised on first use and again after an error that leaves it unusable (a driver
reloaded, a GPU lost). It knows processes by their pid in the *host's* PID namespace: in a container
with a namespace of its own these pids are meaningless.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kiwi_core.errors import GpuError
from kiwi_core.gpu.processes import is_kernel_thread
from kiwi_core.gpu.results import binding_error, nvml_error

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_SUCCESS: Final = 0
_UNINITIALISED: Final = 1
_INVALID_ARGUMENT: Final = 2
_NOT_SUPPORTED: Final = 3
_NO_PERMISSION: Final = 4
_NOT_FOUND: Final = 6
_FUNCTION_NOT_FOUND: Final = 13
_START_AGAIN: Final = frozenset({_UNINITIALISED, 9, 15, 18, 999})
"""After these errors NVML answers nothing else until it is initialised again."""
_CANNOT_SAY: Final = frozenset(
    {_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND}
)

NVML_REMEDY: Final = "Install the current binding: pip install --upgrade nvidia-ml-py."

_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The machine's own namespace: PROC_PID_INIT_INO, a part of Linux's interface since 3.8."""

_lock = threading.Lock()
_initialised_pid = -1


@dataclass(frozen=True)
class GpuInfo:
    """One GPU. ``persistence`` is ``None`` where NVML does not report it."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    mig: bool
    persistence: bool | None
    driver_version: str


@dataclass(frozen=True)
class GpuMemory:
    """``used_bytes`` includes the driver's own memory."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class GpuUsers:
    """``sized``: NVML reports the memory of each process on the GPU."""

    free_bytes: int
    bytes_by_pid: dict[int, int]
    sized: bool


@dataclass(frozen=True)
class UtilisationSample:
    """``percent`` of the GPU's time that ``pid`` used around ``time_us`` (NVML's clock:
    microseconds since 1970)."""

    pid: int
    percent: int
    time_us: int


@dataclass(frozen=True)
class GpuGauges:
    """A GPU's load at this moment. ``None``: NVML does not report the value for this GPU."""

    utilisation_percent: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None


def gpus() -> tuple[GpuInfo, ...]:
    """Return the GPUs of this machine that can be read, by index: one that has fallen off the bus
    is missing (see ``survey``). Raise ``GpuError`` (no driver, no library …), also if there are
    GPUs and none can be read."""
    found, failed = survey()
    if failed and not found:
        raise next(iter(failed.values()))
    return found


def survey() -> tuple[tuple[GpuInfo, ...], dict[int, GpuError]]:
    """Return the GPUs that can be read, and why each other cannot, by index."""
    count = _call("counting the GPUs", lambda nvml: int(nvml.nvmlDeviceGetCount()))
    found, failed = [], {}
    for index in range(count):
        try:
            found.append(_call(f"reading GPU {index}", partial(_gpu, index=index)))
        except GpuError as error:
            failed[index] = error
    return tuple(found), failed


def memory(uuid: str) -> GpuMemory:
    def read(nvml: Any) -> GpuMemory:
        info = nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, uuid))
        return GpuMemory(int(info.total), int(info.free), int(info.total) - int(info.free))

    return _call(f"reading the memory of {uuid}", read)


def gauges(uuid: str) -> GpuGauges:
    def read(nvml: Any) -> GpuGauges:
        gpu = _handle(nvml, uuid)
        core = nvml.NVML_TEMPERATURE_GPU
        busy = _optional(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        return GpuGauges(
            utilisation_percent=None if busy is None else int(busy),
            temperature_c=_optional(lambda: int(nvml.nvmlDeviceGetTemperature(gpu, core))),
            power_w=_optional(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            power_limit_w=_optional(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
        )

    return _call(f"reading the gauges of {uuid}", read)


def names_processes() -> bool:
    """Return whether NVML's pids are those that this process sees. In a PID namespace of its own
    (most containers) NVML reports the host's pids, or none."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def processes(uuid: str) -> dict[int, int]:
    """Return the bytes on this GPU by pid, contexts included, as far as NVML reports them. Rows
    that cannot be true are left out: more memory than the GPU has, or a thread of the kernel."""
    return users(uuid).bytes_by_pid


def users(uuid: str) -> GpuUsers:
    """Return who uses this GPU, and what is free."""

    def read(nvml: Any) -> GpuUsers:
        gpu = _handle(nvml, uuid)
        info = nvml.nvmlDeviceGetMemoryInfo(gpu)
        rows = [
            (int(row.pid), _size(row.usedGpuMemory, int(info.total)))
            for row in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
            if not is_kernel_thread(int(row.pid))
        ]
        sizes = {pid: size_bytes for pid, size_bytes in rows if size_bytes is not None}
        return GpuUsers(int(info.free), sizes, len(sizes) == len(rows))

    return _call(f"reading the processes on {uuid}", read)


def _size(reported: Any, total_bytes: int) -> int | None:
    return int(reported) if reported is not None and int(reported) <= total_bytes else None


def utilisation_samples(uuid: str, since_us: int) -> tuple[UtilisationSample, ...] | None:
    """Return NVML's samples newer than ``since_us``; ``None`` if it has none for processes."""

    def read(nvml: Any) -> tuple[UtilisationSample, ...] | None:
        try:
            raw = nvml.nvmlDeviceGetProcessUtilization(_handle(nvml, uuid), since_us)
        except nvml.NVMLError as error:
            # No sample at all: "not found", or a success that pynvml raises.
            if error.value in (_SUCCESS, _NOT_FOUND):
                return ()
            if error.value in _CANNOT_SAY:
                return None
            raise
        samples = (UtilisationSample(int(s.pid), int(s.smUtil), int(s.timeStamp)) for s in raw)
        # The driver fills spare rows with zeros and repeats old ones.
        return tuple(s for s in samples if s.pid > 0 and s.time_us > since_us)

    return _call(f"reading the utilisation of {uuid}", read)


def _gpu(nvml: Any, index: int) -> GpuInfo:
    version = _optional(lambda: _text(nvml.nvmlSystemGetDriverVersion())) or ""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    persistence = _optional(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)))
    return GpuInfo(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        mig=bool(_optional(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))),
        persistence=persistence,
        driver_version=version,
    )


def _optional(read: Callable[[], T]) -> T | None:
    """Return what ``read`` returns; ``None`` if this GPU, or this version of NVML, lacks it."""
    try:
        return read()
    except Exception as error:
        # Newer bindings raise an error of its own where NVML has another version of the function.
        mismatch = type(error).__name__ == "NVMLLibraryMismatchError"
        if mismatch or getattr(error, "value", None) in _CANNOT_SAY:
            return None
        raise


def _handle(nvml: Any, uuid: str) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(uuid)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _call(what: str, read: Callable[[Any], T]) -> T:
    """Return what ``read`` reads. Whatever the binding raises becomes a ``GpuError``."""
    try:
        import pynvml

        return _read(pynvml, read)
    except Exception as error:
        if isinstance(number := getattr(error, "value", None), int):
            raise nvml_error(what, number, str(error)) from error
        raise binding_error(what, error, NVML_REMEDY) from error


def _read(nvml: Any, read: Callable[[Any], T]) -> T:
    """Call ``read`` with NVML initialised; a second time if NVML was shut down meanwhile."""
    _ensure(nvml)
    try:
        return read(nvml)
    except nvml.NVMLError as error:
        if error.value in _START_AGAIN:
            _forget()
        if error.value != _UNINITIALISED:
            raise
    _ensure(nvml)
    return read(nvml)


def _ensure(nvml: Any) -> None:
    # The lock is for initialising only: a read that hangs must not stop the reads of other GPUs.
    global _initialised_pid
    with _lock:
        if _initialised_pid != os.getpid():
            nvml.nvmlInit()
            _initialised_pid = os.getpid()


def _forget() -> None:
    global _initialised_pid
    with _lock:
        _initialised_pid = -1
