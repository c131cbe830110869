"""Checks of system RAM against the GPUs' memory, of its huge pages, of room on the disks that Kiwi
writes to, and of room in ``/dev/shm``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.cli.checks.finding import Finding, fail, ok, warn
from kiwi_core.config import DEFAULTS
from kiwi_core.gpu import host
from kiwi_core.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kiwi_core.gpu.nvml import GpuInfo

SHARED_MEMORY: Final = Path("/dev/shm")

SHARED_MEMORY_MIN_BYTES: Final = 128 * MIB
"""Twice what Docker gives to a container by default. That default is too small for programs that
exchange tensors between processes: PyTorch's data loaders end with a bus error."""

TRANSPARENT_HUGE_PAGES: Final = "sys/kernel/mm/transparent_hugepage/enabled"
HUGE_PAGES_GIVEN: Final = {
    "always": "Kiwi's library and the driver get them",
    "madvise": "Kiwi's library asks for them and gets them, the driver only if it asks",
    "never": "neither Kiwi's library nor the driver gets them",
}
"""What each setting means for paged-out memory."""

DISK_MIN_BYTES: Final = 2 * DEFAULTS.journal_max_bytes
"""Room for a journal and the one before it, for one GPU."""


DISK_FULL_BYTES: Final = 8 << 20
"""With less a daemon may be unable to write down whose memory is out of the GPU."""


def check(gpus: Sequence[GpuInfo], directories: Sequence[Path]) -> Iterator[Finding]:
    memory = host.host_memory()
    physical_bytes = physical_ram_bytes()
    if memory.total_bytes < physical_bytes:
        yield ok(
            "cgroup",
            f"this process may use {format_bytes(memory.total_bytes)} of the machine's "
            f"{format_bytes(physical_bytes)} RAM",
        )
    yield budget(memory.available_bytes, host.host_budget_bytes(DEFAULTS.host_reserve_bytes), gpus)
    yield huge_pages()
    for directory in dict.fromkeys(existing(one) for one in directories):
        yield disk(directory, shutil.disk_usage(directory).free)
    if SHARED_MEMORY.exists():
        yield shared_memory(shutil.disk_usage(SHARED_MEMORY).free)


def budget(available_bytes: int, budget_bytes: int, gpus: Sequence[GpuInfo]) -> Finding:
    """Check that one full GPU fits in RAM: two notebooks that each fill the GPU need that."""
    text = f"{format_bytes(available_bytes)} available, paged-out memory may take "
    text += format_bytes(budget_bytes)
    largest = max((gpu.total_bytes for gpu in gpus), default=0)
    if budget_bytes >= largest:
        return ok("system RAM", text)
    return warn(
        "system RAM",
        f"{text}: less than one GPU's {format_bytes(largest)}. A notebook that fills more than "
        "that cannot be moved out, so others wait until its cell ends.",
        "Give the machine (or the container's cgroup) more memory, or keep notebooks smaller.",
    )


def huge_pages(root: Path = Path("/")) -> Finding:
    """Say what the machine gives to memory that goes out of a GPU. ``root`` holds ``/sys``; tests
    pass another."""
    try:
        words = (root / TRANSPARENT_HUGE_PAGES).read_text().split()
    except OSError:
        words = []
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "")
    given = HUGE_PAGES_GIVEN.get(chosen, "it is not known who gets them here")
    return ok("huge pages", f"transparent huge pages: {chosen or 'not known'}; {given}")


def disk(directory: Path, free_bytes: int) -> Finding:
    text = f"{format_bytes(free_bytes)} free at {directory}"
    if free_bytes >= DISK_MIN_BYTES:
        return ok("disk", text)
    if free_bytes < DISK_FULL_BYTES:
        return fail(
            "disk",
            f"{text}: a daemon that is killed could not know afterwards whose memory is out of the "
            "GPU.",
            "Make room, or name another place with --state-dir.",
        )
    return warn(
        "disk",
        f"{text}: journals (up to {format_bytes(DISK_MIN_BYTES)} per GPU) may not fit.",
        "Make room, or name another place with --state-dir.",
    )


def shared_memory(free_bytes: int) -> Finding:
    text = f"{format_bytes(free_bytes)} free at {SHARED_MEMORY}"
    if free_bytes >= SHARED_MEMORY_MIN_BYTES:
        return ok("/dev/shm", text)
    return warn(
        "/dev/shm",
        f"{text}: programs that share memory, such as data loaders, may end with a bus error.",
        "Delete files there that no program uses, or enlarge it: "
        "mount -o remount,size=2G /dev/shm, or docker run --shm-size=2g.",
    )


def existing(path: Path) -> Path:
    """Return ``path``, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def physical_ram_bytes() -> int:
    try:
        first = Path("/proc/meminfo").read_text().split("\n", 1)[0]
        return int(first.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
