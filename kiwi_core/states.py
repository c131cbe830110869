"""The named states and reasons that scheduler, pager, protocol and screens share."""

from __future__ import annotations

from enum import Enum
from typing import Literal

Direction = Literal["out", "in"]
"""Where a move takes memory: out of the GPU to system RAM, or back."""


class AntiThrash(str, Enum):
    """When runners are serialised: only when they do not fit, always, or never (users' risk)."""

    ON = "on"
    ALWAYS = "always"
    OFF = "off"


class Priority(str, Enum):
    """A session's priority class; an admin's setting. What each is worth stands in ``Config``."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    TRAINING = "training"
    """Like normal, and its long bursts never fall below a set share of the time."""


PRIORITIES = tuple(priority.value for priority in Priority)


class SessionState(str, Enum):
    """A session's state as every surface names it."""

    IDLE = "idle"
    """Not in a burst; its memory, if any, is in the GPU."""
    WAITING = "waiting"
    """Asked for the GPU for a burst that has not begun."""
    RUNNING = "running"
    """Holds the lease."""
    SUSPENDED = "suspended"
    """Held in the middle of a burst (memory in or out) and queued again."""
    PAGING_OUT = "paging-out"
    PAGED_OUT = "paged-out"
    """Not in a burst; its memory is in system RAM."""
    PAGING_IN = "paging-in"
    LOST = "lost"
    """The contents of its GPU memory are gone."""


class Residency(str, Enum):
    """Where a process's GPU memory is, as the *driver* says it (not as anybody remembers it)."""

    RESIDENT = "resident"
    """In the GPU, process free to run."""
    LOCKED = "locked"
    """In the GPU, process held at its next driver call."""
    PAGED_OUT = "paged-out"
    """In system RAM, process held."""
    LOST = "lost"
    """The driver says that it failed for good."""


class MovedBy(str, Enum):
    """What moves a session's GPU memory."""

    CHECKPOINT = "checkpoint"
    """The driver, from outside."""
    INPROCESS = "inprocess"
    """The library that is preloaded into its processes."""
    BOTH = "both"
    """The library what it owns, the driver the rest."""


class Reason(str, Enum):
    """Why an operation was refused. Nothing changed in the target."""

    LOCK_TIMEOUT = "lock-timeout"
    """The process did not come to rest in time (a long kernel, a stuck collective)."""
    NO_ROOM = "no-room"
    """The GPU had not enough verified free memory for a restore."""
    NO_HOST_MEMORY = "no-host-memory"
    """System RAM cannot hold it."""
    UNSUPPORTED = "unsupported"
    """The driver cannot checkpoint this process (managed memory, MPS, MIG, too old …)."""
    NOT_PERMITTED = "not-permitted"
    DRIVER = "driver"
    """Any other answer of the driver; the detail has its words."""
    GONE = "gone"
    """The process ended meanwhile."""
    STOPPED = "stopped"
    """The process does not run (Ctrl-Z, a debugger, a frozen control group)."""


class Notice(str, Enum):
    """What a session's user is told, in the notebook and in ``kiwi status``. The words for each
    are made at the surface."""

    SUSPENDED = "suspended"
    """Its quantum ended in the middle of the burst; it is queued again by itself."""
    RESUMED = "resumed"
    SERIALISING = "serialising"
    """The runners no longer fit together: one at a time from now on."""
    PAGE_OUT_REFUSED = "page-out-refused"
    """Its memory could not be moved out, so others wait longer. The detail says why."""
    PAGE_IN_REFUSED = "page-in-refused"
    """Its memory could not be brought back yet; Kiwi tries again."""
    BLOCKED_HOST_MEMORY = "blocked-host-memory"
    """Waits because system RAM cannot take what would have to go out first."""
    BLOCKED_REFUSED = "blocked-refused"
    """Waits because another session's memory could not be moved out."""
    BLOCKED_OUTSIDE = "blocked-outside"
    """Waits because programs outside Kiwi hold memory that it needs."""
    BLOCKED_UNGUARDED = "blocked-unguarded"
    """Waits because a program without Kiwi's gate is at work, which cannot be stopped safely."""
    STOPPED = "stopped"
    """Its process is stopped (Ctrl-Z, a frozen control group, a debugger), so it takes no turn."""
    KEPT_OUT = "kept-out"
    """Somebody keeps it out of the GPU until they resume it (``kiwi suspend``)."""
    STUCK = "stuck"
    """A driver call on it hangs."""
    UNSTUCK = "unstuck"
    LOST = "lost"
    """The contents of its GPU memory are gone; the kernel must be restarted."""


class HistoryKind(str, Enum):
    """What a session did in one stretch of its GPU's history."""

    HELD = "held"
    """Had the lease."""
    WAITED = "waited"
    """Waited for a burst that had not begun."""
    SUSPENDED = "suspended"
    """Was stopped in the middle of a burst and waited to go on."""
    OUT = "out"
    """Its memory moved to system RAM (beside the others)."""
    IN = "in"
    """Its memory moved back to the GPU (beside the others)."""
