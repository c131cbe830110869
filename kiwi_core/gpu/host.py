"""How much system RAM paged-out memory may take: what the machine and every cgroup still allow.

The driver keeps a process's paged-out memory in that *process's* host memory, so it counts against
the cgroup of the notebook, not of the daemon. The strictest limit of all these cgroups decides.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import NO_MORE, GpuError
from kiwi_core.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNLIMITED: Final = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True)
class _Files:
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


# memory.high does not kill, but a process above it hardly makes progress: as good as a limit.
_V2: Final = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1: Final = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True)
class HostMemory:
    """``total_bytes`` is the smaller one of the machine's RAM (``machine_bytes``) and the strictest
    limit."""

    total_bytes: int
    available_bytes: int
    machine_bytes: int


@dataclass(frozen=True)
class Shortage:
    """A control group whose ``limit_bytes`` are too few: it would need ``needs_bytes``."""

    limit_bytes: int
    needs_bytes: int

    def __str__(self) -> str:
        mib = -(-self.needs_bytes // MIB)
        limit, needs = format_bytes(self.limit_bytes), format_bytes(self.needs_bytes)
        ask = f"ask for {mib} MiB (in Slurm: --mem={mib}M)"
        return f"its memory limit is {limit}, and {needs} are needed: {ask}"


def host_memory(pids: Iterable[int] = (), root: Path = Path("/")) -> HostMemory:
    """Return the memory for this process and ``pids`` (ended or unreadable ones do not count).

    ``root`` is the directory that holds ``/proc`` and ``/sys``; tests pass another.
    """
    meminfo = _meminfo(root)
    total_bytes = machine_bytes = meminfo.get("MemTotal", 0)
    available_bytes = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    mounts = _mounts(root)
    groups = _groups_of(root, ("self", *map(str, pids)), mounts)
    for limit_bytes, used_bytes in _limits_of(groups):
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
    return HostMemory(total_bytes, available_bytes, machine_bytes)


def shortage(pids: Iterable[int], more_bytes: int, root: Path = Path("/")) -> Shortage | None:
    """Return the control group of ``pids`` that lacks most if they take ``more_bytes`` of RAM;
    ``None``: all their groups allow that. The RAM of the machine does not count here."""
    mounts = _mounts(root)
    return _most_lacking(_limits_of(_groups_of(root, map(str, pids), mounts)), more_bytes)


def own_shortage(pids: Iterable[int], more_bytes: int, root: Path = Path("/")) -> Shortage | None:
    """Return the same, but only of groups that this process is not in. A lack in the others is a
    lack for all: to Kiwi it counts as the RAM of the machine.
    """
    mounts = _mounts(root)
    shared = _groups_of(root, ("self",), mounts)
    return _most_lacking(_limits_of(_groups_of(root, map(str, pids), mounts) - shared), more_bytes)


def _most_lacking(limits: Iterable[tuple[int, int]], more_bytes: int) -> Shortage | None:
    lacking = [
        Shortage(limit_bytes, used_bytes + more_bytes)
        for limit_bytes, used_bytes in limits
        if used_bytes + more_bytes > limit_bytes
    ]
    return max(lacking, key=lambda one: one.needs_bytes - one.limit_bytes, default=None)


def available_host_bytes(pids: Iterable[int] = (), root: Path = Path("/")) -> int:
    """Return what the machine and the cgroups of this process and ``pids`` still let programs
    allocate without swapping."""
    return host_memory(pids, root).available_bytes


def host_budget_bytes(
    reserve_bytes: int,
    paged_out_bytes: int = 0,
    pids: Iterable[int] = (),
    root: Path = Path("/"),
) -> int:
    """Return what all paged-out memory together may take: what is paged out now, plus what is
    available, less the reserve (at most a quarter of the total, so that small machines work too).
    Never more than the machine has, whatever ``paged_out_bytes`` says."""
    memory = host_memory(pids, root)
    reserve_bytes = min(reserve_bytes, memory.total_bytes // 4)
    most_bytes = memory.machine_bytes - reserve_bytes
    return max(0, min(most_bytes, paged_out_bytes + memory.available_bytes - reserve_bytes))


def held_bytes(pid: int) -> int:
    """Return the memory that process ``pid`` really has, in RAM or swapped out; 0 if it has ended.
    A program cannot hold more than this, whatever it reports."""
    fields = dict(
        line.split(":", 1)
        for line in _text(Path(f"/proc/{pid}/status")).splitlines()
        if ":" in line
    )
    return sum(int(fields.get(name, "0").split()[0]) * 1024 for name in ("VmRSS", "VmSwap"))


def _meminfo(root: Path) -> dict[str, int]:
    pairs = (
        line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line
    )
    # "MemTotal:       24684092 kB"
    return {key: int(value.split()[0]) * 1024 for key, value in pairs if value.strip()}


@dataclass(frozen=True)
class _Mount:
    """A mounted cgroup hierarchy: its path ``inside`` is mounted at ``directory``."""

    inside: str
    directory: Path
    files: _Files


def _mounts(root: Path) -> tuple[_Mount, ...]:
    """Read the mounts from mountinfo, which has lines like
    ``36 35 0:29 /inside /mount/point options - type source superoptions``."""
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 5 or len(right) < 3:
            continue
        v1 = right[0] == "cgroup" and "memory" in right[2].split(",")
        if v1 or right[0] == "cgroup2":
            directory = root / left[4].lstrip("/")
            found.append(_Mount(left[3], directory, _V1 if v1 else _V2))
    return tuple(found)


def _groups_of(
    root: Path, whose: Iterable[str], mounts: tuple[_Mount, ...]
) -> set[tuple[Path, _Files]]:
    return {group for who in whose for group in _groups(root, who, mounts)}


def _limits_of(groups: Iterable[tuple[Path, _Files]]) -> Iterator[tuple[int, int]]:
    """Yield the limit of each limited group, and what it uses of it."""
    for directory, files in groups:
        limit_bytes = min(_numbers(directory, files.limits), default=_UNLIMITED)
        if limit_bytes >= _UNLIMITED:
            continue
        used_bytes = min(_numbers(directory, (files.usage,)), default=0)
        yield limit_bytes, used_bytes - min(used_bytes, _stat(directory).get(files.reclaimable, 0))


def _groups(root: Path, who: str, mounts: tuple[_Mount, ...]) -> list[tuple[Path, _Files]]:
    """Return the process's own cgroups and their parents, as far up as they are visible here."""
    found = []
    for line in _text(root / "proc" / who / "cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        for mount in mounts:
            v1 = mount.files is _V1 and "memory" in controllers.split(",")
            v2 = mount.files is _V2 and number == "0"
            if v1 or v2:
                found += [(d, mount.files) for d in _upwards(mount, path, mounts)]
    return found


def _upwards(mount: _Mount, path: str, mounts: tuple[_Mount, ...]) -> list[Path]:
    """Return the directories from the group's to the mount point."""
    if ".." in mount.inside.split("/"):
        return _in_whole_tree(mount, path, mounts)
    if ".." in path.split("/"):
        return []  # outside our cgroup namespace: not visible here
    inside = mount.inside.rstrip("/")
    # In a container with the host's cgroup namespace only our own part is mounted, or the path
    # names nothing here: then the mount point itself is the group.
    relative = path[len(inside) :] if path.startswith(inside) else ""
    return _to_top(mount.directory / relative.strip("/"), mount.directory)


def _in_whole_tree(mount: _Mount, path: str, mounts: tuple[_Mount, ...]) -> list[Path]:
    """Return the same if the whole tree was mounted into this container, which has a cgroup
    namespace of its own. All paths start at our own group there, and go up by "..": so we look for
    our group in the tree, by the inode that the other mount has."""
    own = next((m.directory for m in mounts if m.files is mount.files and m.inside == "/"), None)
    steps = [step for step in path.split("/") if step]
    up = steps.count("..")
    names = own and _found(own, mount.directory, mount.inside.split("/").count(".."))
    if not names or up > len(names):
        return []
    group = mount.directory.joinpath(*names[: len(names) - up], *steps[up:])
    return _to_top(group, mount.directory)


@cache
def _found(own: Path, tree: Path, depth: int) -> tuple[str, ...] | None:
    """Return where the group that is mounted at ``own`` is in ``tree``; it does not move."""
    with suppress(OSError):
        inode = own.stat().st_ino
        for place in tree.glob("/".join("*" * depth)):
            if place.stat().st_ino == inode:
                return place.relative_to(tree).parts
    return None


def _to_top(directory: Path, top: Path) -> list[Path]:
    found = [directory]
    while directory != top:
        directory = directory.parent
        found.append(directory)
    return found


def _numbers(directory: Path, names: Iterable[str]) -> list[int]:
    texts = (_text(directory / name).strip() for name in names)
    return [int(text) for text in texts if text.isdigit()]  # "max": no limit


def _stat(directory: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(directory / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        if error.errno in NO_MORE:
            raise GpuError(
                "host-unreadable",
                f"{path} cannot be read: {error.strerror}.",
                "If the Kiwi daemon has too many files open, raise its limit (ulimit -n).",
            ) from error
        return ""
