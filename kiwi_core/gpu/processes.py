"""Processes, from ``/proc``: identity that survives reuse of pids, life, owner, descendants.

A pid alone names the process that has it now. A ``ProcessRef`` has the start time too, so that Kiwi
never acts on a process that merely reuses the pid.

A process counts as ended only if the system says so (ENOENT, ESRCH). If it cannot be read for
another reason (no descriptor left), these functions raise ``GpuError("process-unreadable")``;
``alive`` returns true.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from kiwi_core.errors import GpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_T = TypeVar("_T")

TREE_MAX: Final = 4096
"""Most processes of one session that are read; more is a fork bomb, not a notebook."""

_JOB: Final = re.compile(r"/job_(\d{1,20})(?:/|$)", re.MULTILINE)
_JOB_VARIABLE: Final = re.compile(r"(?:^|\0)SLURM_JOB_ID=(\d{1,20})\0")

_READ_BYTES: Final = 1 << 14
"""Larger than nearly every file that is read here."""

_DEAD: Final = frozenset("ZXx")
_EXITING: Final = 0x4
"""PF_EXITING of the kernel's flags: the process was killed and only releases resources. It no
longer responds, although it still shows as running."""
_KERNEL_THREAD: Final = 0x200000
"""PF_KTHREAD of the kernel's flags: no program, whatever has its pid elsewhere."""


@dataclass(frozen=True)
class ProcessRef:
    """One process, safe against reuse of its pid. ``start_ticks`` is field 22 of
    ``/proc/<pid>/stat`` (clock ticks since boot)."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class Stat:
    """The fields of ``/proc/<pid>/stat`` that Kiwi uses."""

    state: str
    parent: int
    group: int
    session: int
    terminal_group: int
    """The process group in the foreground of its terminal; -1: it has no terminal."""
    flags: int
    start_ticks: int

    @property
    def in_foreground(self) -> bool:
        """Return whether its job is in the foreground of its terminal."""
        return self.terminal_group == self.group

    @property
    def dead(self) -> bool:
        return self.state in _DEAD or bool(self.flags & _EXITING)


def parse_stat(text: str) -> Stat:
    """Parse a ``/proc/<pid>/stat`` line. The command name, field 2, may hold blanks, brackets and
    newlines, so fields are counted from its last ``)``.

    Raise ``ValueError`` for any other text.
    """
    head, bracket, tail = text.rpartition(")")
    fields = tail.split()
    if not bracket or not head or len(fields) < 20:
        raise ValueError("not a /proc/<pid>/stat line")
    parent, group, session, _, terminal_group, flags = map(int, fields[1:7])
    return Stat(fields[0], parent, group, session, terminal_group, flags, int(fields[19]))


def stat_of(pid: int) -> Stat | None:
    """Return the fields of a process or thread; ``None`` if there is none, it is dead or dying, or
    it is hidden from us."""
    return _looked(pid, lambda: _stat(pid))


def _stat(pid: int) -> Stat | None:
    """Return the fields; ``None`` if dead or dying. Raise ``OSError`` if that is unknown."""
    try:
        stat = parse_stat(text_of(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return None if stat.dead else stat


def text_of(path: str | os.PathLike[str]) -> str:
    """Return a file of ``/proc`` as it is: a program chooses its name, and of all line ends in it
    the kernel escapes only "\\n". Each look at a session reads some ten files, and ``open`` takes
    two or three times as long."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(file, _READ_BYTES), b"")).decode(errors="replace")
    finally:
        os.close(file)


def _looked(pid: int, look: Callable[[], _T]) -> _T | None:
    """Return what ``look`` returns; ``None`` if the process has ended, or is hidden from us."""
    try:
        return look()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    except OSError as error:
        raise GpuError(
            "process-unreadable",
            f"Process {pid} cannot be looked at: {error.strerror}.",
            "If the Kiwi daemon has too many files open, raise its limit (ulimit -n).",
        ) from error


