"""Tests of what readers see with many sessions, and how often they get it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import virtual_time

from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.base.peers import Peer, Rights
from kiwi_core.daemon.base.steps import Step
from kiwi_core.daemon.engine.gauges import RamGauge
from kiwi_core.daemon.reports import announce
from kiwi_core.daemon.reports.announce import Announcer
from kiwi_core.daemon.reports.filled import filled
from kiwi_core.daemon.reports.status import ANOTHER_USER, Reporter
from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
from kiwi_core.errors import CallerError
from kiwi_core.gpu.nvml import GpuInfo
from kiwi_core.pager.api import ProcessRef
from kiwi_core.sched import events as ev
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash, GateOnly, MovedBy
from kiwi_core.units import GIB, NS_PER_S, SessionId
from kiwi_core.wire.framing import decode_daemon
from kiwi_core.wire.messages import GaugesStatus, StatusReport, StoryLine

ALICE, BOB, ROOT = Peer(10, 1000, 1000), Peer(11, 1001, 1001), Peer(12, 0, 0)


class Sessions:
    """The given number of sessions of Alice, then one of Bob, with names of the given length."""

    def __init__(self, count: int, name: str) -> None:
        self.scheduler = Scheduler(
            8 * GIB,
            config=DEFAULTS,
            tq_ns=NS_PER_S,
            anti_thrash=AntiThrash.ON,
            host_budget_bytes=8 * GIB,
            first_op=1,
        )
        registry = SessionRegistry(lambda _record: None)
        self.records = registry._by_id
        for number in range(count + 1):
            id_ = SessionId(f"k{number}")
            uid = BOB.uid if number == count else ALICE.uid
            ref = ProcessRef(1000 + number, 1)
            self.records[id_] = SessionRecord(id=id_, ref=ref, uid=uid, name=name, kernel_id=name)
            self.scheduler.handle(ev.SessionJoined(session=id_), number)
        gpu = GpuInfo(
            index=0,
            uuid="GPU-1",
            name="g",
            total_bytes=8 * GIB,
            mig=False,
            persistence=None,
            driver_version="1",
        )
        self.reporter = Reporter(
            self.scheduler,
            registry,
            Rights(daemon_uid=0),
            gpu,
            cast(
                "Any",
                SimpleNamespace(
                    connected=lambda _id: False,
                    unowned=lambda _id: {},
                    of=lambda _id: (),
                    why_driver=lambda _id: None,
                ),
            ),
            cast(
                "Any",
                SimpleNamespace(moved_by=lambda _id: MovedBy.CHECKPOINT),
            ),
            cast("Any", SimpleNamespace(arena_bytes=lambda: 0)),
            cast("Any", SimpleNamespace(now=GaugesStatus(), outside=lambda _who, _rights: [])),
            RamGauge(),
            cast("Any", SimpleNamespace(newcomer_wait_s=lambda: None, count=lambda: 0)),
            cast(
                "Any", SimpleNamespace(objection=lambda: GateOnly.UNPROVEN, proof=None, trouble="")
            ),
            errors=list,
            emulated=False,
        )


def _read(line: bytes) -> StatusReport:
    assert len(line) <= DEFAULTS.frame_max_bytes + 1
    report = decode_daemon(line.rstrip(b"\n"))
    assert isinstance(report, StatusReport)
    return report


def test_only_ones_own_names_are_shown() -> None:
    world = Sessions(2, "secret.ipynb")
    report = _read(world.reporter.status_line(BOB, NS_PER_S))
    hidden, mine = report.gpu.sessions[0], report.gpu.sessions[2]
    assert (hidden.name, hidden.owner, hidden.pid, hidden.kernel_id) == (
        ANOTHER_USER, ANOTHER_USER, 0, "",
    )  # fmt: skip
    assert (mine.name, mine.pid, mine.mine) == ("secret.ipynb", 1002, True)
    everything = _read(world.reporter.status_line(ROOT, NS_PER_S))
    assert {session.name for session in everything.gpu.sessions} == {"secret.ipynb"}


def test_a_field_of_a_report_that_nobody_knows_is_an_error() -> None:
    """Otherwise a misspelt name would show the default for ever."""
    line = SimpleNamespace(text="joined", ago_ns=NS_PER_S)
    with pytest.raises(TypeError, match=r"StoryLine\.ago_s"):
        filled(StoryLine, line, text="joined")


def test_notebooks_of_one_name_are_told_apart_by_their_folders() -> None:
    world = Sessions(4, "same.ipynb")
    folders = ["/home/ann/vision/v1", "/home/ann/text/v1", "", "/home/ann/text/v1"]
    records = [world.records[SessionId(f"k{number}")] for number in range(5)]
    for record, folder in zip(records, [*folders, "/home/bob"], strict=True):
        record.folder = folder
    names = ["vision/v1/same.ipynb", "text/v1/same.ipynb", "same.ipynb", "text/v1/same.ipynb"]
    assert shown(world, ALICE) == [*names, ANOTHER_USER]
    assert shown(world, ROOT) == [*names, "same.ipynb"], "Bob has one of that name"
    records[1].name, records[3].folder = "other.ipynb", ""
    assert shown(world, ALICE)[:2] == ["v1/same.ipynb", "other.ipynb"]
    records[0].folder = ""
    assert shown(world, ALICE)[0] == "same.ipynb"


def shown(world: Sessions, reader: Peer) -> list[str]:
    return [one.name for one in _read(world.reporter.status_line(reader, NS_PER_S)).gpu.sessions]


def test_a_story_is_ones_own_only() -> None:
    world = Sessions(1, "n")
    assert world.reporter.story(ALICE, "k0").lines
    for session in ("k0", "k7"):
        with pytest.raises(CallerError) as caught:
            world.reporter.story(BOB, session)
        assert caught.value.code == "no-such-session"


def test_a_status_fits_one_line_however_long_the_names_are() -> None:
    """It says how many sessions it omits; these are not the reader's."""
    world = Sessions(2047, "\N{SNOWMAN}" * 200)
    all_ = _read(world.reporter.status_line(BOB, NS_PER_S)).gpu
    assert any(session.mine for session in all_.sessions)
    shown = _read(world.reporter.status_line(ROOT, NS_PER_S)).gpu
    hidden = 2048 - len(shown.sessions)
    assert hidden > 0
    assert shown.errors == [f"{hidden} sessions are not shown: there are too many."]


