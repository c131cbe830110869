"""Whether a process runs at all. A stopped one answers nothing, and a driver call about it hangs
until it goes on. Read from ``/proc``; no driver call."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.gpu import processes

if TYPE_CHECKING:
    from kiwi_core.gpu.processes import ProcessRef

BY_SIGNAL: Final = "stopped by Ctrl-Z: it waits until it goes on"
BY_DEBUGGER: Final = "stopped by a debugger: it waits until that lets it go on"
BY_ANOTHER: Final = (
    "checkpointed by a program outside Kiwi (cuda-checkpoint, CRIU …): it waits until that "
    "program brings it back"
)
BY_FREEZER: Final = "frozen with its control group: it waits until that is thawed"

_CGROUPS: Final = Path("/sys/fs/cgroup")
_BESIDE_VERSION_1: Final = "unified"
"""The directory where systemd mounts version 2 on a machine that has both."""


def why_stopped(ref: ProcessRef) -> str:
    """Return why ``ref`` does not run, as the rest of a sentence; empty: it runs, or has ended."""
    return why_halted(ref) or why_frozen(ref)


def why_halted(ref: ProcessRef) -> str:
    """Return the same as ``why_stopped``, but without the control group, which takes longer."""
    stat = processes.stat_of(ref.pid)
    if stat is None or stat.start_ticks != ref.start_ticks or stat.state not in ("T", "t"):
        return ""
    return BY_SIGNAL if stat.state == "T" else BY_DEBUGGER


def has_driver(ref: ProcessRef) -> bool:
    """Return whether ``ref`` has loaded the CUDA driver. False also if that cannot be read: the
    driver does not let this process move such a process either."""
    try:
        return "/libcuda.so" in Path(f"/proc/{ref.pid}/maps").read_text(errors="replace")
    except OSError:
        return False


def why_frozen(ref: ProcessRef) -> str:
    """Return why ``ref`` is frozen, by the freezer of control groups, version 2 or 1; empty: no."""
    return BY_FREEZER if any(_is_frozen(place) for place in _places(ref.pid)) else ""


def _places(pid: int) -> tuple[Path, ...]:
    try:
        return _places_in(processes.text_of(f"/proc/{pid}/cgroup"), _CGROUPS)
    except OSError:
        return ()


@lru_cache(maxsize=256)
def _places_in(groups: str, mounted: Path) -> tuple[Path, ...]:
    """Return the files that say whether a process with these control groups is frozen. Cached, as
    most processes share their control groups, and each look at a session asks."""
    found = []
    for line in groups.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            events = Path(path.lstrip("/")) / "cgroup.events"
            found += [mounted / events, mounted / _BESIDE_VERSION_1 / events]
        elif "freezer" in controllers.split(","):
            found.append(mounted / "freezer" / path.lstrip("/") / "freezer.state")
    return tuple(found)


def _is_frozen(place: Path) -> bool:
    try:
        words = processes.text_of(place).split()
    except OSError:
        return False
    return words in (["FROZEN"], ["FREEZING"]) or "frozen 1" in " ".join(words)
