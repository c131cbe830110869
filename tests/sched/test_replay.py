"""Tests of the journal's lines and of their replay."""

from __future__ import annotations

import pytest

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, Notify, PageIn, PageOut, Resume, Suspend
from kiwi_core.sched.replay import (
    JournalEntry,
    JournalHeader,
    Replay,
    decode_line,
    describe_action,
    describe_event,
    encode_line,
    goes_on,
)
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash, Notice, Reason
from kiwi_core.units import GIB, NS_PER_S


def header(**changes):
    return JournalHeader(
        **{
            "total_bytes": 10 * GIB, "tq_ns": 30 * NS_PER_S, "anti_thrash": AntiThrash.ON,
            "host_budget_bytes": 64 * GIB, "gpu_uuid": "GPU-1", "wall_time_s": 1.5, "first_op": 1,
            "config": DEFAULTS, **changes,
        }
    )  # fmt: skip


def recorded(*events):
    """Return entries as a daemon would write them, one second apart."""
    scheduler = Scheduler(10 * GIB, host_budget_bytes=64 * GIB, policy="round-robin")
    entries = []
    for second, event in enumerate(events, start=100):
        now_ns = second * NS_PER_S
        actions = scheduler.handle(event, now_ns)
        entries.append(JournalEntry(now_ns=now_ns, event=event, actions=actions))
    return entries


STORY = (
    ev.SessionJoined(session="a"),
    ev.MemoryObserved(free_bytes=10 * GIB),
    ev.LeaseRequested(session="a", burst=1),
    ev.MemoryObserved(free_bytes=4 * GIB, resident_bytes={"a": 6 * GIB}),
    ev.BurstEnded(session="a", burst=1),
)


def test_lines_survive_the_way_through_the_file():
    for record in (header(), *recorded(*STORY)):
        line = encode_line(record)
        assert line.count(b"\n") == 1
        assert decode_line(line) == record


def test_replay_tells_the_story_and_finds_no_difference():
    player = Replay(header())
    told = [str(line).strip() for entry in recorded(*STORY) for line in player.feed(entry)]
    assert told == [
        "0.000 s  a session joined (residency resident)",
        "2.000 s  a lease requested (burst 1)",
        "2.000 s    → grant a burst 1 for 30 s (nobody in the way)",
        "4.000 s  a burst ended (burst 1)",
    ]
    assert player.checked
    assert player.differences == 0


def test_replay_marks_what_differs():
    entries = recorded(*STORY)
    entries[2] = JournalEntry(now_ns=entries[2].now_ns, event=entries[2].event, actions=[])
    player = Replay(header())
    (different,) = [line for entry in entries for line in player.feed(entry) if line.differs]
    assert str(different).startswith("!!")
    assert "the journal says: nothing" in different.text
    assert player.differences == 1


def test_a_file_goes_on_unless_the_daemon_was_restarted_or_lines_are_lost():
    assert goes_on(header(continued=True))
    assert not goes_on(header())
    assert not goes_on(header(continued=True, lost_entries=3))


def test_without_its_beginning_a_journal_is_told_but_not_checked():
    player = Replay(header(continued=True))
    told = [line for entry in recorded(*STORY)[2:] for line in player.feed(entry)]
    assert "grant a burst 1" in told[1].text
    assert not player.checked
    assert player.differences == 0


@pytest.mark.parametrize("line", [b"", b"{", b'{"journal":"entry"}', b'{"journal":"x"}', b"\xff"])
def test_garbage_is_named(line):
    with pytest.raises(CallerError) as raised:
        decode_line(line)
    assert raised.value.code == "bad-journal"


def test_an_event_of_before_is_named():
    """An unknown event of an older Kiwi is an error: its effects cannot be replayed."""
    line = (
        b'{"journal":"entry","now_ns":7,"event":{"event":"OverlapKnown","pays":true},"actions":[]}'
    )
    with pytest.raises(CallerError, match="OverlapKnown") as raised:
        decode_line(line)
    assert raised.value.code == "bad-journal"


def test_another_version_is_named():
    with pytest.raises(CallerError, match="version 99"):
        decode_line(encode_line(header(version=99)))


def test_journals_of_before_and_after_there_were_moves_in_part():
    """A missing field has its default, and an unknown field is ignored."""
    line = (
        b'{"journal":"entry","now_ns":7,"event":{"event":"%s},"actions":['
        b'{"action":"PageOut","session":"a","op":1,"deadline_ns":5,"bytes":9},'
        b'{"action":"PageIn","session":"b","op":2,"deadline_ns":5,"need_bytes":3}]}'
    )
    seen = decode_line(line % b'MemoryObserved","free_bytes":5,"resident_bytes":{"a":4}')
    assert seen.event == ev.MemoryObserved(free_bytes=5, resident_bytes={"a": 4})
    out = decode_line(line % b'PagedOut","op":1,"moved_bytes":4,"elapsed_ns":9,"left_bytes":2')
    assert out.event == ev.PagedOut(op=1, moved_bytes=4, elapsed_ns=9)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (ev.DeadlinePassed(), ""),
        (ev.PagedOut(op=3, moved_bytes=GIB, elapsed_ns=NS_PER_S), "#3 paged out 1 GiB in 1.0 s"),
        (ev.PagedIn(op=3, moved_bytes=GIB, elapsed_ns=NS_PER_S), "#3 paged in 1 GiB in 1.0 s"),
        (ev.Resumed(op=3), "#3 resumed"),
        (
            ev.PageInRefused(op=3, reason=Reason.NO_ROOM, detail="7 GiB free"),
            "#3 page in refused (reason no-room, detail 7 GiB free)",
        ),
        (
            ev.SettingsChanged(anti_thrash=AntiThrash.OFF),
            "settings changed (anti_thrash off)",
        ),
        (ev.SessionLost(session="a"), "a session lost"),
    ],
)
def test_events_in_words(event, words):
    assert describe_event(event) == words


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Grant(session="a", burst=2, quantum_ns=NS_PER_S), "grant a burst 2 for 1.0 s"),
        (Notify(session="a", notice=Notice.STUCK, detail="d", cause="c"), "tell a stuck: d (c)"),
        (Suspend(session="a", op=1, deadline_ns=5, cause="c"), "#1 suspend a (c)"),
        (Resume(session="a", op=1, deadline_ns=5), "#1 resume a"),
        (PageIn(session="a", op=1, deadline_ns=5, need_bytes=1), "#1 page in a"),
        (PageOut(session="a", op=1, deadline_ns=5), "#1 page out a"),
    ],
)
def test_actions_in_words(action, words):
    assert describe_action(action) == words