def _status(pid: int, field: str) -> list[str]:
    """Return the words of a line of ``/proc/<pid>/status``; none if the process has ended, or is
    hidden.
    """
    text = _looked(pid, lambda: text_of(f"/proc/{pid}/status")) or ""
    found = (line.split() for line in text.split("\n") if line.startswith(field))
    return next(found, [])[1:]


def is_kernel_thread(pid: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and bool(stat.flags & _KERNEL_THREAD)


def is_process(pid: int) -> bool:
    """Return whether ``pid`` is a live process, and not the id of a thread."""
    return stat_of(pid) is not None and _status(pid, "Tgid:") == [str(pid)]


def ref_of(pid: int) -> ProcessRef | None:
    """Return a reference; ``None`` if ``pid`` is no live process, or only the id of a thread."""
    stat = stat_of(pid)
    if stat is None or not is_process(pid):
        return None
    return ProcessRef(pid, stat.start_ticks)


def alive(ref: ProcessRef) -> bool:
    """Return whether ``ref`` lives or may live: its records must not be dropped before it ends."""
    try:
        stat = _stat(ref.pid)
    except OSError:
        return True
    return stat is not None and stat.start_ticks == ref.start_ticks


def owner_uid(pid: int) -> int | None:
    """Return the user that it runs as; ``None`` if it has ended."""
    return _looked(pid, lambda: os.stat(f"/proc/{pid}").st_uid)


def command(pid: int) -> str:
    """Return its program's name, at most 15 characters; "" if it has ended, or is hidden."""
    return (_looked(pid, lambda: text_of(f"/proc/{pid}/comm")) or "").strip()


def job_of(pid: int) -> str:
    """Return the number of the batch job that the process belongs to: by its control group, which
    Slurm names "…/job_12/…", else by what Slurm has put into its environment. "": none.

    A user can invent the latter; nothing depends on it but the user's own usage, and whether the
    epilog of a job ends this process.
    """
    if found := _JOB.search(_looked(pid, lambda: text_of(f"/proc/{pid}/cgroup")) or ""):
        return found[1]
    found = _JOB_VARIABLE.search(_looked(pid, lambda: text_of(f"/proc/{pid}/environ")) or "")
    return found[1] if found else ""


def runs_as(pid: int, uid: int) -> bool:
    """Return whether ``uid`` is the real, effective or saved user of process ``pid``."""
    return str(uid) in _status(pid, "Uid:")[:3]


def image_of(ref: ProcessRef) -> str:
    """Return a digest that differs between the program that ``ref`` runs now and one that it
    becomes by ``exec``, which changes neither pid nor start time. It is made of the auxiliary
    vector, which has the addresses that the kernel chose. "": it has ended, or may not be read.

    Without randomised addresses the same program, started anew in the same way, looks the same.
    """
    try:
        with open(f"/proc/{ref.pid}/auxv", "rb") as file:
            vector = file.read()
    except OSError:
        return ""
    if not vector or not alive(ref):
        return ""
    return hashlib.sha256(vector).hexdigest()


def open_pidfd(ref: ProcessRef) -> int | None:
    """Return a descriptor that becomes readable when exactly this process ends; ``None`` if it has
    ended. The caller closes it."""
    try:
        descriptor = os.pidfd_open(ref.pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise
    # The pid may have been reused before the descriptor was opened; from here on it is pinned.
    if alive(ref):
        return descriptor
    os.close(descriptor)
    return None


def tree(root: ProcessRef, without: Collection[ProcessRef] = frozenset()) -> tuple[ProcessRef, ...]:
    """Return ``root`` and its live descendants, parents first; nothing if ``root`` has ended.
    Processes in ``without`` and their descendants are omitted (a session inside another one).

    A descendant whose parent has ended belongs to init now and is not found here; see
    ``in_session_of`` for those.
    """
    if not alive(root):
        return ()
    found = {root.pid: root}
    waiting = [root.pid]
    while waiting and len(found) < TREE_MAX:
        parent = waiting.pop(0)
        for pid in _children(parent):
            stat = stat_of(pid)
            if stat is None or stat.parent != parent or pid in found:
                continue
            child = ProcessRef(pid, stat.start_ticks)
            if child not in without:
                found[pid] = child
                waiting.append(pid)
    return tuple(found.values())


def ancestors(ref: ProcessRef) -> Iterator[ProcessRef]:
    """Yield the parent, grandparent … of ``ref`` at present. (Those of an orphan are not the
    processes that started it.)"""
    child = stat_of(ref.pid)
    for _ in range(TREE_MAX):
        if child is None or child.parent <= 0:
            return
        pid = child.parent
        stat = stat_of(pid)
        if stat is None or stat.start_ticks > child.start_ticks:
            return  # the parent ended meanwhile, and another process has its pid
        yield ProcessRef(pid, stat.start_ticks)
        child = stat


def with_open(path: str) -> list[ProcessRef]:
    """Return the processes that have the file ``path`` open, as far as this one may look."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and _has_open(int(name), path):
            ref = ref_of(int(name))
            if ref is not None:
                found.append(ref)
    return found


def outlived_its_leader(ref: ProcessRef) -> bool:
    """Return whether the leader of its process group has ended: the program that a shell, a server
    or a batch system started, and of which this one is what is left."""
    stat = stat_of(ref.pid)
    return stat is not None and stat.group not in (0, ref.pid) and stat_of(stat.group) is None


def _has_open(pid: int, path: str) -> bool:
    directory = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{directory}/{fd}") == path for fd in os.listdir(directory))
    except OSError:  # it has ended, has just closed a file, or is another user's
        return False


def child_of(parent: ProcessRef, inner_pid: int) -> ProcessRef | None:
    """Return the child of ``parent`` that has ``inner_pid`` in the PID namespace of ``parent``;
    ``None`` if there is none, or it has ended."""
    depth = len(_status(parent.pid, "NSpid:"))
    for pid in _children(parent.pid):
        if _status(pid, "NSpid:")[:depth][-1:] == [str(inner_pid)]:
            return ref_of(pid)
    return None


def in_session_of(root: ProcessRef, pid: int) -> bool:
    """Return whether ``pid`` is in the terminal session that ``root`` leads, and has its owner.

    Jupyter starts each kernel as a session leader, and the session id outlives parents, ``root``
    included. So an orphaned worker can still be assigned to its kernel. The start time guards
    against a reused id: no process in the session is older than its leader.
    """
    stat = stat_of(pid)
    if stat is None or stat.session != root.pid or stat.start_ticks < root.start_ticks:
        return False
    leader = stat_of(root.pid)
    if leader is None:
        return True  # Linux gives no new process a pid that is still in use as a session id.
    same = leader.start_ticks == root.start_ticks and leader.session == root.pid
    return same and owner_uid(pid) == owner_uid(root.pid)


def _children(parent: int) -> list[int]:
    """Return the children of every thread of ``parent``, by a scan of all processes if the kernel
    was built without ``/proc/<pid>/task/<tid>/children``."""
    threads = _looked(parent, lambda: os.listdir(f"/proc/{parent}/task")) or []
    found = [_children_of_thread(parent, thread) for thread in threads]
    if any(children is None for children in found):
        return _children_by_scan(parent)
    return [child for children in found for child in children or ()]


def _children_of_thread(parent: int, thread: str) -> list[int] | None:
    """Return ``None`` if this kernel has no such file; no pids if the thread has ended."""
    directory = f"/proc/{parent}/task/{thread}"
    text = _looked(parent, lambda: text_of(f"{directory}/children"))
    if text is None and os.path.exists(f"{directory}/stat"):
        return None
    return [int(pid) for pid in (text or "").split()]


def _children_by_scan(parent: int) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if (stat := stat_of(pid)) is not None and stat.parent == parent]


@functools.cache
def boot_id() -> str:
    """Return the system's id of its current boot; "" if it has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except (FileNotFoundError, PermissionError):
        return ""
