"""A job with too little RAM: a control group with a memory limit, made for one process."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
"""Where control groups of version 1 and 2 are mounted, and the file of their limit."""


@contextmanager
def limited(pid: int, limit_bytes: int) -> Iterator[None]:
    """Move ``pid`` into a control group that allows ``limit_bytes`` from now on. What the process
    already has stays counted where it was."""
    group, limit = _group(pid)
    try:
        (group / limit).write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with suppress(ProcessLookupError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "its processes are gone")
        group.rmdir()


def _group(pid: int) -> tuple[Path, str]:
    for mounted, limit in MEMORY:
        group = Path(mounted) / f"kiwi-test-{pid}"
        with suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                return group, limit
            group.rmdir()
    why = "needs control groups with memory limits that can be written to: root"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)
