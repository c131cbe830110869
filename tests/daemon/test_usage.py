"""Tests of the usage of users and notebooks, with real schedulers and daemons, over crashes, and of
who sees names."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import somebody as other_users
from daemon import PATIENCE_S, wait_until
from somebody import ALICE, BOB
from talker import Talker

from kiwi_core.daemon.base.peers import Peer, Rights
from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.base.steps import Step
from kiwi_core.daemon.reports import bookkeeper as bookkeeper_module
from kiwi_core.daemon.reports.bookkeeper import THE_REST, Bookkeeper
from kiwi_core.daemon.reports.ledger import FINE_S, Ledger
from kiwi_core.daemon.reports.usage import ALL_OTHERS, ROWS_MAX, UsageReporter
from kiwi_core.daemon.roster.registry import Known
from kiwi_core.errors import CallerError
from kiwi_core.peer_limits import USAGE_QUESTIONS
from kiwi_core.sched import events as ev
from kiwi_core.sched.model.accounts import Account
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.units import GIB, SessionId
from kiwi_core.wire.messages import GetUsage, UsageBy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from daemon import Daemon
    from session_program import SessionProgram
    from somebody import Somebody

    from kiwi_core.wire.messages import UsageReport, UsageRow

Start = Callable[..., "Daemon"] if TYPE_CHECKING else object
Program = Callable[..., "SessionProgram"] if TYPE_CHECKING else object

ROOT, ONE, OTHER = Peer(1, 0, 0), Peer(2, 1000, 1000), Peer(3, 1001, 1001)


# --- real daemons -------------------------------------------------------------------------------


def usage(daemon: Daemon, by: UsageBy = UsageBy.NOTEBOOK, since_unix_s: float = 0.0) -> UsageReport:
    with daemon.client() as observer:
        return observer.usage(by, since_unix_s)


def row_of(report: UsageReport, name: str) -> UsageRow:
    return next(row for row in report.rows if row.name == name)


def test_usage_is_what_the_scheduler_says_and_outlives_the_daemon(
    start: Start, program: Program
) -> None:
    before_unix_s = time.time()
    daemon = start("1x256MiB", "--tq", "0.5", "--anti-thrash", "always")
    long, short = program(daemon, 150, name="long"), program(daemon, 150, name="short")
    long.start_burst()
    wait_until(long.granted, "the first one has the GPU")
    short.start_burst()
    wait_until(lambda: daemon.session(long.pid).suspensions, "turns are taken")  # type: ignore[union-attr]
    for one in (long, short):
        one.stop_burst()
    daemon.wait_for(lambda s: not s.holders and not s.queue, "all is at rest")
    report = usage(daemon)
    assert report.complete
    assert report.began_unix_s is not None
    assert before_unix_s - FINE_S < report.began_unix_s <= time.time()
    for one in (long, short):
        said, session = row_of(report, one.name), daemon.session(one.pid)
        assert session is not None
        assert said.mine
        assert said.held_s == pytest.approx(session.held_s, abs=1e-6)
        assert said.waited_s + said.suspended_s == pytest.approx(session.waited_s, abs=1e-6)
        assert said.bursts == 2
        assert said.suspensions == session.suspensions
    first = row_of(report, "long")
    assert first.suspended_s > 0
    assert first.moved_out_bytes >= 150 << 20
    assert first.moved_in_bytes >= 150 << 20
    assert first.moving_s > 0
    (user,) = usage(daemon, UsageBy.USER).rows
    assert user.held_s == pytest.approx(sum(row.held_s for row in report.rows))
    assert usage(daemon, since_unix_s=time.time() + 10 * FINE_S).rows == []
    # A clean end writes the rest; the next daemon continues from there.
    assert daemon.terminate() == 0
    daemon.start()
    again = usage(daemon)
    assert {row.name: row.bursts for row in again.rows} == {"long": 2, "short": 2}
    assert row_of(again, "long").held_s >= first.held_s


def test_usage_by_job_sums_the_programs_of_each(
    start: Start, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start("1x256MiB")
    program(daemon, 20, name="no job")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    program(daemon, 20, name="one"), program(daemon, 20, name="two")
    daemon.wait_for(lambda s: not s.holders and not s.queue, "all is at rest")
    rows = usage(daemon, UsageBy.JOB).rows
    assert {row.name: row.bursts for row in rows} == {"": 1, "41": 2}
    assert {row.name for row in usage(daemon).rows} == {"no job", "one", "two"}


def test_a_daemon_killed_in_mid_burst_loses_little_and_counts_nothing_twice(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB")
    joined = time.monotonic()
    one, other = program(daemon, 20, name="one"), program(daemon, 20, name="other")
    daemon.wait_for(lambda s: not s.holders, "at rest")
    began = time.monotonic()
    one.start_burst()
    wait_until(one.granted, "it has the GPU")
    wait_until(lambda: row_of(usage(daemon), "one").held_s > 0.3, "its burst is counted")
    known = usage(daemon)  # the file has it by now
    old = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != old and len(s.sessions) == 2, "a new daemon")
    after = usage(daemon)
    assert row_of(after, "one").held_s >= row_of(known, "one").held_s
    one.stop_burst()
    assert other.intact()
    daemon.wait_for(lambda s: not s.holders and not s.queue, "at rest")
    ended = usage(daemon)
    assert row_of(ended, "one").bursts == 2
    assert row_of(ended, "other").bursts == 2
    in_all_s = row_of(ended, "one").held_s - row_of(known, "one").held_s
    assert in_all_s <= time.monotonic() - began
    assert row_of(ended, "one").held_s <= time.monotonic() - joined


somebody = other_users.somebody


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_other_users_get_one_sum(start: Start, somebody: Callable[..., Somebody]) -> None:
    daemon = start("1x64MiB")
    daemon.directory.chmod(0o755)
    (path,) = daemon.sockets()
    alice, bob = somebody(path, ALICE), somebody(path, BOB)
    for who, name in ((alice, "secret.ipynb"), (bob, "bobs.ipynb")):
        who.hello(role="session", name=name)
        said = who.ask("acquire", burst=1)
        while said["type"] == "waiting":
            said = who.answer()
        assert said["type"] == "granted"
        assert who.ask("withdraw", burst=1)["type"] == "withdrawn"
    rows = {row["name"]: row for row in bob.ask("get-usage", by="notebook")["rows"]}
    assert set(rows) == {"bobs.ipynb", ""}
    assert (rows[""]["owner"], rows[""]["mine"], rows[""]["bursts"]) == ("another user", False, 1)
    assert rows["bobs.ipynb"]["mine"]
    with Talker(path) as root:
        root.hello()
        rows = {row["name"]: row for row in root.ask("get-usage", by="notebook")["rows"]}
        assert {row["owner"] for row in rows.values()} == {str(ALICE), str(BOB)}
        assert set(rows) == {"secret.ipynb", "bobs.ipynb"}


# --- the bookkeeper alone -----------------------------------------------------------------------


class Names:
    """Replace the registry: every session's name is its id."""

    def __init__(self, uid: int = 1000) -> None:
        self.uid = uid

    def known(self, session: str) -> Known:
        return Known(self.uid, f"{session}.ipynb", "")


