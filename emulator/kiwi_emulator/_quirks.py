"""Behaviour of real drivers towards programs, as data: which driver has which quirk.

The quirks were collected in November 2026 from other people's runs and from a run of Kiwi's own
probes on an H200; ``README.md`` names the source of each. Where nobody knows, the worst is assumed:
a program that survives it survives any driver.
"""

from __future__ import annotations

import os
from typing import NamedTuple

ENV_DRIVER = "KIWI_EMULATOR_DRIVER"
"""Variable with the profile of machines made without one: runs a test suite under another."""

DEFAULT_DRIVER = "worst"
"""Profile of machines that are made without one, if the environment names none."""

STREAM_BYTES = 64 << 10
"""Cost of a stream with ``streams_cost``: real streams take memory, but nobody says how much."""

QUIRKS: dict[str, int] = {
    "sync_crashes": 1 << 0,
    "query_crashes": 1 << 1,
    "state_waits": 1 << 2,
    "missing_is_os_error": 1 << 3,
    "failed_restore_keeps": 1 << 4,
    "hidden_overhead": 1 << 5,
    "unmap_does_not_wait": 1 << 6,
    "streams_cost": 1 << 7,
    "nccl_kills": 1 << 8,
    "serialised_caller": 1 << 9,
    "kill_takes_host_down": 1 << 10,
    "no_process_rows": 1 << 11,
    "mig": 1 << 12,
    "broken_stays": 1 << 13,
    "memory_info_fails": 1 << 14,
    "questions_pass": 1 << 15,
    "checkpoint_needs_room": 1 << 16,
    "no_process_sizes": 1 << 17,
    "nvml_waits": 1 << 18,
}
"""The bits of ``enum ke_quirk``.

- ``sync_crashes``: the target's context and stream synchronisation returns at once while it is
  locked, and crashes while it is checkpointed.
- ``query_crashes``: the same for event synchronisation and for stream and event queries.
- ``state_waits``: a state query waits for an operation under way, and while the target is stopped.
- ``missing_is_os_error``: a pid that does not exist answers OPERATING_SYSTEM, a zombie
  NOT_INITIALIZED.
- ``failed_restore_keeps``: a restore without room keeps all free memory until its process ends.
- ``hidden_overhead``: NVML's row of a process leaves out 6 MiB of its context.
- ``unmap_does_not_wait``: ``cuMemUnmap`` takes memory away under a running kernel.
- ``streams_cost``: a stream takes GPU memory.
- ``nccl_kills``: a checkpoint of a process with an NCCL group aborts it.
- ``serialised_caller``: one process's calls about others run one after the other.
- ``kill_takes_host_down``: killing a live process that was restored takes the host down; see
  ``host_down``.
- ``no_process_rows``: NVML shows no processes, as in another PID namespace.
- ``no_process_sizes``: NVML's rows name the processes, but not their memory, as on WSL.
- ``mig``: NVML says that MIG is on, and a checkpoint answers OUT_OF_MEMORY.
- ``broken_stays``: a checkpoint of a process with a broken context answers that context's error.
- ``memory_info_fails``: ``cuMemGetInfo`` of the target answers OPERATING_SYSTEM while it is
  checkpointed, and the right figure at once while it is locked.
- ``questions_pass``: ``cuDeviceGetAttribute``, ``cuCtxGetCurrent`` and ``cuDevicePrimaryCtxRetain``
  of a context that exists answer at once while the target is locked or checkpointed.
- ``checkpoint_needs_room``: a checkpoint answers OUT_OF_MEMORY while less than 2 MiB of the GPU
  is free (on GPUs below 128 MiB: less than 1/64 of it). The process works on, but every later
  checkpoint of it answers UNKNOWN.
- ``nvml_waits``: NVML calls of the target wait while it is locked or checkpointed.
"""

_ON_ALL = (
    "sync_crashes", "query_crashes", "state_waits", "missing_is_os_error", "failed_restore_keeps",
    "hidden_overhead", "unmap_does_not_wait", "streams_cost", "broken_stays", "memory_info_fails",
    "questions_pass", "checkpoint_needs_room", "nvml_waits",
)  # fmt: skip


class Profile(NamedTuple):
    quirks: tuple[str, ...]
    driver: str
    """Driver version, as NVML gives it."""
    cuda_version: int
    """CUDA version, as cuDriverGetVersion gives it; nobody has reported those of 595 and 610."""

    @property
    def bits(self) -> int:
        return sum(QUIRKS[name] for name in self.quirks)


DRIVERS: dict[str, Profile] = {
    "580": Profile(_ON_ALL, "580.178.04", 13000),
    "595": Profile((*_ON_ALL, "nccl_kills"), "595.84", 13020),
    "595-open": Profile((*_ON_ALL, "nccl_kills", "kill_takes_host_down"), "595.71.05", 13020),
    "610": Profile((*_ON_ALL, "nccl_kills"), "610.57.04", 13030),
    # ``kill_takes_host_down`` is missing: tests kill programs everywhere, and would have to page
    # each program out first. ``no_process_rows``, ``no_process_sizes`` and ``mig`` belong to a
    # machine, not to a driver.
    "worst": Profile((*_ON_ALL, "nccl_kills", "serialised_caller"), "595.84", 13020),
    "tame": Profile((), "580.00", 13000),
}
"""Profiles by name. ``worst`` has every driver's quirks but ``kill_takes_host_down``; ``tame`` is
no driver and has none."""


def profile(name: str | None) -> Profile:
    """Return the profile ``name``; None: the environment's, or the default one. Raise
    ``ValueError`` with a list of the names."""
    chosen = name if name is not None else os.environ.get(ENV_DRIVER) or DEFAULT_DRIVER
    found = DRIVERS.get(chosen)
    if found is None:
        raise ValueError(
            f"{chosen!r} is not an emulated driver: choose one of {', '.join(sorted(DRIVERS))}"
        )
    return found
