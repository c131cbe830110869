"""One GPU used by *this* process: its context, device memory, pinned host memory, copies.

For programs of Kiwi that measure or hold GPU memory themselves (``kiwi bench``); the daemon never
makes a context. Addresses are integers; the caller frees what it allocates. Every call may raise
``GpuError``; all are for the thread that opened the GPU. Calls release the GIL.

Source: CUDA driver API, "Primary Context Management", "Memory Management", "Stream Management".
"""

from __future__ import annotations

import uuid as uuids
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import driver
from kiwi_core.gpu.results import INVALID_VALUE, binding_error, cuda_error, no_driver_error

if TYPE_CHECKING:
    from collections.abc import Callable

_SEPARATE: Final = 1
"""CU_STREAM_NON_BLOCKING: does not wait for the legacy default stream."""


@dataclass(frozen=True)
class OwnGpu:
    """The GPU ``uuid`` with its primary context, which costs 0.3-0.6 GB of it."""

    uuid: str
    device: int
    pci_bus_id: str

    def close(self) -> None:
        """Release the context. The driver frees what was allocated in it at the last release."""
        call("leaving the GPU's context", cuda().cuDevicePrimaryCtxRelease, self.device)


def open_gpu(uuid: str) -> OwnGpu:
    """Make the context and enter it."""
    driver.init()
    count = int(call("counting the GPUs", cuda().cuDeviceGetCount))
    for ordinal in range(count):
        device = call("finding the GPU", cuda().cuDeviceGet, ordinal)
        raw = call("reading the GPU's UUID", cuda().cuDeviceGetUuid, device)
        if f"GPU-{uuids.UUID(bytes=bytes(raw.bytes)[:16])}" == uuid:
            return _opened(uuid, device)
    raise GpuError(
        "no-such-gpu",
        f"This process cannot use {uuid}: CUDA shows it {count} other GPUs.",
        "Check CUDA_VISIBLE_DEVICES, and that the GPU is not in MIG mode.",
    )


def _opened(uuid: str, device: Any) -> OwnGpu:
    bus_id = call("reading the GPU's PCI address", cuda().cuDeviceGetPCIBusId, 32, device)
    context = call("making a context", cuda().cuDevicePrimaryCtxRetain, device)
    text = bytes(bus_id).split(b"\0")[0].decode().lower()
    call("entering the GPU's context", cuda().cuCtxSetCurrent, context)
    return OwnGpu(uuid, int(device), text)


# --- memory -------------------------------------------------------------------------------------


def free_bytes() -> int:
    """Return the free memory of the GPU that this thread has entered."""
    free, _total = call("reading the free GPU memory", cuda().cuMemGetInfo)
    return int(free)


def allocate(size_bytes: int) -> int:
    return int(call(f"allocating {size_bytes} bytes", cuda().cuMemAlloc, size_bytes))


def free(address: int) -> None:
    call("freeing GPU memory", cuda().cuMemFree, address)


def fill(address: int, value: int, size_bytes: int) -> None:
    """Set every byte to ``value``; return when this is done."""
    call("filling GPU memory", cuda().cuMemsetD8, address, value, size_bytes)
    synchronize()


def host_allocate(size_bytes: int) -> int:
    """Allocate pinned memory and return its address."""
    what = f"allocating {size_bytes} bytes of pinned memory"
    return int(call(what, cuda().cuMemHostAlloc, size_bytes, 0))


def host_free(address: int) -> None:
    call("freeing pinned memory", cuda().cuMemFreeHost, address)


# --- copies -------------------------------------------------------------------------------------


def new_stream() -> Any:
    return call("making a stream", cuda().cuStreamCreate, _SEPARATE)


def end_stream(stream: Any) -> None:
    call("ending a stream", cuda().cuStreamDestroy, stream)


def copy_out(host: int, device: int, size_bytes: int, stream: Any) -> None:
    """Copy from the GPU to host memory, pinned or not; done when ``synchronize`` returns."""
    call("copying out", cuda().cuMemcpyDtoHAsync, host, device, size_bytes, stream)


def copy_in(host: int, device: int, size_bytes: int, stream: Any) -> None:
    """Copy from host memory to the GPU; done when ``synchronize`` returns."""
    call("copying in", cuda().cuMemcpyHtoDAsync, device, host, size_bytes, stream)


def synchronize(stream: Any = None) -> None:
    """Wait for the work of ``stream``, or of the whole context."""
    if stream is None:
        call("waiting for the GPU", cuda().cuCtxSynchronize)
    else:
        call("waiting for a stream", cuda().cuStreamSynchronize, stream)


def nothing() -> None:
    """Make the cheapest call there is: the least cost of any call from Python."""
    call("reading the context", cuda().cuCtxGetCurrent)


# --- calls --------------------------------------------------------------------------------------


def cuda() -> Any:
    """Return the bindings; for this package only."""
    from cuda.bindings import driver as bindings

    return bindings


def call(what: str, function: Callable[..., tuple[Any, ...]], *args: object) -> Any:
    """Make one driver call and return its value (a tuple of several). Raise ``GpuError``."""
    try:
        status, *values = function(*args)
    except RuntimeError as error:  # the bindings raise if the library cannot be found
        raise no_driver_error(str(error)) from error
    except Exception as error:
        raise binding_error(what, error, driver.BINDINGS_REMEDY) from error
    if int(status) == INVALID_VALUE:
        raise GpuError(
            "invalid-value",
            f"{what[:1].upper()}{what[1:]} failed: the driver calls an argument invalid.",
            driver_code=INVALID_VALUE,
        )
    if int(status) != 0:
        raise cuda_error(what, int(status), getattr(status, "name", ""))
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None
