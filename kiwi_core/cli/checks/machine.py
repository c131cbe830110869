"""Checks of the operating system, Python, and what this process may do to others."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.cli.checks.finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON_MIN: Final = (3, 10)
KERNEL_MIN: Final = (5, 3)
"""pidfd_open(2) exists since this version. It names a process so that a reused process id is never
hit.
"""

CAP_SYS_PTRACE: Final = 1 << 19
"""From capability.h."""

INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the Linux kernel: the inode of the host's own namespace."""


def check(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield the findings. ``root`` is the directory that holds ``/proc``; tests pass another."""
    yield system(sys.platform, platform.release())
    yield python(sys.version_info[:2])
    uid, capabilities = os.geteuid(), effective_capabilities(root)
    yield rights(uid, capabilities)
    yield from yama(root, privileged=uid == 0 or bool(capabilities & CAP_SYS_PTRACE))
    yield from pid_namespace(root)


def system(name: str, release: str) -> Finding:
    if not name.startswith("linux"):
        return fail("system", f"This is {name}; Kiwi needs Linux.", "Use a Linux machine.")
    parts = release.split("-", 1)[0].split(".")[:2]
    if tuple(int(part) for part in parts if part.isdigit()) < KERNEL_MIN:
        return fail(
            "system",
            f"Linux {release} is too old: Kiwi needs 5.3 or newer (pidfd).",
            "Update the operating system.",
        )
    return ok("system", f"Linux {release}")


def python(version: tuple[int, int]) -> Finding:
    text = f"Python {version[0]}.{version[1]} ({sys.executable})"
    if version < PYTHON_MIN:
        return fail("python", f"{text} is too old.", "Use Python 3.10 or newer.")
    return ok("python", text)


def rights(uid: int, capabilities: int) -> Finding:
    if uid == 0 and capabilities & CAP_SYS_PTRACE:
        return ok("rights", "root: a daemon started here can serve every user's notebooks")
    if capabilities & CAP_SYS_PTRACE:
        return ok("rights", "CAP_SYS_PTRACE: a daemon started here can serve every user")
    if uid == 0:
        return warn(
            "rights",
            "root, but without CAP_SYS_PTRACE (a container?): the driver may refuse to move the "
            "memory of other processes.",
            "Give the container this capability (docker run --cap-add SYS_PTRACE).",
        )
    return ok("rights", "an ordinary user: a daemon started here serves this user's notebooks only")


def yama(root: Path, *, privileged: bool) -> Iterator[Finding]:
    """Check whether Linux forbids processes to look into each other (Yama, ptrace_scope 0 to 3)."""
    try:
        scope = int((root / "proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        yield ok("ptrace", "not restricted (no Yama)")
        return
    allowed = scope == 0 or (privileged and scope < 3)
    if allowed:
        yield ok("ptrace", f"ptrace_scope {scope}: allowed")
        return
    yield warn(
        "ptrace",
        f"ptrace_scope is {scope}: some drivers then refuse to move another process's memory.",
        "If `kiwi status` shows 'no permission': sysctl kernel.yama.ptrace_scope=0, or run the "
        "daemon as root."
        if scope < 3
        else "3 cannot be changed while the machine runs: set kernel.yama.ptrace_scope=1 in "
        "/etc/sysctl.d and restart it.",
    )


def pid_namespace(root: Path) -> Iterator[Finding]:
    try:
        inode = (root / "proc/self/ns/pid").stat().st_ino
    except OSError:
        return
    if inode == INITIAL_PID_NAMESPACE:
        yield ok("processes", "the host's own process ids")
    else:
        yield warn(
            "processes",
            "A PID namespace of its own (a container): the daemon must run in the same one as the "
            "notebooks, and NVML may not tell which process uses the GPU.",
            "Run daemon and notebooks in one container, or give both the host's process ids "
            "(docker run --pid=host, hostPID in Kubernetes).",
        )


def effective_capabilities(root: Path) -> int:
    """Return CapEff of this process; 0 if it cannot be read."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    words = next((line.split() for line in lines if line.startswith("CapEff:")), ["", "0"])
    return int(words[1], 16)
