"""The limits and defaults of a daemon in one frozen place, each with its unit and its reason.

``peer_limits.py`` has the limits on what all peers of a daemon may take together. A limit that
belongs to one module and is not a setting is in that module.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiwi_core.units import GIB, KIB, MIB, NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ENV_SOCKET_DIR = "KIWI_SOCKET_DIR"
ENV_STATE_DIR = "KIWI_STATE_DIR"
ENV_DISABLE = "KIWI_DISABLE"
PLACING_LOCK = "placing.lock"
"""File in the socket directory that a program locks while it chooses between GPUs."""

ENV_DAEMON_ARGS = "KIWI_DAEMON_ARGS"
"""More arguments for a daemon that is started automatically, written as in a shell."""

GPU_DEVICES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/nvhost-ctrl", "/dev/dxg")
"""One of these exists if there is an NVIDIA driver; the last is WSL's."""

ENV_GPU = "KIWI_GPU"
ENV_PAGER = "KIWI_PAGER"
"""What moves a program's GPU memory: one of ``PAGERS``."""

AUTO = "auto"
"""Value of ``KIWI_PAGER``, and the default: the library where this machine has proven itself, else
the driver."""
CHECKPOINT = "checkpoint"
"""Value of ``KIWI_PAGER``: the driver moves a program's GPU memory, from outside."""
INPROCESS = "inprocess"
"""Value of ``KIWI_PAGER``: a library that is preloaded into the program moves it."""
PAGERS = (AUTO, CHECKPOINT, INPROCESS)