class Place:
    """A scheduler with sessions, and its bookkeeper on a file."""

    def __init__(self, path: Path, wall_s: Callable[[], float] = time.time) -> None:
        self.scheduler = Scheduler(10 * GIB, host_budget_bytes=64 * GIB)
        self.ledger = Ledger(path)
        self.keeper = Bookkeeper(self.scheduler, Names(), self.ledger, wall_s=wall_s)  # type: ignore[arg-type]

    def feed(self, event: ev.Event) -> None:
        now_ns = time.monotonic_ns()
        actions = self.scheduler.handle(event, now_ns)
        self.keeper.after(Step(event, actions, self.scheduler.happenings, now_ns))

    def begin(self, *names: str) -> None:
        for name in names:
            self.feed(ev.SessionJoined(session=SessionId(name)))
            self.feed(ev.LeaseRequested(session=SessionId(name), burst=1))

    def totals(self) -> dict[str, Account]:
        return {total.name: total.account for total in self.ledger.totals(0, by="name")[1]}


def test_sums_reach_the_disk_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeper_module, "SAVE_EVERY_S", 0.02)

    async def scene() -> None:
        place = Place(tmp_path / "u")
        place.begin("a")
        while not place.totals():  # the test's time limit ends this loop
            await asyncio.sleep(0.01)
        await place.keeper.close(PATIENCE_S)

    asyncio.run(scene())


