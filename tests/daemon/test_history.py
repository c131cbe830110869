"""Tests of the history that daemons keep of leases, waits and moves, and of who sees names in
it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest
from daemon import wait_until
from talker import Talker

from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.base.peers import Peer, Rights
from kiwi_core.daemon.reports.status import Reporter
from kiwi_core.daemon.roster.registry import DEPARTED_MIN, SessionRecord, SessionRegistry
from kiwi_core.pager.api import ProcessRef
from kiwi_core.sched import events as ev
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.units import GIB, SessionId
from kiwi_core.wire.framing import decode_daemon
from kiwi_core.wire.messages import HistoryReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    from kiwi_core.wire.messages import HistoryEntry

Start = Callable[..., "Daemon"] if TYPE_CHECKING else object
Program = Callable[..., "SessionProgram"] if TYPE_CHECKING else object

ALICE, BOB, ROOT = Peer(10, 1000, 1000), Peer(11, 1001, 1001), Peer(12, 0, 0)


# --- real daemons -------------------------------------------------------------------------------


def test_the_timeline_of_two_that_do_not_fit_can_be_read_off(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB", "--tq", "0.5", "--anti-thrash", "always")
    long, short = program(daemon, 150, name="long"), program(daemon, 150, name="short")
    at_rest(daemon)
    with daemon.client() as observer:
        since = observer.history().last
        long.start_burst()
        wait_until(long.granted, "the first one has the GPU")
        short.start_burst()
        wait_until(short.granted, "the second one has its turn")
        short.stop_burst()
        rounds = long.rounds()
        wait_until(lambda: long.rounds() > rounds, "the first one goes on")
        daemon.wait_for(lambda s: s.holders and not s.queue, "the second one's end has arrived")
        now = observer.history(since)
        long.stop_burst()
        wait_until(lambda: not observer.status().holders, "all is over")
        later = observer.history(now.last)
        whole = observer.history(since)
        assert observer.status().history_serial == whole.last
    ids = {told.name: session for session, told in whole.sessions.items()}
    mine, other = _of(whole, ids["long"]), _of(whole, ids["short"])
    # Each turn is followed by a suspension, until the other session is done.
    kinds = [entry.kind.value for entry in mine if entry.kind.value in ("held", "suspended")]
    assert kinds[:3] == ["held", "suspended", "held"]
    assert kinds == [("held", "suspended")[n % 2] for n in range(len(kinds))]
    turns = [entry.kind.value for entry in other if entry.kind.value not in ("out", "in")]
    assert turns[:2] == ["waited", "held"]
    for entries in (mine, other):
        moves = [entry for entry in entries if entry.kind.value in ("out", "in")]
        assert {entry.kind.value for entry in moves} == {"out", "in"}
        assert all(e.ok and e.bytes_moved >= 150 << 20 and not e.hinted for e in moves)
    _assert_one_holder_at_a_time(whole)
    # An entry that was open at the first query ends under the same id in the changes since.
    (running,) = [e for e in now.entries if e.kind.value == "held" and e.ended_ago_s is None]
    (ended,) = [e for e in later.entries if e.id == running.id]
    assert ended.ended_ago_s is not None
    assert ended.serial > now.last >= running.serial


def at_rest(daemon: Daemon) -> None:
    """Wait until the last ends of bursts have arrived."""
    daemon.wait_for(lambda s: not s.holders and not s.queue, "nobody wants the GPU")


def _of(report: HistoryReport, session: str) -> list[HistoryEntry]:
    entries = [entry for entry in report.entries if entry.session == session]
    return sorted(entries, key=lambda entry: -entry.began_ago_s)


def _assert_one_holder_at_a_time(report: HistoryReport) -> None:
    turns = sorted(
        (-entry.began_ago_s, -(entry.ended_ago_s or 0.0))
        for entry in report.entries
        if entry.kind.value == "held"
    )
    for (_, ended), (began, _) in pairwise(turns):
        assert ended <= began + 1e-6


def test_an_ended_session_is_still_named_and_a_restart_begins_a_new_history(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB")
    one, other = program(daemon, 20, name="short-lived.py"), program(daemon, 20, name="other.py")
    at_rest(daemon)
    one.kill()
    daemon.wait_for(lambda s: [x.pid for x in s.sessions] == [other.pid], "it has ended")
    with daemon.client() as observer:
        history = observer.history()
    assert {told.name for told in history.sessions.values()} == {"short-lived.py", "other.py"}
    assert {entry.kind.value for entry in history.entries} >= {"held"}
    killed_s = time.monotonic()
    old = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != old and s.sessions, "a new daemon")
    with daemon.client() as observer:
        anew = observer.history()
    # A new daemon may take over a burst whose end the old one had not written.
    assert all(entry.began_ago_s < time.monotonic() - killed_s for entry in anew.entries)
    assert {told.name for told in anew.sessions.values()} <= {"other.py"}
    assert other.intact()


def test_a_program_may_ask_in_plain_json(start: Start) -> None:
    daemon = start("1x64MiB")
    with Talker(daemon.sockets()[0]) as talker:
        talker.hello()
        assert talker.ask("get-history") == {
            "type": "history", "last": 0, "entries": [], "sessions": {}, "more": False,
        }  # fmt: skip
        gpu = talker.ask("get-status")["gpu"]
        assert (gpu["history_serial"], gpu["may_set"]) == (0, True)
        assert talker.ask("get-history", since=-1)["code"] == "malformed"


# --- the answer, without a daemon ---------------------------------------------------------------


class World:
    """Sessions of Alice with names of the given length, each of which has held the GPU that
    often."""

    def __init__(self, sessions: int, bursts: int, name: str) -> None:
        self.scheduler = Scheduler(8 * GIB, host_budget_bytes=8 * GIB)
        self.registry = SessionRegistry(lambda _record: None)
        self.registry.remembered = self.scheduler.remembered
        self.now_ns = time.monotonic_ns()
        for number in range(sessions):
            id_ = SessionId(f"k{number}")
            self.join(id_, ALICE.uid, name)
            for burst in range(1, bursts + 1):
                self.scheduler.handle(ev.LeaseRequested(session=id_, burst=burst), self.tick())
                self.scheduler.handle(ev.BurstEnded(session=id_, burst=burst), self.tick())
        self.reporter = Reporter(
            self.scheduler, self.registry, Rights(daemon_uid=0), *cast("list[Any]", [None] * 8),
            errors=list, emulated=False,
        )  # fmt: skip

    def tick(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def join(self, id_: SessionId, uid: int, name: str) -> None:
        ref = ProcessRef(1000, 1)
        self.registry._by_id[id_] = SessionRecord(
            id=id_, ref=ref, uid=uid, name=name, kernel_id=name
        )
        self.scheduler.handle(ev.SessionJoined(session=id_), self.tick())

    def leave(self, id_: str) -> None:
        self.scheduler.handle(ev.SessionLost(session=SessionId(id_)), self.tick())
        record = self.registry.get(id_)
        assert record is not None
        self.registry.remove(record)

    def ask(self, reader: Peer, since: int = 0) -> HistoryReport:
        line = self.reporter.history_line(reader, since)
        assert len(line) <= DEFAULTS.frame_max_bytes + 1
        report = decode_daemon(line.rstrip(b"\n"))
        assert isinstance(report, HistoryReport)
        return report


@pytest.mark.parametrize(("sessions", "bursts", "name"), [(3, 900, "n"), (1500, 2, "\0" * 200)])
def test_what_one_message_cannot_hold_comes_in_parts(sessions: int, bursts: int, name: str) -> None:
    world = World(sessions, bursts, name)
    since, parts, seen = 0, 0, []
    while True:
        part = world.ask(ROOT, since)
        assert [e.serial for e in part.entries] == sorted(e.serial for e in part.entries)
        assert all(since < entry.serial <= part.last for entry in part.entries)
        assert set(part.sessions) == {entry.session for entry in part.entries}
        seen += [entry.id for entry in part.entries]
        since, parts = part.last, parts + 1
        if not part.more:
            break
    assert parts > 1
    assert since == world.scheduler.history_serial
    assert len(seen) == len(set(seen)) == sessions * bursts


def test_names_are_for_those_who_may_know_them_also_afterwards() -> None:
    world = World(2, 1, "secret.ipynb")
    world.leave("k0")
    for reader, name in ((ALICE, "secret.ipynb"), (ROOT, "secret.ipynb"), (BOB, "another user")):
        sessions = world.ask(reader).sessions
        assert {(s.name, s.mine) for s in sessions.values()} == {(name, name != "another user")}
        assert len(sessions) == 2
    assert "secret" not in world.reporter.history_line(BOB, 0).decode()


def test_names_of_the_departed_are_kept_as_long_as_they_are_spoken_of() -> None:
    world = World(1, 1, "spoken-of.ipynb")
    world.leave("k0")
    for number in range(4 * DEPARTED_MIN):
        world.join(SessionId(f"guest{number}"), BOB.uid, "never-used.ipynb")
        world.leave(f"guest{number}")
    assert world.ask(ALICE).sessions["k0"].name == "spoken-of.ipynb"
    assert len(world.registry._departed) <= 2 * DEPARTED_MIN
