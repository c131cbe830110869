"""Containers, pods and batch jobs, by the names of control groups.

In two containers everybody may be uid 1000, so a uid alone does not identify a user. The control
group does: only the program that starts containers names it, and a process cannot leave it without
privileges on the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final


class ContainerKind(Enum):
    POD = "pod"
    CONTAINER = "container"
    JOB = "job"


@dataclass(frozen=True)
class Group:
    """The container, pod or batch job of a control group."""

    kind: ContainerKind
    id: str


HIDDEN: Final = "?"
"""The container of a process whose control group cannot be read. It equals no other container."""

OF_A_USER: Final = "user.slice"
"""The systemd slice below which users make control groups, and choose their names."""

_UUID: Final = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}"
_NAMES: Final = (
    # "kubepods-burstable-pod1b4e….slice" (systemd driver), "pod1b4e…" (cgroupfs). The kubelet
    # names pods from files by a digest.
    (ContainerKind.POD, re.compile(rf"(?:^|-)pod({_UUID}|[0-9a-f]{{32}})(?:\.slice)?$")),
    # "docker-….scope", "libpod-….scope", "cri-containerd-….scope", "crio-….scope", or the bare id.
    (ContainerKind.CONTAINER, re.compile(r"(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$")),
    (ContainerKind.JOB, re.compile(r"^job_(\d{1,20})$")),
)


def group_of(cgroups: str) -> Group | None:
    """Return what a process belongs to whose ``/proc/<pid>/cgroup`` has the text ``cgroups``;
    ``None``: neither pod, container nor batch job.

    The outermost name counts: a program that may make control groups makes them below its own.
    """
    for line in cgroups.splitlines():
        _, _, path = line.partition(":")[2].partition(":")
        if found := _outermost(path):
            return found
    return None


def _outermost(path: str) -> Group | None:
    for name in path.split("/"):
        if name == OF_A_USER:
            return None
        for kind, pattern in _NAMES:
            if found := pattern.search(name):
                return Group(kind, found[1].replace("_", "-"))
    return None


def container_of(pid: int | str) -> str:
    """Return the id of the pod or container of a process; "": it is in none; ``HIDDEN``: the
    process has ended, or is not visible here.

    Batch jobs of one uid belong to one person, so they count as no container.
    """
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            group = group_of(file.read())
    except OSError:
        return HIDDEN
    return "" if group is None or group.kind is ContainerKind.JOB else group.id