def test_a_departing_session_keeps_its_last_seconds(tmp_path: Path) -> None:
    async def scene() -> None:
        place = Place(tmp_path / "u")
        place.begin("a", "b")
        assert await place.keeper.up_to_date(PATIENCE_S)
        await asyncio.sleep(0.05)
        place.feed(ev.SessionLost(session=SessionId("a")))
        (final,) = [place.scheduler.story(SessionId("a"))]
        assert final
        await place.keeper.close(PATIENCE_S)
        assert place.totals()["a.ipynb"].held_ns >= 50_000_000
        assert place.totals()["a.ipynb"].bursts == 1
        # The same process may join again and counts from zero.
        again = Place(tmp_path / "u")
        again.begin("a")
        await again.keeper.close(PATIENCE_S)
        assert again.totals()["a.ipynb"].bursts == 2

    asyncio.run(scene())


def test_a_disk_that_is_away_costs_nothing_and_is_tried_again(tmp_path: Path) -> None:
    async def scene() -> None:
        place = Place(tmp_path / "away" / "u")
        place.begin("a")
        assert not await place.keeper.up_to_date(PATIENCE_S)
        assert place.keeper.failing
        place.begin("b")
        (tmp_path / "away").mkdir()
        assert await place.keeper.up_to_date(PATIENCE_S)
        assert not place.keeper.failing
        await place.keeper.close(PATIENCE_S)
        assert place.totals()["a.ipynb"].bursts == 1
        assert place.totals()["b.ipynb"].waited_ns > 0  # nobody knows yet that both would fit

    asyncio.run(scene())


def test_what_waits_for_the_disk_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookkeeper_module, "UNWRITTEN_MAX", 3)
    hour = [0.0]

    async def scene() -> None:
        place = Place(tmp_path / "away" / "u", wall_s=lambda: 1e9 + hour[0])
        place.begin("a")
        for n in range(6):
            hour[0] = n * 3600.0
            await asyncio.sleep(0.002)
            assert not await place.keeper.up_to_date(PATIENCE_S)
        (tmp_path / "away").mkdir()
        assert await place.keeper.up_to_date(PATIENCE_S)
        began_s, _ = place.ledger.totals(0)
        assert began_s == pytest.approx(1e9 + 3 * 3600, abs=FINE_S)
        await place.keeper.close(PATIENCE_S)

    asyncio.run(scene())


def test_made_up_names_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookkeeper_module, "NAMES_MAX", 3)

    async def scene() -> None:
        place = Place(tmp_path / "u", wall_s=lambda: 1e9)
        place.begin(*(f"s{n}" for n in range(10)))
        await place.keeper.close(PATIENCE_S)
        totals = place.totals()
        assert len(totals) == 4
        assert THE_REST in totals

    asyncio.run(scene())


