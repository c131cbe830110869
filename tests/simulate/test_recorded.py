"""Tests of traces as files, and of journals as traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_work import cell, session, trace
from untimed import UNTIMED

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Action, BringResidueBack, Grant, PageOut, Suspend
from kiwi_core.sched.replay import JournalEntry, JournalHeader
from kiwi_core.simulate.engine import Simulation
from kiwi_core.simulate.lives import ROUND_BYTES, ROUND_NS
from kiwi_core.simulate.mixes import generate
from kiwi_core.simulate.model import FaultRates, Setup, SimulatedMachine
from kiwi_core.simulate.recorded import read
from kiwi_core.simulate.trace import Cell, SessionTrace, Trace, from_lines, to_lines
from kiwi_core.states import AntiThrash, Reason
from kiwi_core.units import GIB, MIB, NS_PER_S, OpId, SessionId, seconds_to_ns

HEADER = JournalHeader(
    total_bytes=80 * GIB,
    tq_ns=30 * NS_PER_S,
    anti_thrash=AntiThrash.ON,
    host_budget_bytes=200 * GIB,
    gpu_uuid="GPU-secret",
    wall_time_s=1_700_000_000.0,
    first_op=1,
    config=DEFAULTS,
)
A, B = SessionId("kernel-of-alice"), SessionId("kernel-of-bob")


def trace_of(records: Iterable[JournalHeader | JournalEntry]) -> Trace:
    return read(records)[0]


# --- files --------------------------------------------------------------------------------------

_times = st.integers(0, 10**15)
_traces = st.lists(
    st.lists(
        st.builds(
            Cell,
            think_ns=_times,
            cpu_ns=_times,
            gpu_ns=_times,
            peak_bytes=st.integers(0, 80 * GIB),
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=4,
).map(
    lambda lives: trace(
        *(
            SessionTrace(
                id=f"s{number}",
                user="ü",
                starts_ns=number,
                cells=tuple(life),
                leaves_ns=number * NS_PER_S or None,
            )
            for number, life in enumerate(lives)
        )
    )
)


@UNTIMED
@given(_traces)
def test_a_trace_is_read_as_it_was_written(work: Trace) -> None:
    assert from_lines(to_lines(work)) == work


def test_a_trace_by_hand_needs_few_fields() -> None:
    text = b"""{"trace":"header","total_bytes":1000}

