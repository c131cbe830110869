"""Custom storage: this process copies another one's GPU memory itself, out and in.

``begin_checkpoint`` maps all of the target's GPU memory into this process; whoever called copies it
away on the streams given, then ``complete``s; ``begin_restore`` and back likewise. In between the
target is CHECKPOINTING or RESTORING, and **nothing leads back**: there is no call that gives up. So
everything that can fail (storage, pinning, room in the GPU) must have been done before; and what
becomes of the target when this process dies in between is documented nowhere.

Used by the pager's keepers only, where somebody asked for it: unproven on hardware, see the ADRs on
custom storage. Its tests run on the emulated driver and, with ``-m gpu``, on a real one.

This process needs a primary context on each GPU that the target uses (``memory.open_gpu``), which
costs 0.3-0.6 GB of it. Every call raises ``GpuError``.

Source: CUDA driver API 13.4, "CUDA Checkpointing". ``cuda.core`` does not have it, and the bindings
give the driver's answer only as the address of a pointer: hence ``ctypes``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

from kiwi_core.errors import CallerError, GpuError
from kiwi_core.gpu import driver, processes
from kiwi_core.gpu.memory import call, cuda

SINCE: Final = (13, 4)
"""First CUDA version whose driver has it (driver 615)."""
_INVALID_CONTEXT: Final = 201


@dataclass(frozen=True)
class MappedMemory:
    """All that the target has on one GPU, in one piece. ``stream`` belongs to this process's
    primary context there; ``complete`` waits for what is queued on it."""

    device: int
    address: int
    size_bytes: int
    stream: Any


@dataclass
class Operation:
    """Under way until ``complete``. One entry for each GPU on which the target has data; between a
    checkpoint and its restore sizes and order stay the same."""

    pid: int
    memory: tuple[MappedMemory, ...]
    _handle: Any
    _complete: bool = False

    def complete(self) -> None:
        """Waits for the streams, unmaps, and leaves the target CHECKPOINTED, or LOCKED after a
        restore. After an error a copy has failed and the operation is still under way, or the
        target is gone."""
        if self._complete:
            raise CallerError("already-complete", "This operation has been completed before.")
        what = f"completing the operation on process {self.pid}"
        call(what, cuda().cuCheckpointOperationComplete, self._handle)
        self._complete = True


def why_not() -> str:
    """Why this machine has no custom storage; empty where it has. A driver may still refuse a
    process: that leaves it unchanged."""
    if not hasattr(cuda(), "cuCheckpointOperationComplete"):
        return "The installed cuda-bindings are older than 13.4."
    version = driver.driver_version()
    if version < SINCE:
        return f"The driver is for CUDA {version[0]}.{version[1]}; custom storage came with 13.4."
    return ""


def begin_checkpoint(pid: int) -> Operation:
    """LOCKED -> CHECKPOINTING. An error leaves it LOCKED."""
    return _begin("page-out", pid, "Checkpoint")


def begin_restore(pid: int) -> Operation:
    """CHECKPOINTED, by ``begin_checkpoint``, -> RESTORING: then its memory holds nothing that is
    worth anything until it has been copied in. Make sure of the room first, as for
    ``driver.restore``."""
    return _begin("page-in", pid, "Restore")


def _begin(what: str, pid: int, kind: str) -> Operation:
    what = f"{what} of process {pid}"
    if not processes.is_process(pid):
        raise GpuError("no-such-process", f"{pid} is not a live process (or it is a thread's id).")
    if missing := why_not():
        raise GpuError("unsupported", f"{what.capitalize()} to custom storage: {missing}")
    answer = ctypes.c_void_p()
    arguments = getattr(cuda(), f"CUcheckpoint{kind}Args")()
    arguments.customStorageInfo_out = ctypes.addressof(answer)
    try:
        call(what, getattr(cuda(), f"cuCheckpointProcess{kind}"), pid, arguments)
    except GpuError as error:
        if error.driver_code == _INVALID_CONTEXT:
            raise _no_context(what) from error
        raise
    if answer.value is None:
        raise GpuError("driver", f"{what.capitalize()}: the driver began it without saying where.")
    info = _Info.from_address(answer.value)
    memory = tuple(_mapped(info.gpus[i]) for i in range(info.count))
    return Operation(pid, memory, cuda().CUcheckpointOperationHandle(info.handle))


def _mapped(gpu: _PerGpu) -> MappedMemory:
    stream = cuda().CUstream(gpu.stream)
    device = int(call("asking for a stream's GPU", cuda().cuStreamGetDevice, stream))
    return MappedMemory(device, gpu.address, gpu.size_bytes, stream)


def _no_context(what: str) -> GpuError:
    return GpuError(
        "no-own-context",
        f"{what.capitalize()} failed: this process has no context on a GPU that it uses "
        f"(CUDA error {_INVALID_CONTEXT}).",
        "Open every GPU of the process first.",
        driver_code=_INVALID_CONTEXT,
    )


class _PerGpu(ctypes.Structure):
    """CUcheckpointCustomStoragePerDeviceData."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    )


class _Info(ctypes.Structure):
    """CUcheckpointCustomStorageInfo."""

    _fields_ = (
        ("handle", ctypes.c_void_p),
        ("gpus", ctypes.POINTER(_PerGpu)),
        ("count", ctypes.c_uint),
    )