def test_a_slow_disk_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk writes in the end is written once."""
    add = Ledger.add
    goes_on = threading.Event()

    def slow(self: Ledger, *args: Any) -> None:
        goes_on.wait(PATIENCE_S)
        add(self, *args)

    monkeypatch.setattr(Ledger, "add", slow)

    async def scene() -> None:
        place = Place(tmp_path / "u")
        place.begin("a")
        assert not await place.keeper.up_to_date(0.05)
        goes_on.set()
        await place.keeper.close(PATIENCE_S)
        assert place.totals()["a.ipynb"].bursts == 1

    asyncio.run(scene())


# --- the reporter alone -------------------------------------------------------------------------


def reported(
    path: Path, reader: Peer, totals: dict[tuple[int, str], Account], by: UsageBy
) -> list[UsageRow]:
    async def scene() -> list[UsageRow]:
        from kiwi_core.daemon.reports.ledger import UsageBucket

        place = Place(path)
        rows = {
            UsageBucket(FINE_S * 5, uid, name): account for (uid, name), account in totals.items()
        }
        place.ledger.add(rows, FINE_S * 5)
        reporter = UsageReporter(
            place.keeper, place.ledger, Rights(daemon_uid=1001), Shares()[USAGE_QUESTIONS]
        )
        return (await reporter.report(reader, GetUsage(by=by))).rows

    return asyncio.run(scene())


def test_rows_are_bounded_and_no_second_is_missing(tmp_path: Path) -> None:
    totals = {(1000, f"n{n}"): Account(held_ns=10**9 * (n + 1)) for n in range(ROWS_MAX + 20)}
    rows = reported(tmp_path / "u", ROOT, totals, UsageBy.NOTEBOOK)
    assert len(rows) == ROWS_MAX + 1
    assert rows[-1].owner == ALL_OTHERS
    assert rows[0].name == f"n{ROWS_MAX + 19}"
    held_s = sum(row.held_s for row in rows)
    assert held_s == pytest.approx(sum(account.held_ns for account in totals.values()) / 1e9)


@pytest.mark.parametrize("by", list(UsageBy))
def test_who_may_see_whom(tmp_path: Path, by: UsageBy) -> None:
    totals = {(uid, f"of-{uid}"): Account(held_ns=uid * 10**9) for uid in (1000, 1001, 1002)}
    for n, (reader, owners) in enumerate(
        [(ROOT, 3), (OTHER, 3), (ONE, 2)]  # root, the daemon's owner, a user
    ):
        rows = reported(tmp_path / f"u{n}", reader, totals, by)
        assert len(rows) == owners
        assert sum(row.held_s for row in rows) == 3003
        assert [row.mine for row in rows].count(True) == (reader is not ROOT)
        if reader is ONE:
            assert rows[-1].owner == "another user"
            assert rows[-1].name == ""


def test_a_user_in_a_container_sees_sums_only(tmp_path: Path) -> None:
    """The file counts by uid, and two containers may have the same one."""
    totals = {(1000, "secret.ipynb"): Account(held_ns=10**9)}
    for uid in (0, 1000):
        reader = Peer(2, uid, uid, container="c0ffee")
        (row,) = reported(tmp_path / str(uid), reader, totals, UsageBy.NOTEBOOK)
        assert (row.owner, row.name, row.mine) == ("another user", "", False)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    async def scene() -> None:
        place = Place(tmp_path / "gone" / "u")
        reporter = UsageReporter(
            place.keeper, place.ledger, Rights(daemon_uid=0), Shares()[USAGE_QUESTIONS]
        )
        with pytest.raises(CallerError) as refused:
            await reporter.report(ROOT, GetUsage())
        assert refused.value.code == "no-usage"

    asyncio.run(scene())


def test_questions_of_one_connection_are_bounded(start: Start) -> None:
    daemon = start("1x64MiB")
    (path,) = daemon.sockets()
    with Talker(path) as talker:
        talker.hello()
        line = b'{"type":"get-usage"}\n'
        talker.raw(line * 50)
        answers = [talker.hear() for _ in range(50)]
    kinds = [answer["type"] for answer in answers if answer is not None]
    assert kinds.count("usage") >= 1
    assert {a["code"] for a in answers if a is not None and a["type"] == "error"} <= {"busy"}
    assert kinds.count("error") > 0