{"trace":"session","session":"a"}
{"trace":"cell","think_s":1.5,"gpu_s":2,"bytes":10}
"""
    work = from_lines(text.splitlines())
    assert work.sessions[0].user == "a"
    assert work.sessions[0].cells[0].think_ns == seconds_to_ns(1.5)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "is empty"),
        (["x"], "Line 1"),
        (['{"trace":"session","session":"a"}'], "header"),
        (['{"trace":"header","total_bytes":0}'], "more than 0"),
        (['{"trace":"header","total_bytes":1,"version":9}'], "version 9"),
        (['{"trace":"header","total_bytes":1}'], "not one cell"),
        (['{"trace":"header","total_bytes":1}'] * 2, "second header"),
        (
            [
                '{"trace":"header","total_bytes":1}',
                '{"trace":"cell","think_s":1,"gpu_s":1,"bytes":1}',
            ],
            "before the first session",
        ),
        (
            ['{"trace":"header","total_bytes":1}', *['{"trace":"session","session":"a"}'] * 2],
            "there already",
        ),
        *(
            (
                [
                    '{"trace":"header","total_bytes":1}',
                    '{"trace":"session","session":"a"}',
                    f'{{"trace":"cell",{bad}}}',
                ],
                "Line 3",
            )
            for bad in (
                '"think_s":-1,"gpu_s":1,"bytes":1',
                '"think_s":1,"gpu_s":1e300,"bytes":1',
                '"think_s":1,"gpu_s":1,"bytes":2',
                '"think_s":1,"gpu_s":1',
                '"think_s":"long","gpu_s":1,"bytes":1',
            )
        ),
    ],
)  # fmt: skip
def test_an_invalid_trace_is_an_error_that_names_the_line(lines: list[str], says: str) -> None:
    with pytest.raises(CallerError, match=says) as raised:
        from_lines(line.encode() for line in lines)
    assert "docs/simulate.md" in raised.value.remedy


# --- journals -----------------------------------------------------------------------------------


def recorded(
    work: Trace, machine: SimulatedMachine, **more: object
) -> list[JournalHeader | JournalEntry]:
    entries: list[JournalHeader | JournalEntry] = [HEADER]

    def record(now_ns: int, event: ev.Event, actions: list[Action]) -> None:
        entries.append(JournalEntry(now_ns=now_ns + 10**12, event=event, actions=actions))

    Simulation(work, machine, Setup(policy="round-robin"), record=record, **more).run()  # type: ignore[arg-type]
    return entries


@pytest.mark.parametrize("mix", ["6+2", "heavy", "small"])
def test_the_journal_of_a_simulation_is_its_trace(mix: str) -> None:
    """The work is the same afterwards, whatever waited or ran beside it."""
    work = generate(mix, hours=0.5, seed=SEED)
    again = trace_of(recorded(work, replace(SimulatedMachine(), look_ns=0)))
    assert again.total_bytes == work.total_bytes
    the_same_work(work, again)


@pytest.mark.parametrize("mix", ["6+2", "heavy", "small"])
def test_the_journal_of_a_simulation_tells_its_waits(mix: str) -> None:
    """The waits in the journal are those that the simulation measured, cell by cell. The last one
    is omitted; see below."""
    work, machine = generate(mix, hours=0.5, seed=SEED), replace(SimulatedMachine(), look_ns=0)
    entries: list[JournalHeader | JournalEntry] = [HEADER]
    simulation = Simulation(
        work, machine, Setup(policy="round-robin"),
        record=lambda now_ns, event, actions: entries.append(
            JournalEntry(now_ns=now_ns, event=event, actions=actions)
        ),
    )  # fmt: skip
    measured = simulation.run()
    again, told = read(entries)
    assert told.users == [session.id for session in again.sessions]
    assert (told.swaps, told.swapped_bytes) == (measured.swaps, measured.swapped_bytes)
    assert measured.suspensions - told.suspensions in (0, 1)  # one may be in progress at the end
    by_start = sorted(range(len(work.sessions)), key=lambda n: work.sessions[n].starts_ns)
    for ours, theirs in enumerate(by_start):
        for name in ("wait_ns", "response_ns"):
            mine = [
                ns for n, ns in zip(told.session, getattr(told, name), strict=True) if n == ours
            ]
            real = [
                ns for n, ns in zip(measured.session, getattr(measured, name), strict=True)
                if n == theirs
            ]  # fmt: skip
            last = -1 if measured.session[-1] == theirs else None
            assert mine[:last] == pytest.approx(real[:last], abs=2)
    last_ns = measured.response_ns[-1]
    assert 0 <= measured.wanted_ns - told.wanted_ns <= last_ns
    assert 0 <= measured.makespan_ns - told.makespan_ns <= last_ns


SEED = 11
"""With it no session grows past what is free, which would change the work."""


def the_same_work(work: Trace, again: Trace) -> None:
    """The last cell is omitted, because a simulation ends with it, before the journal says so."""
    by_start = sorted(work.sessions, key=lambda s: s.starts_ns)
    assert len(again.sessions) == len(by_start)
    for mine, theirs in zip(by_start, again.sessions, strict=True):
        assert len(theirs.cells) == len(mine.cells)
        for one, other in zip(mine.cells[:-1], theirs.cells, strict=False):
            assert other.gpu_ns == pytest.approx(one.gpu_ns, abs=2 * ROUND_NS)
            assert other.think_ns == pytest.approx(one.think_ns + one.cpu_ns, abs=2 * ROUND_NS)
            assert 0 <= other.peak_bytes - one.peak_bytes < ROUND_BYTES


def test_faults_do_not_confuse_the_work() -> None:
    work = generate("6+2", hours=0.5, seed=SEED)
    machine = replace(SimulatedMachine(), look_ns=0)
    the_same_work(work, trace_of(recorded(work, machine, faults=FaultRates(refuse=0.1, hang=0.02))))


def test_a_trace_has_no_names_and_no_dates() -> None:
    work = trace(session("kernel-of-alice", cell(50.0)), session("kernel-of-bob", cell(9.0)))
    entries = recorded(work, SimulatedMachine())
    later = [
        msg if isinstance(msg, JournalHeader) else JournalEntry(
            now_ns=msg.now_ns + 86_400 * NS_PER_S, event=msg.event, actions=msg.actions
        )
        for msg in entries
    ]  # fmt: skip
    text = b"".join(to_lines(trace_of(entries)))
    for secret in (b"alice", b"bob", b"GPU-secret", b"1700000000"):
        assert secret not in text
    assert text == b"".join(to_lines(trace_of(later)))


def test_the_machine_is_in_the_trace(exact: SimulatedMachine) -> None:
    work = trace(session("a", cell(100.0)), session("b", cell(40.0), starts_s=1.0))
    machine = trace_of(recorded(work, exact)).recorded
    assert machine is not None
    assert machine.out_gbps == pytest.approx(60 * GIB / 6.1 / 1e9, abs=0.01)
    assert machine.in_gbps == pytest.approx(60 * GIB / 6.1 / 1e9, abs=0.01)
    assert machine.tq_s == 30.0
    assert machine.host_budget_bytes == 200 * GIB


class Story:
    """A journal written by hand."""

    def __init__(self) -> None:
        self.records: list[JournalHeader | JournalEntry] = [HEADER]

    def at(self, at_s: float, event: ev.Event, *actions: Action) -> Story:
        now_ns = seconds_to_ns(at_s)
        self.records.append(JournalEntry(now_ns=now_ns, event=event, actions=list(actions)))
        return self

    def sessions(self) -> list[list[tuple[float, float, int]]]:
        return [
            [(c.think_ns / NS_PER_S, c.gpu_ns / NS_PER_S, c.peak_bytes // MIB) for c in s.cells]
            for s in trace_of(self.records).sessions
        ]


def asks(session_id: SessionId, burst: int = 1) -> ev.LeaseRequested:
    return ev.LeaseRequested(session=session_id, burst=burst)


def gets(session_id: SessionId, burst: int = 1) -> Grant:
    return Grant(session=session_id, burst=burst, quantum_ns=NS_PER_S)


def holds(session_id: SessionId, mib: int) -> ev.MemoryObserved:
    return ev.MemoryObserved(free_bytes=0, resident_bytes={session_id: mib * MIB})


def test_a_wait_that_was_interrupted_never_began() -> None:
    story = Story().at(0, ev.SessionJoined(session=A)).at(5, asks(A))
    story.at(9, ev.LeaseWithdrawn(session=A, burst=1))
    story.at(20, asks(A, 2), gets(A, 2)).at(23, ev.BurstEnded(session=A, burst=2))
    assert story.sessions() == [[(20.0, 3.0, 0)]]


def test_a_refusal_lets_it_run_on_and_a_stop_does_not_count() -> None:
    stop = Suspend(session=A, op=OpId(1), deadline_ns=0)
    out = PageOut(session=A, op=OpId(2), deadline_ns=0)
    story = Story().at(0, ev.SessionJoined(session=A)).at(1, asks(A), gets(A))
    story.at(3, ev.DeadlinePassed(), stop)
    story.at(13, ev.SuspendRefused(op=OpId(1), reason=Reason.LOCK_TIMEOUT))
    story.at(14, ev.DeadlinePassed(), out)
    story.at(16, ev.PagedOut(op=OpId(2), moved_bytes=700 * MIB, elapsed_ns=NS_PER_S))
    story.at(17, holds(A, 0))  # the session is out, so this tells nothing
    story.at(30, ev.DeadlinePassed(), gets(A)).at(34, ev.BurstEnded(session=A, burst=1))
    assert story.sessions() == [[(1.0, 2.0 + 1.0 + 4.0, 700)]]


def test_contexts_that_come_back_are_no_move_of_a_cell() -> None:
    """What is seen after the page-in counts again, and what was taken twice moved twice."""
    out = [PageOut(session=A, op=OpId(n), deadline_ns=0) for n in (1, 2, 4)]
    back = BringResidueBack(session=A, op=OpId(3), deadline_ns=0, need_bytes=MIB)
    story = Story().at(0, ev.SessionJoined(session=A)).at(1, asks(A), gets(A))
    story.at(3, ev.BurstEnded(session=A, burst=1), out[0])
    for at_s, op, action in ((4, 1, out[1]), (5, 2, back)):
        moved_bytes = (99 + op) * MIB
        outcome = ev.PagedOut(op=OpId(op), moved_bytes=moved_bytes, elapsed_ns=NS_PER_S)
        story.at(at_s, outcome, action)
    story.at(6, ev.ResidueBack(op=OpId(3), moved_bytes=MIB, elapsed_ns=NS_PER_S), out[2])
    again = BringResidueBack(session=A, op=OpId(5), deadline_ns=0, need_bytes=MIB)
    outcome = ev.PagedOut(op=OpId(4), moved_bytes=101 * MIB, elapsed_ns=NS_PER_S)
    story.at(7, outcome, again)
    story.at(8, ev.ResidueRefused(op=OpId(5), reason=Reason.NO_ROOM))
    story.at(9, ev.ResidueBack(op=OpId(6), moved_bytes=MIB, elapsed_ns=NS_PER_S))
    work, told = read(story.records)
    assert [one.peak_bytes for one in work.sessions[0].cells] == [101 * MIB]
    assert told.swaps == 3
    assert told.swapped_bytes == (100 + 1 + 1) * MIB


def test_memory_seen_after_a_cell_belongs_to_it() -> None:
    story = Story().at(0, ev.SessionJoined(session=A)).at(1, asks(A), gets(A))
    story.at(2, holds(A, 100)).at(3, ev.BurstEnded(session=A, burst=1)).at(4, holds(A, 150))
    story.at(10, asks(A, 2), gets(A, 2)).at(11, holds(A, 300))
    assert story.sessions() == [[(1.0, 2.0, 150), (7.0, 1.0, 300)]]


def test_only_what_was_asked_for_since_then_counts() -> None:
    story = Story().at(0, ev.SessionJoined(session=A)).at(1, asks(A), gets(A))
    story.at(10, ev.BurstEnded(session=A, burst=1)).at(15, ev.SessionJoined(session=B))
    out = PageOut(session=A, op=OpId(1), deadline_ns=0)
    story.at(16, asks(B), out)
    story.at(18, ev.PagedOut(op=OpId(1), moved_bytes=MIB, elapsed_ns=NS_PER_S), gets(B))
    story.at(20, ev.BurstEnded(session=B, burst=1)).at(30, asks(A, 2))
    story.at(31, ev.DeadlinePassed(), gets(A, 2)).at(34, ev.BurstEnded(session=A, burst=2))
    for since_s, thinks_s, waits_s, moves in (
        (0, [1, 20, 1], [0, 2, 1], 1),
        (12, [18, 1], [2, 1], 1),
        (16, [14, 0], [2, 1], 1),
        (19, [11], [1], 0),
    ):
        work, told = read(story.records, since_unix_s=HEADER.wall_time_s + since_s)
        cells = [one for session in work.sessions for one in session.cells]
        assert [one.think_ns / NS_PER_S for one in cells] == thinks_s
        assert [wait_ns / NS_PER_S for wait_ns in told.wait_ns] == waits_s
        assert told.swaps == moves
        assert told.makespan_ns == (34 - since_s) * NS_PER_S
    with pytest.raises(CallerError, match="since then"):
        read(story.records, since_unix_s=HEADER.wall_time_s + 31)


def test_a_session_that_left_stays_away() -> None:
    story = Story().at(0, ev.SessionJoined(session=A)).at(1, asks(A), gets(A))
    story.at(2, ev.SessionJoined(session=B)).at(3, ev.BurstEnded(session=A, burst=1))
    story.at(4, asks(B), gets(B)).at(5, ev.BurstEnded(session=B, burst=1))
    story.at(9, ev.SessionLost(session=A))
    left = [one.leaves_ns for one in trace_of(story.records).sessions]
    assert left == [6 * NS_PER_S, None]


def test_a_second_request_for_the_same_burst_is_a_reconnection() -> None:
    story = Story().at(0, ev.SessionJoined(session=A)).at(1, asks(A), gets(A))
    story.at(3, asks(A), gets(A)).at(6, asks(A, 2), gets(A, 2))
    story.at(7, ev.SessionLost(session=A))
    assert story.sessions() == [[(1.0, 5.0, 0), (0.0, 1.0, 0)]]


def test_a_daemon_that_is_started_again_goes_on_with_the_same_sessions() -> None:
    story = Story().at(100, ev.SessionJoined(session=A)).at(101, asks(A), gets(A))
    story.at(105, ev.SessionJoined(session=B))
    story.records.append(replace_header(wall_time_s=HEADER.wall_time_s + 60))
    story.at(7, ev.SessionJoined(session=A, paged_out_bytes=MIB, mid_burst=True, burst=1))
    story.at(8, ev.SessionJoined(session=B)).at(10, ev.DeadlinePassed(), gets(A))
    story.at(12, ev.BurstEnded(session=A, burst=1)).at(13, asks(B), gets(B))
    story.at(14, ev.BurstEnded(session=B, burst=1))
    # A: 4 s until the last record of the first daemon, 2 s under the second. B thinks from 5 to 66.
    assert story.sessions() == [[(1.0, 6.0, 1)], [(61.0, 1.0, 0)]]


def replace_header(**changes: object) -> JournalHeader:
    import msgspec

    return msgspec.structs.replace(HEADER, **changes)


def test_a_journal_whose_beginning_is_missing_can_be_used() -> None:
    story = Story().at(50, ev.BurstEnded(session=A, burst=6)).at(60, asks(A, 7), gets(A, 7))
    story.records[0] = replace_header(continued=True)
    story.records.append(replace_header(continued=True))
    story.at(64, ev.BurstEnded(session=A, burst=7))
    assert story.sessions() == [[(10.0, 4.0, 0)]]


@pytest.mark.parametrize(
    "records",
    [[], [HEADER], list(chain([HEADER], Story().at(0, ev.SessionJoined(session=A)).records[1:]))],
)
def test_a_journal_without_work_is_an_error(records: list[JournalHeader | JournalEntry]) -> None:
    with pytest.raises(CallerError, match="Nobody used the GPU"):
        trace_of(records)


def test_a_journal_without_a_header_is_an_error() -> None:
    with pytest.raises(CallerError, match="header"):
        trace_of(Story().at(0, ev.SessionJoined(session=A)).records[1:])
