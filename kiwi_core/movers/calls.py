"""The calls that a mover can make: each asks the driver for one thing, or reads NVML."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.errors import GpuError
from kiwi_core.gpu import claims, driver, memory, nvml
from kiwi_core.movers.messages import Failure, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def users_elsewhere(gpu_uuid: str) -> dict[int, str] | None:
    """Return the pids that use another GPU than ``gpu_uuid``, each with the UUID of that GPU;
    ``None``: there is no other GPU."""
    others = [gpu for gpu in nvml.gpus() if gpu.uuid != gpu_uuid]
    if not others:
        return None
    found: dict[int, str] = {}
    for other in others:
        # A fault of another GPU must not stop work on this one.
        with contextlib.suppress(GpuError):
            found.update(dict.fromkeys(nvml.processes(other.uuid), other.uuid))
    return found


def look(gpu_uuid: str, pids: Sequence[int]) -> Seen:
    """Return all that a decision about moving memory needs to know. Without ``gpu_uuid``, NVML is
    not asked."""
    seen = Seen()
    if gpu_uuid:
        users = nvml.users(gpu_uuid)
        seen.free_bytes, seen.bytes_by_pid = users.free_bytes, users.bytes_by_pid
        seen.names_users = users.sized and nvml.names_processes()
    for pid in pids:
        try:
            seen.states[pid] = driver.checkpoint_state(pid).value
        except GpuError as error:
            seen.errors[pid] = Failure.of(error)
    return seen


def measured_checkpoint(pid: int, gpu_uuid: str) -> tuple[int | None, int | None]:
    """Checkpoint ``pid``. Return what was free in the GPU before and after, as far as NVML says."""
    before_bytes = _free_bytes_if_known(gpu_uuid)
    driver.checkpoint(pid)
    return before_bytes, _free_bytes_if_known(gpu_uuid)


def _free_bytes_if_known(gpu_uuid: str) -> int | None:
    with contextlib.suppress(GpuError):
        return free_bytes(gpu_uuid) if gpu_uuid else None
    return None


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
    "measured_checkpoint": measured_checkpoint,
    "restore": driver.restore,
    "claimed_restore": claims.claimed_restore,
    "unlock": driver.unlock,
    "look": look,
    "users_elsewhere": users_elsewhere,
    "gpus": nvml.gpus,
    "free_bytes": free_bytes,
    "free_bytes_of_driver": free_bytes_of_driver,
    "gauges": nvml.gauges,
    "processes": nvml.processes,
    "samples": nvml.utilisation_samples,
}