# --- pacing -------------------------------------------------------------------------------------


@dataclass
class Watcher:
    peer: Peer = ALICE
    choked: bool = False
    lines: list[bytes] = field(default_factory=list)

    def send_line(self, line: bytes) -> None:
        self.lines.append(line)


@dataclass
class Connections:
    watchers: list[Watcher]


class Slow:
    """A reporter that counts its reports and takes time for each."""

    def __init__(self, block_s: float = 0.0) -> None:
        self.made = 0
        self._block_s = block_s

    def waiting(self, _now_ns: int) -> list[Any]:
        return []

    def status_line(self, peer: Peer, _now_ns: int) -> bytes:
        self.made += 1
        virtual_time.advance(self._block_s)
        return json.dumps([peer.uid, self.made]).encode()


def _announce(watchers: list[Watcher], reporter: Slow, for_s: float, events: int) -> float:
    """Let changes happen for some time, and return how long that took with all that was told."""

    async def run() -> float:
        began_s = time.monotonic()
        announcer = Announcer(cast("Any", Connections(watchers)), cast("Any", reporter))
        for _ in range(events):
            announcer.after(Step(ev.DeadlinePassed(), (), (), 0))
            await asyncio.sleep(for_s / events)
        return time.monotonic() - began_s

    return virtual_time.run(run())


def test_many_changes_make_few_messages() -> None:
    watcher, reporter = Watcher(), Slow()
    _announce([watcher], reporter, for_s=0.6, events=300)
    assert len(watcher.lines) == round(0.6 / announce.COLLECT_S)


def test_a_status_is_made_once_for_all_watchers_of_a_user() -> None:
    watchers = [Watcher() for _ in range(50)] + [Watcher(BOB)]
    reporter = Slow()
    _announce(watchers, reporter, for_s=announce.COLLECT_S * 3, events=1)
    assert reporter.made == 2
    assert watchers[0].lines == watchers[49].lines != watchers[50].lines


def test_reports_take_only_a_small_share_of_the_time() -> None:
    watcher, reporter = Watcher(), Slow(block_s=0.05)
    took_s = _announce([watcher], reporter, for_s=6.0, events=1000)
    assert 10 <= reporter.made <= 1 + took_s / (0.05 + announce.SHARE * 0.05)


def test_a_client_that_does_not_read_gets_no_old_status() -> None:
    choked = Watcher(choked=True)
    _announce([choked], Slow(), for_s=announce.COLLECT_S * 3, events=1)
    assert choked.lines == []
