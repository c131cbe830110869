"""Tests of ``kiwi replay`` on journals that a scheduler wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from kiwi_core.config import DEFAULTS
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageIn, PageOut
from kiwi_core.sched.replay import JournalEntry, JournalHeader, decode_line, encode_line
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash
from kiwi_core.units import GIB, NS_PER_S, SessionId

if TYPE_CHECKING:
    from pathlib import Path

A, B = SessionId("a"), SessionId("b")


class Recorder:
    """A scheduler whose calls are recorded, with a pager that always succeeds."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._scheduler = Scheduler(
            80 * GIB,
            tq_ns=10 * NS_PER_S,
            anti_thrash=AntiThrash.ALWAYS,
            host_budget_bytes=200 * GIB,
            checks=True,
            policy="round-robin",
        )
        self._file.write(
            encode_line(
                JournalHeader(
                    total_bytes=80 * GIB,
                    tq_ns=10 * NS_PER_S,
                    anti_thrash=AntiThrash.ALWAYS,
                    host_budget_bytes=200 * GIB,
                    gpu_uuid="GPU-1",
                    wall_time_s=1_700_000_000.0,
                    first_op=1,
                    config=DEFAULTS,
                    policy="round-robin",
                )
            )
        )

    def tell(self, at_s: float, event) -> list:
        now_ns = round(at_s * NS_PER_S)
        actions = self._scheduler.handle(event, now_ns)
        self._file.write(encode_line(JournalEntry(now_ns=now_ns, event=event, actions=actions)))
        return actions

    def move(self, at_s: float, actions: list) -> list:
        """Report success of every page-out and page-in among ``actions``, two seconds later."""
        more = []
        for action in actions:
            if isinstance(action, (PageOut, PageIn)):
                done = ev.PagedOut if isinstance(action, PageOut) else ev.PagedIn
                outcome = done(op=action.op, moved_bytes=60 * GIB, elapsed_ns=2 * NS_PER_S)
                more += self.tell(at_s + 2, outcome)
        return more

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def journal(tmp_path) -> Path:
    """Session a holds 60 GiB; b wants the GPU; a is suspended after its quantum, b ends, a
    continues."""
    path = tmp_path / "GPU-1.journal"
    recorder = Recorder(path)
    recorder.tell(100, ev.SessionJoined(session=A))
    recorder.tell(100, ev.SessionJoined(session=B))
    recorder.tell(100, ev.LeaseRequested(session=A, burst=1))
    memory = {A: 60 * GIB, B: 0}
    recorder.tell(101, ev.MemoryObserved(free_bytes=20 * GIB, resident_bytes=memory))
    recorder.tell(104, ev.LeaseRequested(session=B, burst=1))
    granted_b = recorder.move(110, recorder.tell(110, ev.DeadlinePassed()))
    assert [action.session for action in granted_b] == [B]
    ended = recorder.tell(115, ev.BurstEnded(session=B, burst=1))
    assert recorder.move(115, ended)
    recorder.tell(120, ev.BurstEnded(session=A, burst=1))
    recorder.close()
    return path


def test_tells_who_held_who_waited_and_what_moved(kiwi, journal):
    result = kiwi("replay", str(journal), "--json")
    assert result.code == 0
    (run,) = json.loads(result.out)["runs"]
    held = [(span["session"], span["from_s"], span["to_s"]) for span in run["held"]]
    assert held == [("a", 0.0, 12.0), ("b", 12.0, 15.0), ("a", 17.0, 20.0)]
    waited = [(span["session"], span["from_s"], span["to_s"]) for span in run["waited"]]
    assert ("b", 4.0, 12.0) in waited
    assert [(move["session"], move["direction"]) for move in run["moves"]][:1] == [("a", "out")]
    assert run["moves"][0]["bytes_moved"] == 60 * GIB
    assert run["differences"] == 0


def test_text_has_the_timeline_and_the_verdict(kiwi, journal):
    result = kiwi("replay", str(journal))
    assert result.code == 0
    assert "a lease requested" in result.out
    assert "a moved out: 60 GiB in 2.0 s (32.21 GB/s)" in result.out
    assert result.out.rstrip().endswith("decides the same.")


def test_summary_leaves_out_the_events(kiwi, journal):
    assert "lease requested" not in kiwi("replay", str(journal), "--summary").out


def test_one_session_only(kiwi, journal):
    out = kiwi("replay", str(journal), "--session", "b").out
    assert "b lease requested" in out
    assert "a lease requested" not in out
    assert " a held" not in out


def test_a_session_that_the_journal_does_not_have_is_refused(kiwi, journal):
    result = kiwi("replay", str(journal), "--session", "c")
    assert result.code == 1
    assert "The journal has no session c." in result.err
    assert "It has a, b." in result.err
    assert "held" not in result.out


def test_a_journal_that_was_altered_is_found_out(kiwi, journal):
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b"PageOut" not in line))
    result = kiwi("replay", str(journal))
    assert result.code == 1
    assert "!!" in result.out
    assert "decides differently" in result.out


def test_a_last_line_that_was_cut_short_is_left_out(kiwi, journal):
    journal.write_bytes(journal.read_bytes()[:-10])
    result = kiwi("replay", str(journal))
    assert result.code == 0
    assert "cut short" in result.err


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"nonsense\n", "Line 1"), (b"", ""), (None, "cannot be read")],
)
def test_what_is_no_journal_is_said(kiwi, tmp_path, content, words):
    path = tmp_path / "x.journal"
    if content is not None:
        path.write_bytes(content)
    result = kiwi("replay", str(path))
    assert result.code == 1
    assert words in result.err


def verdicts(kiwi, journal):
    result = kiwi("replay", str(journal), "--json")
    return [(run["checked"], run["differences"]) for run in json.loads(result.out)["runs"]]


def test_a_restart_begins_with_a_fresh_scheduler(kiwi, journal):
    journal.write_bytes(journal.read_bytes() * 2)
    assert verdicts(kiwi, journal) == [(True, 0), (True, 0)]


def test_a_file_that_goes_on_is_played_on(kiwi, journal):
    first, *entries = journal.read_bytes().splitlines(keepends=True)
    goes_on = encode_line(msgspec.structs.replace(decode_line(first), continued=True))
    journal.write_bytes(b"".join([first, *entries[:3], goes_on, *entries[3:]]))
    assert verdicts(kiwi, journal) == [(True, 0)]
    journal.write_bytes(b"".join([goes_on, *entries[3:]]))
    assert verdicts(kiwi, journal) == [(False, 0)]


def test_a_journal_without_its_header_is_refused(kiwi, journal):
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[1:]))
    result = kiwi("replay", str(journal))
    assert result.code == 1
    assert "header" in result.err
