"""Limits on what all peers together can make a daemon hold, with each user's share and the reason.

A peer is any process of any user who may open the socket. Everything that a peer can take (memory,
descriptors, time) has a limit in this table. The limits on a single connection are in ``config.py``
(``request_max_bytes``, ``hello_within_ns``, ``outbox_max_bytes``). A daemon counts each row in its
metrics (``kiwi_peer_*``, label ``what``), and a test walks the table.

**The rule of shares.** A user who holds h of something may hold one more if h is less than
``per_user`` and less than what is still free (a *dynamic threshold*, as in the shared buffers of
network switches). So one user gets at most half of it, the next one half of the rest, and so on: a
user who comes when others take all they can still finds room. Root and the daemon's owner have no
share, only the limit, and ``RESERVE`` places beyond it: ``kiwi status`` works when all else is
full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kiwi_core.units import KIB, MIB

RESERVE: Final = 64
"""Places beyond a limit for root and the daemon's owner: terminals, a Jupyter server, a metrics
server."""


@dataclass(frozen=True)
class PeerLimit:
    """One limit. ``most`` is for all users together; ``None``: they take turns instead.
    ``per_user`` is the most for one user. For things that are spent and not held (requests, new
    connections), it is the size of a token bucket, and ``per_s`` is the bucket's refill per second.
    ``descriptors`` is the number of descriptors that each item takes.
    """

    name: str
    what: str
    most: int | None
    per_user: int
    why: str
    per_s: int = 0
    descriptors: int = 0


CONNECTIONS: Final = "connections"
SILENT: Final = "silent-connections"
ARRIVALS: Final = "new-connections"
REQUESTS: Final = "requests"
SESSIONS: Final = "sessions"
QUEUE_PLACES: Final = "queue-places"
PROGRAMS: Final = "linked-programs"
WATCHES: Final = "watches"
RELEASES: Final = "releases"
USAGE_QUESTIONS: Final = "usage-questions"
ROOM_REQUESTS: Final = "room-requests"
EXPECTED: Final = "expected-sessions"
INBOX_BYTES: Final = "inbox-bytes"
OUTBOX_BYTES: Final = "outbox-bytes"

PEER_LIMITS: Final = (
    PeerLimit(
        CONNECTIONS, "open connections", 4096, 2048,
        "Each takes a descriptor and a few KiB. A thousand notebooks of one user, each with a "
        "program that has Kiwi's library, fit.",
        descriptors=1,
    ),
    PeerLimit(
        SILENT, "connections on which no hello has come yet", 1024, 256,
        "A client says hello within a millisecond. When a thousand notebooks come back after a "
        "restart, the daemon takes them in small groups, so few are silent at any time. A user's "
        "oldest silent connection makes way for a new one after a second.",
    ),
    PeerLimit(
        ARRIVALS, "new connections", None, 4096,
        "After a restart all of a user's connections come back at once, twice if something "
        "fails. Beyond that a person opens a few a minute, and a poller a few a second.",
        per_s=100,
    ),
    PeerLimit(
        REQUESTS, "requests; each 0.1 ms of the daemon's CPU time counts as one", None, 20_000,
        "A cell is two requests. A thousand busy notebooks of one user (200 cells a second) take "
        "400 to 800 a second, and the benchmarks of a single lease some 10,000 in a few seconds. "
        "The rate is a fifth of a core. A user above it is read more slowly, and loses nothing.",
        per_s=2_000,
    ),
    PeerLimit(
        SESSIONS, "sessions (processes that may ask for the GPU)", 2048, 1024,
        "Each takes a descriptor and the story of its last bursts. A thousand notebooks of one "
        "user are what a daemon is tested with.",
        descriptors=1,
    ),
    PeerLimit(
        QUEUE_PLACES, "bursts in the queue for the GPU", 2048, 32,
        "A user who waits behind another one waits for at most this many bursts. A user's further "
        "bursts wait outside the queue, in order, and lose nothing: the user's own would go first.",
    ),
    PeerLimit(
        PROGRAMS, "programs that have Kiwi's library", 2048, 1024,
        "Each takes a descriptor until its process ends. As many as sessions: most sessions have "
        "one.",
        descriptors=1,
    ),
    PeerLimit(
        WATCHES, "connections that receive each change", 2048, 128,
        "The status of a thousand sessions is half a MiB, and each watcher gets it. A Jupyter "
        "server needs one, each `kiwi status --watch` one.",
    ),
    PeerLimit(
        RELEASES, "requests to move memory out that wait for a look at the GPU", 256, 32,
        "A person asks for one at a time, and each takes some milliseconds.",
    ),
    PeerLimit(
        USAGE_QUESTIONS, "questions about usage that wait for the disk", 128, 32,
        "A Jupyter server asks for many readers; they are read one after the other.",
    ),
    PeerLimit(
        ROOM_REQUESTS, "allocations that wait for room", 256, 64,
        "The scheduler looks at all of them after each event, which takes some 20 µs for each. "
        "Threads of one user's programs that wait at the same time come to a dozen.",
    ),
    PeerLimit(
        EXPECTED, "sessions that a server has announced and that have not joined", 2048, 1024,
        "As many as sessions: each kernel of a server is announced once.",
    ),
    PeerLimit(
        INBOX_BYTES, "bytes that were received and not handled yet", 64 * MIB, 16 * MIB,
        "One read is at most 256 KiB, and an honest client's whole line a few hundred bytes. 64 "
        "connections of a user may each be behind by a whole read.",
    ),
    PeerLimit(
        OUTBOX_BYTES, "bytes of answers that were not read yet", 64 * MIB, 16 * MIB,
        "A client that is stopped leaves at most one long line unread (1 MiB): 16 of a user may "
        "be stopped at once while they read the longest.",
    ),
)  # fmt: skip

SPARE_DESCRIPTORS: Final = 128
"""Descriptors for the daemon itself: journal, state, driver, movers, and child processes."""

UNHANDLED_LINE_BYTES: Final = 4 * KIB
"""The number of received bytes that are cut into lines at a time."""


def fitted(descriptors: int) -> tuple[PeerLimit, ...]:
    """Return ``PEER_LIMITS`` for a process with a limit of this many descriptors. If they do not
    suffice, the limits that take descriptors get smaller in proportion, with their shares.
    """
    takers = [limit for limit in PEER_LIMITS if limit.descriptors]
    needed = sum((limit.most or 0) * limit.descriptors for limit in takers)
    available = descriptors - SPARE_DESCRIPTORS - RESERVE * len(takers)
    part = max(0.0, min(1.0, available / needed))
    return tuple(_smaller(limit, part) if limit.descriptors else limit for limit in PEER_LIMITS)


def _smaller(limit: PeerLimit, part: float) -> PeerLimit:
    most = max(1, int((limit.most or 0) * part))
    return replace(limit, most=most, per_user=max(1, int(limit.per_user * part)))