@dataclass(frozen=True)
class Config:
    """The defaults. Tests and the command line make another with ``dataclasses.replace``."""

    tq_ns: int = 30 * NS_PER_S
    """Time quantum: much longer than a swap (seconds), much shorter than a coffee break."""

    tq_min_ns: int = 100 * NS_PER_MS
    """A shorter quantum would be all swap, even on the emulator."""

    tq_max_ns: int = 24 * 3600 * NS_PER_S
    """A day: a longer one is certainly a typing error."""

    min_run_ns: int = 2 * NS_PER_S
    """A runner runs at least min(TQ, this) before it may be suspended, whatever the swap costs."""

    swap_floor_factor: float = 1.0
    """A runner runs at least this many measured swap round trips before it may be suspended."""
    tenancy_trips: float = 6.0
    """How long a session that comes back in time keeps its place in the GPU from others, in the
    time that it takes to move both out and in again; at least TQ. 0: no place is kept. Two
    notebooks that move at 2.3 and 6 GB/s lose a tenth less of the GPU's time than with 2, and the
    longest wait is below 8 minutes; with 8 hardly anything more is gained."""

    high_weight: float = 2.0
    """GPU time of a ``high`` session relative to a ``normal`` one, and of a ``normal`` session
    relative to a ``low`` one. A power of two, so that sums of weights are exact."""

    turns_by_owner: bool = True
    """Turns go round the owners of sessions first, then round the sessions of each owner: a user
    who runs three programs gets no more than a user who runs one. ``False``: turns go round
    sessions, for a single user.
    """

    training_share: float = 0.2
    """The least share of its duration that a burst of the class ``training`` gets, under a policy
    that knows shares: a training should end overnight, not in a week."""

    room_margin_fraction: float = 0.03
    """Share of the GPU kept free beside the expected peaks: contexts grow, allocators fragment."""

    room_margin_min_bytes: int = 16 * MIB
    """The least margin; matters on small (emulated) GPUs only."""

    restore_margin_fraction: float = 0.01
    """A page-in needs this share of its size free in addition: a restore that fails for memory can
    never be repeated. It is less than ``room_margin_fraction``, with which the scheduler plans."""

    restore_margin_fixed_bytes: int = 32 * MIB
    """A page-in needs this much free in addition. On small (emulated) GPUs it is at most
    ``restore_margin_fraction`` of the GPU. It is never more than the page-out left free. A process
    takes more than NVML reports (5 and 6 MiB more were seen), and others may grow."""

    restore_margin_min_bytes: int = 8 * MIB
    """``restore_margin_fixed_bytes`` is never cut below this: the 6 MiB that NVML does not report,
    and one allocation unit of the driver."""

    restore_claim_bytes: int = 256 * MIB
    """Where programs outside Kiwi use the GPU, a restore claims this much beside the footprint. The
    claim is allocated just before the restore and freed at once."""

    restore_claim_share: int = 32
    """That claim is at most the GPU's size divided by this (matters on small, emulated GPUs)."""

    checkpoint_room_bytes: int = 64 * MIB
    """The GPU memory that the library in a program keeps free (it is compiled in), because the
    driver needs some to move a program out. While less than half of it is free, no page-out is
    tried. On an H200 with 2 MiB free the driver refused, and could not move that program any more;
    with about 65 MiB free it moved such a program."""

    checkpoint_room_share: int = 64
    """The figure above is at most the GPU's size divided by this (matters on small, emulated
    GPUs)."""

    observe_interval_ns: int = 500 * NS_PER_MS
    """How often the daemon reads memory and utilisation while a session runs."""

    reading_patience_ns: int = 1 * NS_PER_S
    """How long others wait for a reading of the memory that a session has left in the GPU:
    milliseconds, unless the driver hangs; then old numbers are better than no progress.
    """

    lingering_idle_ns: int = 3 * NS_PER_S
    """A burst that a cell's threads keep open, or that a call at the gate began, ends once the GPU
    has been idle for it this long."""

    lock_timeout_ns: int = 10 * NS_PER_S
    """Time for a process to come to rest at a driver call; after it the page-out is refused."""

    room_wait_ns: int = 5 * NS_PER_S
    """Time for newly freed memory to be scrubbed and show up as free; after it the page-in is
    refused, since another program really holds the memory.
    """

    room_patience_ns: int = 10 * NS_PER_S
    """How long a program's allocation waits for room while the obstacle may pass (a refused
    page-out is tried again); after it the program gets an out-of-memory error.
    """

    unowned_left_bytes: int = 256 * MIB
    """The most GPU memory that the preloaded library cannot move and that a page-out leaves in the
    GPU: about a context's size. If there is more than this, the driver's slow checkpoint moves it.
    """

    operation_deadline_min_ns: int = 30 * NS_PER_S
    """Least time that a pager operation gets before its session counts as stuck."""

    operation_deadline_bytes_per_s: int = 500 * MIB
    """Slowest plausible driver (half of the slowest seen): adds bytes / this to a deadline."""

    refusal_backoff_ns: int = 1 * NS_PER_S
    """First wait after a refused operation; doubles up to ``refusal_backoff_max_ns``."""

    refusal_backoff_max_ns: int = 30 * NS_PER_S
    """Longest wait before a refused operation is tried again."""

    host_reserve_bytes: int = 2 * GIB
    """System RAM never used for paged-out memory; but at most a quarter of the total."""

    bring_back: bool = True
    """Whether a hint that a program is about to be used brings its memory back (``bring-back``)."""

    hint_interval_ns: int = 30 * NS_PER_S
    """How long unused memory that a hint brought back is not brought back again for a hint: a user
    who only looks at a notebook now and then must not keep the bus busy."""

    hint_protect_ns: int = 10 * NS_PER_S
    """How long memory that was used or brought back is not paged out for a hint: users go back and
    forth between two notebooks within seconds. So there is at most one swap in ten seconds."""

    residue_idle_ns: int = 600 * NS_PER_S
    """How long a session idles before the driver takes its contexts early, if the contexts of all
    that are out take too much of the GPU: by then its user is not there."""

    residue_pause_ns: int = 10 * NS_PER_S
    """How long contexts that the driver has taken stay out at least, unless a call is known to wait
    for them: moving them takes it half a second each way, so that is at most a tenth of the time.
    """

    request_max_bytes: int = 64 * KIB
    """Longest line that a client may send; HTTP servers take 8–64 KiB. ``kiwi_core.peer_limits``
    has what the connections of a user, and of all users, may make a daemon hold together."""

    frame_max_bytes: int = 1 * MIB
    """Longest line that a daemon may send: the status of 1,000 sessions takes about 540 KB."""

    unused_ns: int = 600 * NS_PER_S
    """A daemon that a notebook or ``kiwi run`` started ends when nobody has needed it for this
    long. A user who restarts a kernel or opens the next notebook within ten minutes finds it with
    its history; a user who has gone home leaves nothing running."""

    hello_within_ns: int = 5 * NS_PER_S
    """A connection without a hello after this time is closed: it takes a place for nothing. A
    client says hello within a millisecond; one whose machine is busy connects again."""

    outbox_max_bytes: int = 2 * MIB
    """The most that the daemon holds for a client that never reads; then the client is dropped. Two
    of the longest lines: one that is half sent and the next. ``outbox-bytes`` of
    ``kiwi_core.peer_limits`` is the limit for all clients of a user."""

    story_max: int = 64
    """Lines in the story of a session."""

    history_kept_ns: int = 3600 * NS_PER_S
    """How long entries of a GPU's history are kept: twice the widest timeline that is drawn."""

    history_max: int = 4096
    """Most ended entries in the history; about 1 MiB, an hour of a cell each second."""

    journal_max_bytes: int = 64 * MIB
    """At this size a journal continues in a new file (days of ordinary use); the last four are kept
    as ``.1`` …"""

    restart_backoff_s: tuple[float, ...] = (0.1, 0.5, 2.0, 5.0, 15.0)
    """Waits before the supervisor starts a crashed daemon again; the last one repeats."""


