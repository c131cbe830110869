"""Tests of each row of the table of what peers can make a daemon hold.

One user exceeds the share and is refused or has to wait, which is counted, and another user is
served.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import TYPE_CHECKING

import pytest
from patience import wait_until
from unprivileged import (
    BOB,
    RootDaemon,
    bursts,
    crowd,
    flood,
    needs_other_users,
    root_daemon,
)

from kiwi_core import peer_limits as limits
from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.base.connection import Connection
from kiwi_core.daemon.base.message_turns import MessageTurns
from kiwi_core.daemon.base.shares import Share, Shares
from kiwi_core.peer_limits import PEER_LIMITS, RESERVE, PeerLimit, fitted
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Excess = Callable[[RootDaemon], AbstractContextManager[object]]

FEW_DESCRIPTORS = 2000
"""With so few, the limits on descriptors are about a fifth, and reached quickly."""

BY_NAME = {limit.name: limit for limit in fitted(FEW_DESCRIPTORS)}


USERS_OF_EXCESS = itertools.count(54400)
"""Each test takes another uid, since used requests and connections come back slowly."""


def more_of(role: str, count: int, *said: dict[str, object]) -> Excess:
    return lambda daemon: crowd(daemon, role, count, *said, uid=next(USERS_OF_EXCESS))


def beyond(name: str) -> int:
    return BY_NAME[name].per_user + 20


USERS = 7
"""The users who take all they may, one after the other; each leaves half of the rest."""


EXCESS: dict[str, Excess] = {
    limits.CONNECTIONS: more_of("many", beyond(limits.CONNECTIONS)),
    limits.SILENT: more_of("silent", beyond(limits.SILENT)),
    limits.ARRIVALS: lambda daemon: flood(
        daemon, "(connect and close)", uid=next(USERS_OF_EXCESS)
    ),
    limits.REQUESTS: lambda daemon: flood(
        daemon, "ping", processes=1, uid=next(USERS_OF_EXCESS)
    ),
    limits.SESSIONS: more_of("session", beyond(limits.SESSIONS)),
    limits.QUEUE_PLACES: more_of(
        "session", beyond(limits.QUEUE_PLACES), {"type": "acquire", "burst": 1}
    ),
    limits.PROGRAMS: more_of("pager", beyond(limits.PROGRAMS)),
    limits.WATCHES: more_of(
        "many", beyond(limits.WATCHES), {"type": "get-status", "watch": True}
    ),
    limits.RELEASES: more_of("session", 1, *[{"type": "release"}] * beyond(limits.RELEASES)),
    limits.USAGE_QUESTIONS: more_of("many", 20, *[{"type": "get-usage"}] * 100),
    limits.ROOM_REQUESTS: more_of(
        "pager", 3,
        *[{"type": "want-room", "request": n, "bytes": 200 * MIB} for n in range(1, 250)],
    ),
    limits.EXPECTED: more_of(
        "session", 1,
        *[
            {"type": "expect", "key": f"k{n}", "for_s": 60.0}
            for n in range(beyond(limits.EXPECTED))
        ],
    ),
    limits.INBOX_BYTES: more_of("half", 300),
}  # fmt: skip


ELSEWHERE = {limits.OUTBOX_BYTES}
"""It takes more answers than one test can request; see the test after the next."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RootDaemon]:
    needs_other_users()
    with root_daemon(descriptors=FEW_DESCRIPTORS) as one:
        yield one
        assert "crashed" not in one.log()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "limit", [x for x in PEER_LIMITS if x.name not in ELSEWHERE], ids=lambda limit: limit.name
)
def test_beyond_a_share_one_is_refused_and_others_are_served(
    daemon: RootDaemon, limit: PeerLimit
) -> None:
    before = daemon.refused(limit.name)
    with EXCESS[limit.name](daemon):
        wait_until(lambda: daemon.refused(limit.name) > before, f"{limit.name}: a refusal")
        if limit.name not in (limits.QUEUE_PLACES, limits.ROOM_REQUESTS):  # they have the GPU
            assert len(bursts(daemon, 3, uid=BOB)["grants_s"]) == 3
        assert daemon.status()
    wait_until(lambda: not daemon.status()["sessions"], "all sessions gone")


def test_few_descriptors_are_said() -> None:
    assert Shares().warning() == ""
    few = Shares(fitted(300))
    assert "open files" in few.warning()
    assert f"{few[limits.SESSIONS].limit.most} sessions" in few.warning()


def test_each_row_says_what_how_much_and_why() -> None:
    names = [limit.name for limit in PEER_LIMITS]
    assert len(set(names)) == len(names)
    for limit in PEER_LIMITS:
        assert limit.what
        assert limit.why.endswith(".")
        assert limit.per_user > 0
        assert limit.most is None or limit.per_user <= limit.most / 2 or limit.per_user <= 2048
        assert (limit.most is None) == (limit.per_s > 0), "turns are for what is used up"


class Deaf:
    """Accepts connections and reads nothing from them."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []

    def connected(self, connection: Connection) -> None:
        self.connections.append(connection)

    def received(self, _connection: Connection, _message: object) -> None: ...
    def disconnected(self, _connection: Connection) -> None: ...
    def turned_away(self, _code: str) -> None: ...


def test_answers_that_nobody_reads_are_held_for_each_user_up_to_the_share() -> None:
    async def run() -> None:
        shares, receiver = Shares(), Deaf()
        turns, share = MessageTurns(shares), shares[limits.OUTBOX_BYTES]
        line = b"x" * MIB
        most = share.limit.per_user // len(line) + 10
        pairs = [socket.socketpair() for _ in range(most)]
        for ours, _ in pairs:
            ours.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(receiver, DEFAULTS, turns), ours
            )
        for connection in receiver.connections:
            connection.send_line(line)
            assert share.used <= share.limit.per_user
        assert share.refused
        closed = [connection for connection in receiver.connections if connection.closed]
        assert 0 < len(closed) < most, "the last ones, and no others"
        assert closed == receiver.connections[-len(closed) :]
        for connection in receiver.connections:
            connection.abort()
        while share.used:  # the test's time limit ends this loop
            await asyncio.sleep(0)
        for _, theirs in pairs:
            theirs.close()

    asyncio.run(run())


@pytest.mark.parametrize("limit", [x for x in PEER_LIMITS if x.most], ids=lambda limit: limit.name)
def test_the_rule_of_shares(limit: PeerLimit) -> None:
    share = Shares([limit], {0})[limit.name]
    most = limit.most or 0
    for uid in range(1, USERS):
        takes_all_it_may(share, uid, max(1, most // 512))
        assert share._of[uid] <= limit.per_user
        assert share.used < most
        assert share.free(10_000), "a newcomer finds room"
    assert share.free(0, most - share.used + RESERVE), "and root has its reserve"
    assert not share.free(0, most - share.used + RESERVE + 1)
    for uid in range(1, USERS):
        share.give_back(uid, share._of[uid])
    assert share.used == 0


def takes_all_it_may(share: Share, uid: int, step: int) -> None:
    while share.free(uid, step):
        share.take(uid, step)


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 4096, 1 << 20])
def test_limits_fit_what_descriptors_there_are(descriptors: int) -> None:
    found = fitted(descriptors)
    needed = sum((limit.most or 0) * limit.descriptors for limit in found)
    assert needed <= max(descriptors, 8)
    assert all(limit.per_user >= 1 for limit in found)
    if descriptors == 1 << 20:
        assert found == PEER_LIMITS
