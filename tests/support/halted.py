"""Three ways to halt a process: Ctrl-Z, a debugger, a frozen control group."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from patience import wait_until
from stopped import stopped

if TYPE_CHECKING:
    from collections.abc import Iterator

_ATTACH, _DETACH, _WALL = 16, 17, 0x40000000


@contextmanager
def debugged(pid: int) -> Iterator[None]:
    """Stop all threads of ``pid`` during the block, with this thread as their debugger. They also
    go on if this test run is killed."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    held: set[int] = set()
    try:
        while new := {int(one) for one in os.listdir(f"/proc/{pid}/task")} - held:
            for thread in new:
                if ptrace(_ATTACH, thread, None, None) != 0:
                    assert ctypes.get_errno() == errno.ESRCH, os.strerror(ctypes.get_errno())
                    continue  # it has ended since it was listed
                held.add(thread)
                os.waitpid(thread, _WALL)
        yield
    finally:
        for thread in held:
            ptrace(_DETACH, thread, None, None)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a control group made for ``pid`` during the block."""
    group = _group(pid)
    if group is None:
        pytest.skip("no freezer of control groups can be written to here: this needs root")
    file, freeze, thaw, shown, is_frozen = _files(group)
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / file).write_text(freeze)
        wait_until(lambda: is_frozen in (group / shown).read_text(), "it is frozen")
        yield
    finally:
        (group / file).write_text(thaw)
        with suppress(ProcessLookupError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _group(pid: int) -> Path | None:
    """Make a control group for ``pid`` and return it. Version 1 comes first: the process may be in
    a version 2 group of a manager that lets no other process in."""
    for mounted in ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        group = Path(mounted) / f"kiwi-test-{pid}"
        if not (Path(mounted) / "cgroup.procs").exists():
            continue
        with suppress(OSError):
            group.mkdir()
            return group
    return None


def _files(group: Path) -> tuple[str, str, str, str, str]:
    if (group / "freezer.state").exists():
        return "freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN"
    return "cgroup.freeze", "1", "0", "cgroup.events", "frozen 1"


WAYS = {"ctrl-z": stopped, "debugger": debugged, "freezer": frozen}
WORDS = {"ctrl-z": "stopped by Ctrl-Z", "debugger": "stopped by a debugger", "freezer": "frozen"}
