"""The calls that a mover can make: each asks the driver for one thing, or reads NVML."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import claims, driver, memory, nvml

if TYPE_CHECKING:
    from collections.abc import Callable


def users_elsewhere(gpu_uuid: str) -> dict[int, str]:
    """Return the pids that use another GPU than ``gpu_uuid``, each with the UUID of that GPU."""
    found: dict[int, str] = {}
    for other in nvml.gpus():
        if other.uuid == gpu_uuid:
            continue
        # A fault of another GPU must not stop work on this one.
        with contextlib.suppress(GpuError):
            found.update(dict.fromkeys(nvml.processes(other.uuid), other.uuid))
    return found


def names_users(gpu_uuid: str) -> bool:
    """Return whether NVML names all processes that use the GPU, and the memory of each."""
    return nvml.names_processes() and nvml.all_sizes_known(gpu_uuid)


def free_bytes(gpu_uuid: str) -> int:
    return nvml.memory(gpu_uuid).free_bytes


def free_bytes_of_driver(gpu_uuid: str) -> int:
    """Return what the driver itself says is free. It takes a context, which is in the way of others
    meanwhile."""
    gpu = memory.open_gpu(gpu_uuid)
    try:
        return memory.free_bytes()
    finally:
        gpu.close()


def why_no_moves() -> str:
    """Return why this machine's driver cannot move memory out and back in; "": it can."""
    return driver.capabilities().why_not


CALLS: Final[dict[str, Callable[..., Any]]] = {
    "init": driver.init,
    "why_no_moves": why_no_moves,
    "checkpoint_state": driver.checkpoint_state,
    "lock": driver.lock,
    "checkpoint": driver.checkpoint,
    "restore": driver.restore,
    "claimed_restore": claims.claimed_restore,
    "unlock": driver.unlock,
    "gpus": nvml.gpus,
    "free_bytes": free_bytes,
    "free_bytes_of_driver": free_bytes_of_driver,
    "names_users": names_users,
    "gauges": nvml.gauges,
    "processes": nvml.processes,
    "users_elsewhere": users_elsewhere,
    "samples": nvml.utilisation_samples,
}
