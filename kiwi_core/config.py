"""Every limit and default of Kiwi in one frozen place, each with its unit and its reason."""

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
ENV_GPU = "KIWI_GPU"
ENV_PAGER = "KIWI_PAGER"

CHECKPOINT = "checkpoint"
"""Of ``KIWI_PAGER``: the driver moves a program's GPU memory, from outside."""
INPROCESS = "inprocess"
"""Of ``KIWI_PAGER``: a library that is preloaded into the program does."""


@dataclass(frozen=True)
class Config:
    """The defaults. Tests and the command line make another with ``dataclasses.replace``."""

    tq_ns: int = 30 * NS_PER_S
    """Time quantum: long against a swap (seconds), short against a coffee."""

    tq_min_ns: int = 100 * NS_PER_MS
    """Below this a quantum would be all swap, even on the emulator."""

    tq_max_ns: int = 24 * 3600 * NS_PER_S
    """A day: more is certainly a typing error."""

    min_run_ns: int = 2 * NS_PER_S
    """A runner runs at least min(TQ, this) before it may be suspended, whatever the swap costs."""

    swap_floor_factor: float = 1.0
    """A runner runs at least this many measured swap round trips before it may be suspended."""

    high_weight: float = 2.0
    """What a session of the class ``high`` gets where one of ``normal`` gets 1, and one of ``low``
    what ``normal`` gets where ``high`` gets 1. A power of two, so that sums of it are exact."""

    training_share: float = 0.2
    """Of the time that a burst of the class ``training`` takes, what it gets at least, under a
    policy that knows shares: a training that is to end overnight, not in a week."""

    room_margin_fraction: float = 0.03
    """Of the GPU, kept free beside the expected peaks: contexts grow, allocators fragment."""

    room_margin_min_bytes: int = 16 * MIB
    """The least margin; matters on small (emulated) GPUs only."""

    restore_margin_fraction: float = 0.01
    """Of what a page-in brings back, to be free beside it: a restore that fails for memory can
    never be repeated. Less than the margin above, which the scheduler plans with."""

    restore_margin_fixed_bytes: int = 32 * MIB
    """To be free beside that, but at most the same fraction of the GPU (small ones are emulated). A
    process takes more than NVML says of it: 5 MiB more were seen, and others may grow meanwhile."""

    restore_margin_min_bytes: int = 8 * MIB
    """The least of the latter: what was seen, and one of the driver's allocation units."""

    restore_claim_bytes: int = 256 * MIB
    """Where programs outside Kiwi use the GPU, a restore needs so much more for a moment: it is
    allocated with the footprint, and given up, just before. What others found to be enough."""

    restore_claim_share: int = 32
    """Of the GPU, one part in so many is the most of that (matters on small, emulated ones)."""

    observe_interval_ns: int = 500 * NS_PER_MS
    """How often the daemon reads memory and utilisation while somebody runs."""

    reading_patience_ns: int = 1 * NS_PER_S
    """How long others wait for a reading of what a session has left in the GPU: milliseconds
    unless the driver hangs, and then old numbers are better than no progress."""

    lingering_idle_ns: int = 3 * NS_PER_S
    """Threads left over by a cell, and bursts that a program's library began, count as finished
    when the GPU saw nothing of them this long."""

    lock_timeout_ns: int = 10 * NS_PER_S
    """For a process to come to rest at a driver call; past it the page-out is refused."""

    room_wait_ns: int = 5 * NS_PER_S
    """For memory that was just freed to be scrubbed and show up as free, before a page-in is
    refused; past it somebody else really holds it."""

    room_patience_ns: int = 10 * NS_PER_S
    """For room that a program's allocation asks for, where what hinders may pass (a refused
    page-out is tried again); past it the program is told that there is no memory."""

    unowned_left_bytes: int = 256 * MIB
    """GPU memory of a process that the preloaded library cannot move, and that a page-out leaves in
    the GPU: about a context's size. Above it the driver's checkpoint, which is slow, moves it."""

    operation_deadline_min_ns: int = 30 * NS_PER_S
    """Least time a pager operation gets before its target counts as stuck."""

    operation_deadline_bytes_per_s: int = 500 * MIB
    """Slowest believable driver (a sixth of the slowest seen): adds bytes / this to a deadline."""

    refusal_backoff_ns: int = 1 * NS_PER_S
    """First wait after a refused operation; doubles up to ``refusal_backoff_max_ns``."""

    refusal_backoff_max_ns: int = 30 * NS_PER_S
    """Longest wait before a refused operation is tried again."""

    host_reserve_bytes: int = 2 * GIB
    """System RAM never used for paged-out memory; but at most a quarter of what there is."""

    bring_back: bool = True
    """Whether a hint that a program is about to be used brings its memory back (``bring-back``)."""

    hint_interval_ns: int = 30 * NS_PER_S
    """What a hint brought back and nobody used is not brought back again before: somebody who only
    looks at a notebook now and then must not keep the bus busy."""

    hint_protect_ns: int = 10 * NS_PER_S
    """What was used or brought back less long ago does not go out for a hint: people go back and
    forth between two notebooks within seconds. A swap each ten seconds at most."""

    request_max_bytes: int = 64 * KIB
    """Longest line that a client may send; HTTP servers take 8–64 KiB. How many connections there
    may be, and all else that peers can make a daemon hold, is in ``kiwi_core.peer_limits``."""

    frame_max_bytes: int = 1 * MIB
    """Longest line that a daemon may send: the status of 1,000 sessions takes about 540 KB."""

    hello_within_ns: int = 5 * NS_PER_S
    """A connection that has not said hello by then is closed: it holds a place for nothing. A
    client says it within a millisecond; one whose machine is busy connects again."""

    outbox_max_bytes: int = 2 * MIB
    """What a client that never reads may make the daemon hold for it; then it is dropped. Two of
    the longest lines: one that is half sent and the next."""

    story_max: int = 64
    """Lines of its own history that a session keeps."""

    history_kept_ns: int = 3600 * NS_PER_S
    """How long who held, waited and moved is remembered: twice the widest timeline drawn."""

    history_max: int = 4096
    """Entries of it that have ended; about 1 MiB, an hour of a cell each second."""

    journal_max_bytes: int = 64 * MIB
    """At this size a journal goes on in a new file (days of ordinary use); the last four are kept
    as ``.1`` …"""

    restart_backoff_s: tuple[float, ...] = (0.1, 0.5, 2.0, 5.0, 15.0)
    """Waits before the supervisor starts a crashed daemon again; the last one repeats."""


DEFAULTS = Config()


def socket_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where the daemons' sockets are: ``$KIWI_SOCKET_DIR``, else ``/run/kiwi`` if it exists, else
    ``$XDG_RUNTIME_DIR/kiwi``, else a private directory under the temp dir.

    Only names it; who creates it checks owner and mode.
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
    import tempfile  # likewise, and rarely needed

    return Path(tempfile.gettempdir()) / f"kiwi-{os.getuid()}"


def state_dir(sockets: Path, env: Mapping[str, str] | None = None) -> Path:
    """Where journals and rosters are: ``$KIWI_STATE_DIR``, else ``state/`` beside the sockets
    (process ids in it mean nothing after a reboot, so it may go with them)."""
    from pathlib import Path

    env = os.environ if env is None else env
    named = env.get(ENV_STATE_DIR)
    return Path(named) if named else sockets / "state"
