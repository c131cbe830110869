"""Tests of the journal on disk: it rotates, survives a full disk, and is bounded."""

from __future__ import annotations

import resource
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from replayed import differences

from kiwi_core.cli import main
from kiwi_core.config import DEFAULTS
from kiwi_core.daemon.engine import journal as journals
from kiwi_core.daemon.engine.journal import KEPT, Journal
from kiwi_core.sched import events as ev
from kiwi_core.sched.replay import JournalHeader, Replay, decode_line
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash
from kiwi_core.units import GIB, NS_PER_S, SessionId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADER = JournalHeader(
    total_bytes=8 * GIB,
    tq_ns=NS_PER_S,
    anti_thrash=AntiThrash.ALWAYS,
    host_budget_bytes=64 * GIB,
    gpu_uuid="GPU-1",
    wall_time_s=1_700_000_000.0,
    first_op=1,
    config=DEFAULTS,
)
A = SessionId("a")


class Recorded:
    """A scheduler with one busy session, and its journal."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20) -> None:
        self.journal = Journal(path, HEADER, max_bytes)
        self._scheduler = Scheduler(
            HEADER.total_bytes,
            config=HEADER.config,
            tq_ns=HEADER.tq_ns,
            anti_thrash=HEADER.anti_thrash,
            host_budget_bytes=HEADER.host_budget_bytes,
            first_op=1,
        )
        self._now_ns = 0
        self._burst = 0
        self.tell(ev.SessionJoined(session=A))

    def tell(self, event: ev.Event) -> None:
        self._now_ns += NS_PER_S // 100
        actions = self._scheduler.handle(event, self._now_ns)
        self.journal.record(self._now_ns, event, actions)
        self.journal.flush()

    def bursts(self, count: int) -> None:
        for _ in range(count):
            self._burst += 1
            self.tell(ev.LeaseRequested(session=A, burst=self._burst))
            self.tell(ev.BurstEnded(session=A, burst=self._burst))


def _files(path: Path) -> list[Path]:
    """Return the files, oldest first."""
    return sorted(path.parent.glob("j*"), key=lambda p: -int(p.suffix[1:]) if p != path else 0)


def _records(*paths: Path) -> list:
    return [decode_line(line) for path in paths for line in path.read_bytes().splitlines()]


def test_a_full_file_goes_on_in_the_next_and_both_together_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "j"
    recorded = Recorded(path, max_bytes=16 << 10)
    recorded.bursts(150)
    recorded.journal.close()
    files = _files(path)
    assert 2 <= len(files) <= KEPT + 1
    assert all(file.stat().st_size <= 16 << 10 for file in files)
    headers = [_records(file)[0] for file in files]
    assert [header.continued for header in headers] == [False] + [True] * (len(files) - 1)
    assert differences(_records(*files)) == 0
    everything = [r for r in _records(*files) if not isinstance(r, JournalHeader)]
    assert len(everything) == 1 + 2 * 150

    joined = tmp_path / "together"
    joined.write_bytes(b"".join(file.read_bytes() for file in files))
    assert main(["replay", str(joined)]) == 0
    assert "decides the same" in capsys.readouterr().out
    assert main(["replay", str(path)]) == 0
    said = capsys.readouterr().out
    assert "not checked" in said
    assert "grant a burst" in said
    assert "decides" not in said


def test_without_its_beginning_a_journal_is_shown_as_recorded(tmp_path: Path) -> None:
    path = tmp_path / "j"
    recorded = Recorded(path, max_bytes=8 << 10)
    recorded.bursts(60)
    recorded.journal.close()
    header, *entries = _records(path)
    player = Replay(header)
    assert not player.checked
    lines = [line for entry in entries for line in player.feed(entry)]
    assert any("grant a" in line.text for line in lines)
    assert not any(line.differs for line in lines)


def test_old_files_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "j"
    recorded = Recorded(path, max_bytes=4 << 10)
    recorded.bursts(400)
    recorded.journal.close()
    files = _files(path)
    assert [file.name for file in files] == [*(f"j.{n}" for n in range(KEPT, 0, -1)), "j"]
    assert sum(file.stat().st_size for file in files) <= (KEPT + 1) * (4 << 10)
    assert recorded.journal.dropped == 0


def test_each_daemon_begins_its_own(tmp_path: Path) -> None:
    path = tmp_path / "j"
    for _ in range(3):
        recorded = Recorded(path)
        recorded.bursts(1)
        recorded.journal.close()
    assert [_records(file)[0].continued for file in _files(path)] == [False] * 3


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_whole_lines_and_the_gap_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journals, "RETRY_S", 0.0)
    path = tmp_path / "j"
    recorded = Recorded(path)
    recorded.bursts(5)
    whole_bytes = path.stat().st_size
    with files_of_at_most(whole_bytes + 700):
        recorded.bursts(20)
    lost = recorded.journal.dropped
    assert lost > 10
    assert whole_bytes <= path.stat().st_size <= whole_bytes + 700
    recorded.bursts(5)
    recorded.journal.close()
    assert recorded.journal.dropped == lost, "it goes on once there is room"
    headers = [r for r in _records(path) if isinstance(r, JournalHeader)]
    assert [header.lost_entries for header in headers] == [0, lost]
    assert main(["replay", str(path)]) == 0
    said = capsys.readouterr().out
    assert "decides the same" in said
    assert "not checked" in said


def test_no_journal_at_all_is_survived_and_begun_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "RETRY_S", 0.0)
    path = tmp_path / "absent" / "j"
    recorded = Recorded(path)
    recorded.bursts(3)
    assert recorded.journal.dropped >= 7
    path.parent.mkdir()
    recorded.bursts(3)
    recorded.journal.close()
    (header, *entries) = _records(path)
    assert header.lost_entries == recorded.journal.dropped
    assert len(entries) == 6


def test_a_disk_that_stays_full_is_not_asked_at_every_event(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "j"
    recorded = Recorded(path)
    path.parent.mkdir()
    recorded.bursts(3)
    assert not path.exists(), "tried again only after a while"
