"""The named states and reasons that scheduler, pager, protocol and user interfaces share."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

Direction = Literal["out", "in"]
"""Where a move takes memory: out of the GPU to system RAM, or back."""


class AntiThrash(str, Enum):
    """Whether runners take turns: if they do not fit, always, or never (at the users' risk)."""

    ON = "on"
    ALWAYS = "always"
    OFF = "off"


class Priority(str, Enum):
    """A session's priority class, set by an admin. ``Config`` has the weight and share of each."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    TRAINING = "training"
    """Like normal, but its long bursts never get less than a set share of the time."""


PRIORITIES = tuple(priority.value for priority in Priority)


class SessionState(str, Enum):
    """A session's state as all user interfaces name it."""

    IDLE = "idle"
    """Not in a burst; its memory, if any, is in the GPU."""
    WAITING = "waiting"
    """Waits for the GPU; its burst has not begun."""
    RUNNING = "running"
    """Holds the lease."""
    SUSPENDED = "suspended"
    """Stopped in the middle of a burst (memory in or out) and queued again."""
    PAGING_OUT = "paging-out"
    PAGED_OUT = "paged-out"
    """Not in a burst; its memory is in system RAM."""
    PAGING_IN = "paging-in"
    LOST = "lost"
    """The contents of its GPU memory are gone."""


class Residency(str, Enum):
    """Where the GPU memory of a process or a session is, and whether it may call the driver.

    The only words for this in the code: each is the participle of the operation that leads to it.
    ``docs/glossary.md`` has a table of the borders where other parties' words are translated.
    """

    RESIDENT = "resident"
    """In the GPU; the process is free to run."""
    SUSPENDED = "locked"
    """In the GPU; the process waits at its next driver call. (Journals call it "locked".)"""
    PAGED_OUT = "paged-out"
    """In system RAM, some of it at least; the process waits at its next driver call."""
    LOST = "lost"
    """Nowhere: the contents are gone for good."""


NOT_FREE: Final = frozenset({Residency.SUSPENDED, Residency.PAGED_OUT})
"""Where the memory of a process can be that waits at its next driver call."""


class MovedBy(str, Enum):
    """What moves a session's GPU memory."""

    CHECKPOINT = "checkpoint"
    """The driver, from outside."""
    INPROCESS = "inprocess"
    """The library that is preloaded into its processes."""
    BOTH = "both"
    """The library moves the memory that it owns, the driver the rest."""


class GateOnly(str, Enum):
    """Why a program's library is only the gate, and the driver moves its memory.
    ``daemon/user_texts.py`` has the words."""

    NOT_ASKED = "not-asked"
    """Nobody has asked for anything else."""
    TOOL = "tool"
    """A debugger, profiler or checker watches the program's memory, or could."""
    DIRECT = "direct-access"
    """A disk, a network or the CPU uses GPU memory without a call that the gate could hold."""
    COHERENT = "coherent"
    """On this machine the CPU uses all GPU memory like its own."""
    SEVERAL_GPUS = "several-gpus"
    """The program has used memory of more than one GPU."""
    HOOKED = "other-hook"
    """Another library in the program replaces functions of the driver."""
    IPC = "ipc-refused"
    """The program has asked for a handle to share its memory, which owned memory does not have."""
    CRASHED = "crashed-before"
    """The program has crashed shortly after its memory was moved."""
    UNPROVEN = "unproven"
    """Nobody has asked, and this machine has not proven itself yet."""
    PROOF_FAILED = "proof-failed"
    """Nobody has asked, and the machine's proof has failed."""
    UNREADABLE = "unreadable"
    """The daemon may not look at the process."""
    DOUBTED = "in-doubt"
    """The GPU has gained far less than the library said that it had moved."""
    REFUSED = "refused"
    """The library could not move the memory out, because of errors of the driver."""
    LATE = "late"
    """The daemon's answer did not come in time."""


class Reason(str, Enum):
    """Why an operation was refused. Nothing changed in the target."""

    LOCK_TIMEOUT = "lock-timeout"
    """The process did not come to rest in time (a long kernel, a stuck collective)."""
    DRAINING = "draining"
    """Work that the program has given to the GPU has not ended yet. Its new work waits at the gate
    meanwhile, so the next try comes soon and begins where this one ended."""
    NO_ROOM = "no-room"
    """The GPU did not have enough verified free memory for a restore."""
    NO_HOST_MEMORY = "no-host-memory"
    """System RAM cannot hold the memory."""
    NO_JOB_MEMORY = "no-job-memory"
    """The memory limit of its own job or container is too small for the memory."""
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
    """A notice to a session's user, in the notebook and in ``kiwi status``.
    ``daemon/user_texts.py`` has the texts."""

    SUSPENDED = "suspended"
    """Its quantum ended in the middle of the burst; it is queued again without asking."""
    RESUMED = "resumed"
    SERIALISING = "serialising"
    """The runners no longer fit together: one at a time from now on."""
    PAGE_OUT_REFUSED = "page-out-refused"
    """Its memory could not be paged out, so others wait longer. The detail says why."""
    LITTLE_RAM = "little-ram"
    """The memory limit of its job or container is too small for its memory to be paged out."""
    PAGE_IN_REFUSED = "page-in-refused"
    """Its memory could not be paged in yet; Kiwi tries again."""
    BLOCKED_HOST_MEMORY = "blocked-host-memory"
    """It waits because system RAM cannot take what would have to be paged out first."""
    BLOCKED_REFUSED = "blocked-refused"
    """It waits because another session's memory could not be paged out."""
    BLOCKED_OUTSIDE = "blocked-outside"
    """It waits because programs outside Kiwi hold memory that it needs."""
    BLOCKED_UNGUARDED = "blocked-unguarded"
    """It waits because a program without Kiwi's gate computes, which cannot be stopped safely."""
    STOPPED = "stopped"
    """Its process is stopped (Ctrl-Z, a frozen control group, a debugger), so it takes no turn."""
    KEPT_OUT = "kept-out"
    """A user keeps it out of the GPU (``kiwi suspend``) until it is resumed."""
    STUCK = "stuck"
    """A driver call on it hangs."""
    UNSTUCK = "unstuck"
    LOST = "lost"
    """The contents of its GPU memory are gone; the kernel must be restarted."""


class HistoryKind(str, Enum):
    """What a session did during one entry of its GPU's history."""

    HELD = "held"
    """It held the lease."""
    WAITED = "waited"
    """It waited with a burst that had not begun."""
    SUSPENDED = "suspended"
    """It was stopped in the middle of a burst and waited to go on."""
    OUT = "out"
    """Its memory was paged out; such an entry may overlap those of the kinds above."""
    IN = "in"
    """Its memory was paged in; such an entry may overlap those of the kinds above."""
