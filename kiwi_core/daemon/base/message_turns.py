"""Choose whose message is next: users take turns, so that one user's flood delays nobody else.

A message from a user who has not just had a turn is handled at once. Nearly all messages are of
this kind, and the check takes a microsecond. Others wait in line. The line is served in slices of a
millisecond, one user after another, and the event loop handles everything else between two slices:
a newcomer waits for a slice or two, whatever a flood is made of.

Each user and each connection has a stock of requests (``TokenBucket``). A connection whose stock is
used up is not read for a while: the kernel then holds the client back, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from kiwi_core.peer_limits import ARRIVALS, REQUESTS
from kiwi_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.base.shares import Share, Shares
    from kiwi_core.peer_limits import PeerLimit

SLICE_NS: Final = 1 * NS_PER_MS
"""A user's turn ends with the message that passes this. Some twenty ordinary messages: long against
a round of the event loop (20 µs), short against what people notice."""

TURNS_NS: Final = 2 * NS_PER_MS
"""Time for all turns before the loop handles other events."""

UNNOTED_NS: Final = SLICE_NS // 4
"""Time for messages handled at once that may be left from earlier rounds of the loop. To begin a
new round after each message would take a quarter of the time of an ordinary one."""

REQUEST_NS: Final = NS_PER_MS // 10
"""A message that takes longer counts as several requests: the status of a thousand sessions is not
a ``ping``. An ordinary message takes half of this. Only the CPU time of the daemon's thread counts:
a client is not to blame for programs that keep the daemon from running."""

CONNECTION_PART: Final = 2
"""One connection gets its user's stock and rate divided by this: a program that runs wild leaves
the other notebooks of its user their part."""

WAIT_MIN_S: Final = 0.005
"""Shortest interval of looks at an empty stock: ten requests at the full rate."""

ACCOUNTS_MAX: Final = 1024
"""Most users without a connection whose stock is remembered until it is full again."""


class TokenBucket:
    """A stock of requests that refills with time. It may be overdrawn by one request."""

    __slots__ = ("_at_ns", "_level", "_most", "_per_ns")

    def __init__(self, most: int, per_s: int) -> None:
        self._most = self._level = float(most)
        self._per_ns = per_s / NS_PER_S
        self._at_ns = 0

    def spend(self, amount: float, now_ns: int) -> None:
        self._fill(now_ns)
        self._level -= amount

    def empty_ns(self, now_ns: int) -> int:
        """Return the time until it is above zero; 0 if it is."""
        if self._level > 0:
            return 0
        self._fill(now_ns)
        return 0 if self._level > 0 else int(-self._level / self._per_ns) + 1

    def full(self, now_ns: int) -> bool:
        self._fill(now_ns)
        return self._level >= self._most

    def _fill(self, now_ns: int) -> None:
        level = self._level + (now_ns - self._at_ns) * self._per_ns
        self._level = level if level < self._most else self._most
        self._at_ns = now_ns


class Talker(Protocol):
    """A connection, as this module sees it."""

    account: UserTurns
    bucket: TokenBucket

    def ready(self) -> bool:
        """Return whether it has a message to handle, and may be answered."""
        ...

    def handle_next(self) -> None:
        """Handle one message."""
        ...

    def caught_up(self) -> None:
        """Read from the socket again: no message is left to handle."""
        ...


class UserTurns:
    """The state of one user. ``waiting`` are the connections that share the user's turn, in
    order.
    """

    __slots__ = ("arrivals", "bucket", "connections", "in_line", "spent_ns", "uid", "waiting")

    def __init__(self, uid: int, requests: TokenBucket, arrivals: TokenBucket) -> None:
        self.uid = uid
        self.bucket = requests
        self.arrivals = arrivals
        self.connections = 0
        self.waiting: deque[Talker] = deque()
        self.in_line = False
        """True while in line, or asleep until its stock refills."""
        self.spent_ns = 0
        """Time spent on this user in this round of the loop (and, up to ``UNNOTED_NS``, before)."""


class MessageTurns:
    """The line of users. Runs in the loop's thread. Every message passes ``now`` and ``paid``."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._requests: Share = shares[REQUESTS]
        self._limit: PeerLimit = self._requests.limit
        self._arrivals: PeerLimit = shares[ARRIVALS].limit
        self._loop = asyncio.get_running_loop()
        self._accounts: dict[int, UserTurns] = {}
        self._line: deque[UserTurns] = deque()
        self._serving = False
        self._spenders: list[UserTurns] = []
        self._spent_ns = 0
        self._round_ends = False
        """True while the end of this round is due."""

    # --- users ----------------------------------------------------------------------------------

    def account(self, uid: int) -> UserTurns:
        found = self._accounts.get(uid)
        if found is None:
            if len(self._accounts) >= ACCOUNTS_MAX:
                # Forget users who have gone, once their stock is full: coming again must not refill
                # it.
                now_ns = time.monotonic_ns()
                self._accounts = {
                    uid: one
                    for uid, one in self._accounts.items()
                    if one.connections
                    or not (one.bucket.full(now_ns) and one.arrivals.full(now_ns))
                }
            requests = TokenBucket(self._limit.per_user, self._limit.per_s)
            arrivals = TokenBucket(self._arrivals.per_user, self._arrivals.per_s)
            found = self._accounts[uid] = UserTurns(uid, requests, arrivals)
        return found

    def bucket(self) -> TokenBucket:
        """Return the stock of a new connection."""
        per_s = self._limit.per_s // CONNECTION_PART
        return TokenBucket(self._limit.per_user // CONNECTION_PART, per_s)

    # --- at once --------------------------------------------------------------------------------

    def now(self, talker: Talker, now_ns: int) -> bool:
        """Return whether the next message of ``talker`` may be handled without waiting in line."""
        account = talker.account
        return (
            account.spent_ns < SLICE_NS
            and self._spent_ns < TURNS_NS
            and not account.in_line
            and not account.bucket.empty_ns(now_ns)
            and not talker.bucket.empty_ns(now_ns)
        )

    def paid(self, talker: Talker, began_ns: int, began_cpu_ns: int) -> int:
        """Account for a message of ``talker`` that was handled, and return the time now. Both
        arguments are times of its beginning; ``began_cpu_ns`` is from ``time.thread_time_ns()``."""
        now_ns = time.monotonic_ns()
        took_ns = now_ns - began_ns
        account = talker.account
        amount = 1.0
        if took_ns > REQUEST_NS:  # otherwise the CPU time is no longer either
            amount = max(amount, (time.thread_time_ns() - began_cpu_ns) / REQUEST_NS)
        account.bucket.spend(amount, now_ns)
        talker.bucket.spend(amount, now_ns)
        if not account.spent_ns:
            self._spenders.append(account)
        account.spent_ns += took_ns
        self._spent_ns += took_ns
        if self._spent_ns > UNNOTED_NS and not self._round_ends:

            def new_round() -> None:
                for account in self._spenders:
                    account.spent_ns = 0
                self._spenders.clear()
                self._spent_ns = 0
                self._round_ends = False

            self._round_ends = True
            self._loop.call_soon(new_round)
        return now_ns

    # --- in line --------------------------------------------------------------------------------

    def add(self, talker: Talker) -> None:
        """Put ``talker``, which is not in line, in line to have its messages handled later."""
        account = talker.account
        account.waiting.append(talker)
        if not account.in_line:
            self._join(account)

    def _join(self, account: UserTurns) -> None:
        account.in_line = True
        self._line.append(account)
        if not self._serving:
            self._serving = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        ends_ns = time.monotonic_ns() + TURNS_NS
        while self._line:
            account = self._line.popleft()
            account.in_line = False
            now_ns = self._turn(account)
            if account.waiting and not account.in_line:
                account.in_line = True
                self._line.append(account)
            if now_ns >= ends_ns:
                break
        self._serving = bool(self._line)
        if self._serving:
            self._loop.call_soon(self._serve)

    def _turn(self, account: UserTurns) -> int:
        """Serve one user, a message of each connection in rotation. Return the time now."""
        now_ns = time.monotonic_ns()
        ends_ns = now_ns + SLICE_NS
        while account.waiting and now_ns < ends_ns:
            if wait_ns := account.bucket.empty_ns(now_ns):
                self._requests.refused += 1
                account.in_line = True  # asleep
                self._later(wait_ns, self._join, account)
                break
            talker = account.waiting.popleft()
            if not talker.ready():
                talker.caught_up()
            elif wait_ns := talker.bucket.empty_ns(now_ns):
                self._requests.refused += 1
                self._later(wait_ns, self.add, talker)
            else:
                began_cpu_ns = time.thread_time_ns()
                talker.handle_next()
                now_ns = self.paid(talker, now_ns, began_cpu_ns)
                if talker.ready():
                    account.waiting.append(talker)
                else:
                    talker.caught_up()
        return now_ns

    def _later(self, wait_ns: int, what: Callable[[Any], None], whom: object) -> None:
        self._loop.call_later(max(WAIT_MIN_S, wait_ns / NS_PER_S), what, whom)