DEFAULTS = Config()


def pager_of(env: Mapping[str, str], default: str = AUTO) -> str:
    """Return what ``KIWI_PAGER`` in ``env`` asks for; what it cannot mean is ignored."""
    named = env.get(ENV_PAGER, "")
    return named if named in PAGERS else default


def is_disabled(env: Mapping[str, str]) -> bool:
    """Return whether ``KIWI_DISABLE`` switches Kiwi off in programs that have this environment."""
    return is_set(env, ENV_DISABLE)


def is_set(env: Mapping[str, str], name: str) -> bool:
    """Return whether the variable ``name`` says yes: anything but ``0``, ``false`` or ``no``."""
    return env.get(name, "").strip().lower() not in ("", "0", "false", "no")


def gpu_possible() -> bool:
    """Return whether a daemon that is started here could find a GPU, real or emulated."""
    return ENV_DAEMON_ARGS in os.environ or any(map(os.path.exists, GPU_DEVICES))


def socket_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return the directory of the daemons' sockets: ``$KIWI_SOCKET_DIR``, else ``/run/kiwi`` if it
    exists, else ``$XDG_RUNTIME_DIR/kiwi``, else a private directory under the temp dir.

    Whoever creates it checks owner and mode.
    """
    from pathlib import Path  # not above: every kernel imports this module for its numbers

    env = os.environ if env is None else env
    if named := env.get(ENV_SOCKET_DIR):
        return Path(named)
    shared = Path("/run/kiwi")
    if shared.is_dir():
        return shared
    if runtime := env.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kiwi"
    import tempfile  # for the same reason; rarely needed

    return Path(tempfile.gettempdir()) / f"kiwi-{os.getuid()}"


def state_dir(sockets: Path) -> Path:
    """Return the directory of journals and rosters: ``$KIWI_STATE_DIR``, else ``state/`` beside the
    sockets (its process ids mean nothing after a reboot, so it may be lost with the sockets)."""
    from pathlib import Path

    named = os.environ.get(ENV_STATE_DIR)
    return Path(named) if named else sockets / "state"
