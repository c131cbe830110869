"""Tests of events that come too late, twice, for an unknown session, or in an odd order."""

from __future__ import annotations

import pytest
from world import World

from kiwi_core.config import DEFAULTS
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Notify, PageOut
from kiwi_core.sched.model.speed import SwapSpeed
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash, Notice, Reason, Residency, SessionState
from kiwi_core.units import GIB, NS_PER_S, SessionId


def busy_world():
    """Return a world in which A runs with 6 GiB, and B waits."""
    world = World("gpu 10 tq=10")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "a asks 1")
    world.do(2, "memory a=6")
    world.do(3, "b asks 1")
    return world


def ignored(world):
    return world.scheduler.view(world.now_ns).ignored_events


def test_events_of_unknown_sessions_are_ignored_and_counted():
    world = World()
    nobodys = (
        "joins; x dies; x dies; x asks 1; x ends 1; x withdraws 1; x lingers 1; x detaches; "
        "x releases; #7 out 1 1s; #7 held; #7 resumed; #7 in 1 1s; #7 overdue; "
        "x unguarded; x stops stopped by Ctrl-Z; x continues; memory busy=x; "
        "x suspended an admin; x let go"
    )
    assert world.do(0, f"x {nobodys}") == []
    assert ignored(world) == 17


def test_a_repeated_report_about_gates_and_stops_changes_nothing():
    world = busy_world()
    world.do(4, "a guarded; b continues")
    world.do(5, "b stops stopped by Ctrl-Z; b stops held by a debugger; a unguarded; a unguarded")
    view = world.scheduler.view(world.now_ns)
    assert view.session("b").record.stopped == "held by a debugger"
    assert not view.session("a").record.guarded
    assert view.session("a").time_left_ns is None, "no quantum ends its turn"


def test_an_outcome_of_the_wrong_kind_is_dropped():
    world = busy_world()
    world.do(11, "time")
    assert world.do(12, "#1 in 6 1s; #1 held; #1 resumed") == []
    assert ignored(world) == 3
    assert world.scheduler.view(world.now_ns).session("a").state is SessionState.PAGING_OUT


@pytest.mark.parametrize(
    "report",
    [
        ev.PageOutLost(op=7),
        ev.PageInLost(op=7),
        ev.SuspendRefused(op=7, reason=Reason.DRIVER),
        ev.ResumeFailed(op=7, reason=Reason.DRIVER),
    ],
)
def test_a_failure_that_belongs_to_no_operation_is_dropped(report):
    world = busy_world()
    before = repr(world.scheduler.view(world.now_ns).sessions)
    assert world.scheduler.handle(report, world.now_ns) == []
    after = world.scheduler.view(world.now_ns)
    assert (repr(after.sessions), after.ignored_events) == (before, 1)


def test_an_outcome_that_comes_twice_counts_once():
    world = busy_world()
    world.do(11, "time")
    world.do(12, "#1 out 6 1s")
    before = world.scheduler.view(world.now_ns)
    sessions = repr(before.sessions)
    assert world.scheduler.waiting
    assert world.do(12, "#1 out 6 1s") == []
    after = world.scheduler.view(world.now_ns)
    assert repr(after.sessions) == sessions
    assert after.ignored_events == before.ignored_events + 1


def test_joining_under_the_name_of_one_that_is_not_off_the_books_is_ignored():
    world = busy_world()
    world.do(11, "time")
    world.do(11.5, "a dies")
    assert world.do(11.6, "a joins") == []
    assert ignored(world) == 1
    assert world.scheduler.view(world.now_ns).session("a") is None


def test_a_daemon_that_restarts_knows_whether_one_has_a_gate():
    """It asks each session as it joins, and so learns it before anybody waits."""
    world = World("gpu 10 tq=10")
    joined = ev.SessionJoined(session="a", mid_burst=True, burst=1, guarded=False)
    world.scheduler.handle(joined, 0)
    assert not world.scheduler.view(0).session("a").record.guarded
    world.do(1, "b joins; memory a=6; b asks 1")
    assert world.do(60, "time") == ["tell b blocked-unguarded"]


def test_a_daemon_that_restarts_knows_who_is_kept_out():
    world = World("gpu 10 tq=10")
    out = {"residency": Residency.PAGED_OUT, "paged_out_bytes": 6 * GIB}
    joined = ev.SessionJoined(session="a", mid_burst=True, burst=1, kept_out="an admin", **out)
    world.scheduler.handle(joined, 0)
    assert world.do(1, "memory") == []
    assert world.scheduler.view(world.now_ns).session("a").record.kept_out == "an admin"
    assert world.do(2, "a let go") == ["#1 page in a (its turn)"]


def test_memory_is_lost_on_the_way_out_of_one_that_wants_nothing():
    world = World("gpu 10")
    world.do(0, "a joins resident 6; memory a=6")
    assert world.do(1, "a releases") == ["#1 page out a (somebody asked for it)"]
    (told,) = world.do(2, "#1 loses the copy is damaged")
    assert told.startswith("tell a lost")
    assert world.scheduler.view(world.now_ns).session("a").state is SessionState.LOST


def test_a_move_of_nothing_says_nothing_about_the_speed():
    speed = SwapSpeed()
    speed.learn_out(0, NS_PER_S)
    speed.learn_in(0, NS_PER_S)
    assert not speed.known
    speed.learn_out(GIB, NS_PER_S)
    speed.learn_in(0, NS_PER_S)
    assert speed.out_ns(GIB) == speed.in_ns(GIB) == NS_PER_S


def test_a_dead_sessions_requests_for_room_are_dropped():
    world = World("gpu 10 mode=off")
    world.do(0, "a joins; b joins; memory a=1 b=1; a asks 1; b asks 1; memory a=4 b=4")
    assert world.do(1, "a wants 3; b wants 4") == []
    assert world.do(2, "a dies") == ["room for b, request 1"]


def test_a_session_that_gave_up_the_lease_is_unread_until_its_memory_was_read():
    world = busy_world()
    world.do(4, "a ends 1 4")
    assert world.scheduler.unread == ("a",)
    world.do(5, "memory a=5")
    assert world.scheduler.unread == ()


def test_coming_back_while_the_page_out_of_leaving_is_under_way():
    world = busy_world()
    world.do(11, "time")
    world.do(11.5, "a detaches")
    world.do(11.6, "a joins resident 6")
    world.do(12, "#1 out 6 1s")
    view = world.scheduler.view(world.now_ns)
    assert view.session("a").state is SessionState.PAGED_OUT
    assert not view.session("a").record.leaving
    assert view.queued("a") is None


def test_a_refusal_because_the_process_is_gone_waits_for_its_death_without_a_word():
    world = busy_world()
    world.do(11, "time")
    answers = world.do(12, "#1 refuses gone")
    assert not any("refused" in answer for answer in answers[:1])
    assert world.scheduler.view(world.now_ns).session("a").record.problem is None
    assert world.do(12.1, "a dies") == ["grant b burst 1 for 10 s (nobody in the way)"]


def test_a_reading_of_a_held_session_is_exact():
    world = World("gpu 10 tq=10 mode=always")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "a asks 1; a ends 1; memory a=1; b asks 1")
    world.do(2, "#1 out 1 1s")
    world.do(3, "memory b=1; b ends 1; a asks 2")
    world.do(4, "#2 in 1 1s")
    world.do(5, "a ends 2; b asks 2; b ends 2; a asks 3; b asks 3")
    assert "#3 suspend a (its quantum ended and b waits)" in world.do(15, "time")
    op = next(iter(op for op in world.orders if op == 3))
    actions = world.scheduler.handle(ev.Suspended(op=op, resident_bytes=9 * GIB), 16 * NS_PER_S)
    # A had grown since memory was last read: it is paged out after all, before B may run.
    assert [type(action).__name__ for action in actions] == ["PageOut"]
    assert world.scheduler.view(16 * NS_PER_S).session("a").peak_bytes == 1 * GIB


def test_a_peak_that_is_hardly_more_than_a_context_is_not_shown_as_the_need():
    world = World("gpu 100 tq=10")
    world.do(0, "a joins; memory")
    world.do(1, "a asks 1; a ends 1; memory a=1")
    assert world.scheduler.view(world.now_ns).session("a").peak_bytes is None
    world.do(2, "a asks 2; memory a=30; a ends 2; memory a=30")
    assert world.scheduler.view(world.now_ns).session("a").peak_bytes == 30 * GIB


def test_a_session_that_is_being_stopped_is_a_holder_and_does_not_wait_yet():
    world = World("gpu 10 tq=10 mode=always")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "a asks 1; memory a=6; b asks 1")
    assert "#1 page out a (its quantum ended and b waits)" in world.do(11, "time")
    for ahead in (False, True):
        view = world.scheduler.view(12 * NS_PER_S, ahead=ahead)
        assert view.holders == ("a",)
        assert [(entry.session, entry.position) for entry in view.queue] == [("b", 1)]
    assert "grant b burst 1 for 10 s (its turn)" in world.do(13, "#1 out 6 1s")
    view = world.scheduler.view(13 * NS_PER_S)
    assert (view.holders, [entry.session for entry in view.queue]) == (("b",), ["a"])


def test_the_rest_of_a_turn_ends_when_the_first_in_line_gets_the_gpu():
    """With short cells first this is long before the end of the quantum."""
    world = World("gpu 10 tq=30 mode=always policy=interactive")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "a asks 1")
    alone_ns = world.scheduler.view(100 * NS_PER_S).session("a").time_left_ns
    assert alone_ns == 0
    world.do(2, "memory a=6; b asks 1")
    left_ns = world.scheduler.view(2 * NS_PER_S).session("a").time_left_ns
    assert 0 < left_ns < 15 * NS_PER_S
    assert world.do(2 + (left_ns - 1000) / NS_PER_S, "time") == []
    assert "#1 page out a (b goes first)" in world.do(2 + left_ns / NS_PER_S, "time")


@pytest.mark.parametrize("policy", ["interactive", "round-robin"])
def test_a_waiter_that_comes_in_beside_a_runner_ends_no_turn(policy):
    world = World(f"gpu 20 tq=10 policy={policy}")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "b asks 1")
    world.do(2, "memory b=5; b ends 1")
    world.do(3, "memory b=5; b releases")
    world.do(4, "#1 out 5 1s; memory; a asks 1")
    world.do(5, "memory a=6; a ends 1")
    world.do(6, "memory a=6; a asks 2")
    assert world.scheduler.view(30 * NS_PER_S).session("a").time_left_ns == 0
    assert world.do(30, "b asks 2") == ["#2 page in b (its turn)"]
    view = world.scheduler.view(31 * NS_PER_S)
    assert (view.holders, [entry.session for entry in view.queue]) == (("a",), ["b"])
    assert view.session("a").time_left_ns is None
    world.do(32, "#2 in 5 1s")
    assert world.scheduler.view(32 * NS_PER_S).holders == ("a", "b")


def test_a_stale_request_is_ignored():
    world = World()
    world.do(0, "a joins; memory; a asks 5")
    assert world.do(1, "a asks 4") == []
    assert ignored(world) == 1


def test_the_lease_path_is_one_call():
    world = World()
    world.do(0, "a joins; memory")
    assert world.do(1, "a asks 1") == ["grant a burst 1 for 30 s (nobody in the way)"]
    assert world.do(2, "a asks 1") == ["grant a burst 1 for 29 s (asked again)"]


def test_notices_name_no_other_session():
    """Users must not learn from a notice which other sessions there are."""
    world = World("gpu 10 tq=10 ram=1")
    world.do(0, "secret joins; b joins; memory")
    world.do(1, "secret asks 1")
    world.do(2, "memory secret=6")
    world.do(3, "b asks 1")
    world.do(11, "time")
    entry = world.scheduler.view(world.now_ns).queued("b")
    assert entry.blocked is Notice.BLOCKED_HOST_MEMORY
    assert "secret" not in entry.detail


@pytest.mark.parametrize(
    ("mode", "asked", "words"),
    [
        (AntiThrash.ON, "", "as long as they fit together"),
        (
            AntiThrash.ON,
            "a asks 1; b asks 1",
            (
                "together they may need 20.3 GiB (307.2 MiB in reserve), and the GPU has 10 GiB "
                "for them"
            ),
        ),
        (AntiThrash.ALWAYS, "", "anti-thrash is set to always"),
        (
            AntiThrash.OFF,
            "",
            "anti-thrash is off, so that programs may run out of GPU memory",
        ),
    ],
)
def test_why_it_serialises_is_said_in_words(mode, asked, words):
    world = World(f"gpu 10 mode={mode.value}")
    world.do(0, "a joins; b joins; memory")
    if asked:
        world.do(1, asked)
    assert world.scheduler.view(world.now_ns).why == words


def test_nobody_is_said_to_be_in_no_ones_way_while_somebody_waits():
    """One has the GPU; the memory of the other is on its way."""
    world = World("gpu 10")
    world.do(0, "a joins paged-out 3; memory a=0")
    world.do(1, "a asks 1")
    view = world.scheduler.view(world.now_ns)
    assert not view.serialised
    assert [entry.session for entry in view.queue] == ["a"]
    assert view.why == "they fit together; who waits, waits for its memory or for room"


def test_the_audit_finds_wrong_books():
    scheduler = Scheduler(10 * GIB, host_budget_bytes=GIB)
    scheduler.handle(ev.SessionJoined(session="a"), 0)
    scheduler.check()
    scheduler._st.claimed_bytes += 1
    with pytest.raises(AssertionError, match="claimed: kept 1, recomputed 0"):
        scheduler.check()
    scheduler._st.claimed_bytes -= 1
    scheduler._st.sessions["a"].mid_burst = True
    with pytest.raises(AssertionError, match="in mid-burst, not queued"):
        scheduler.check()


def test_operation_ids_go_on_where_the_daemon_before_stopped():
    scheduler = Scheduler(10 * GIB, host_budget_bytes=64 * GIB, first_op=41)
    scheduler.handle(ev.SessionJoined(session="a", resident_bytes=GIB), 0)
    (action,) = scheduler.handle(ev.ReleaseRequested(session="a"), 1)
    assert action.op == 41


def test_unsupported_is_not_tried_again_soon():
    world = busy_world()
    world.do(11, "time")
    reason = Reason.UNSUPPORTED.value
    world.do(12, f"#1 refuses {reason}")
    assert world.scheduler.next_deadline_ns() == 42 * NS_PER_S


def test_a_library_counts_a_peak_that_no_reading_shows() -> None:
    """Reported in the burst, or just after it; what is unknown, or too much, is cut."""
    scheduler = Scheduler(10 * GIB, host_budget_bytes=64 * GIB, tq_ns=30 * NS_PER_S, checks=True)
    a, b = SessionId("a"), SessionId("b")
    for session in (a, b):
        scheduler.handle(ev.SessionJoined(session=session), 0)

    def learnt(session: SessionId, now_ns: int) -> int | None:
        seen = scheduler.view(now_ns).session(session)
        assert seen is not None
        return seen.peak_bytes

    scheduler.handle(ev.LeaseRequested(session=a, burst=1), 1)
    scheduler.handle(ev.NeedReported(session=a, need_bytes=4 * GIB), 2)
    assert learnt(a, 2) is None, "its burst has not ended"
    scheduler.handle(ev.BurstEnded(session=a, burst=1), 3)
    assert learnt(a, 3) == 4 * GIB
    scheduler.handle(ev.NeedReported(session=a, need_bytes=40 * GIB), 4)
    assert learnt(a, 4) == 10 * GIB
    scheduler.handle(ev.NeedReported(session=b, need_bytes=4 * GIB), 5)
    assert learnt(b, 5) is None, "it has had no burst"
    scheduler.handle(ev.NeedReported(session=SessionId("c"), need_bytes=GIB), 6)


def test_a_session_of_which_nobody_says_what_it_has_runs_alone() -> None:
    scheduler = Scheduler(10 * GIB, host_budget_bytes=64 * GIB, tq_ns=30 * NS_PER_S, checks=True)
    a, b = SessionId("a"), SessionId("b")
    for session in (a, b):
        scheduler.handle(ev.SessionJoined(session=session), 0)
    held = {a: 2 * GIB}

    def look(now_ns: int, *unsized: SessionId) -> None:
        seen = ev.MemoryObserved(free_bytes=8 * GIB, resident_bytes=held, unsized=list(unsized))
        scheduler.handle(seen, now_ns)

    for burst in range(1, 6):
        scheduler.handle(ev.LeaseRequested(session=a, burst=burst), 10 * burst)
        look(10 * burst + 1, a)
        scheduler.handle(ev.BurstEnded(session=a, burst=burst), 10 * burst + 2)
    seen = scheduler.view(60).session(a)
    assert seen is not None
    assert seen.peak_bytes is None, "its share of what is in use is no reading of its own"
    scheduler.handle(ev.LeaseRequested(session=a, burst=6), 61)
    scheduler.handle(ev.LeaseRequested(session=b, burst=1), 62)
    assert scheduler.holders == (a,), "nobody runs beside it"
    look(63)
    scheduler.handle(ev.BurstEnded(session=a, burst=6), 64)
    seen = scheduler.view(65).session(a)
    assert seen is not None
    assert seen.peak_bytes == 2 * GIB


@pytest.mark.parametrize("policy", ["interactive", "round-robin"])
def test_work_that_must_end_first_is_asked_for_again_soon_and_the_waiter_knows(policy: str) -> None:
    scheduler = Scheduler(
        10 * GIB, host_budget_bytes=64 * GIB, tq_ns=10 * NS_PER_S, checks=True, policy=policy
    )
    a, b = SessionId("a"), SessionId("b")
    for session in (a, b):
        scheduler.handle(ev.SessionJoined(session=session), 0)
    scheduler.handle(ev.LeaseRequested(session=a, burst=1), 1)
    seen = ev.MemoryObserved(free_bytes=4 * GIB, resident_bytes={a: 6 * GIB})
    scheduler.handle(seen, 2)
    scheduler.handle(ev.LeaseRequested(session=b, burst=1), 3)
    now_ns = 10 * NS_PER_S + 10
    tries = 0
    while now_ns < 4000 * NS_PER_S:
        orders = scheduler.handle(ev.DeadlinePassed(), now_ns)
        for order in (one for one in orders if isinstance(one, PageOut)):
            if tries:
                assert blocked(scheduler, now_ns) == "draining: it must end first"
            tries += 1
            now_ns += 10 * NS_PER_S
            refused = ev.PageOutRefused(
                op=order.op, reason=Reason.DRAINING, detail="it must end first."
            )
            told = [one for one in scheduler.handle(refused, now_ns) if isinstance(one, Notify)]
            assert Notice.PAGE_OUT_REFUSED not in [one.notice for one in told]
            assert blocked(scheduler, now_ns) == "draining: it must end first"
            assert scheduler.next_deadline_ns() == now_ns + DEFAULTS.refusal_backoff_ns
        now_ns = scheduler.next_deadline_ns() or now_ns + NS_PER_S
    assert tries > 300
    orders = scheduler.handle(ev.DeadlinePassed(), now_ns)
    (order,) = (one for one in orders if isinstance(one, PageOut))
    out = ev.PagedOut(op=order.op, moved_bytes=6 * GIB, elapsed_ns=NS_PER_S)
    scheduler.handle(out, now_ns + NS_PER_S)
    assert scheduler.holders == (b,)


def blocked(scheduler: Scheduler, now_ns: int) -> str:
    (entry,) = scheduler.view(now_ns).queue
    assert entry.blocked is Notice.BLOCKED_REFUSED
    return entry.detail


def test_the_time_in_which_a_process_is_stopped_is_neither_held_nor_waited() -> None:
    scheduler = Scheduler(10 * GIB, host_budget_bytes=64 * GIB, tq_ns=900 * NS_PER_S, checks=True)
    a, b = SessionId("a"), SessionId("b")

    def sums(session: SessionId, now_s: int) -> tuple[int, int]:
        seen = scheduler.view(now_s * NS_PER_S).session(session)
        assert seen is not None
        return seen.held_ns // NS_PER_S, seen.waited_ns // NS_PER_S

    def at(now_s: int, *events: ev.Event) -> None:
        for event in events:
            scheduler.handle(event, now_s * NS_PER_S)

    at(0, ev.SessionJoined(session=a), ev.SessionJoined(session=b))
    at(0, ev.LeaseRequested(session=a, burst=1), ev.LeaseRequested(session=b, burst=1))
    at(10, ev.SessionStopped(session=a, why="stopped"), ev.SessionStopped(session=b, why="stopped"))
    assert (sums(a, 70), sums(b, 70)) == ((10, 0), (0, 10))
    at(70, ev.SessionContinued(session=a), ev.SessionContinued(session=b))
    assert (sums(a, 75), sums(b, 75)) == ((15, 0), (0, 15))
    at(80, ev.SessionStopped(session=b, why="stopped"), ev.SessionStopped(session=b, why="still"))
    at(90, ev.BurstEnded(session=a, burst=1))
    assert (sums(a, 100), sums(b, 100)) == ((30, 0), (0, 20))
    at(100, ev.SessionStopped(session=a, why="stopped"))
    at(110, ev.SessionContinued(session=a), ev.LeaseWithdrawn(session=b, burst=1))
    assert (sums(a, 120), sums(b, 120)) == ((30, 0), (0, 20))
    at(130, ev.SessionContinued(session=b), ev.LeaseRequested(session=b, burst=2))
    assert sums(b, 140) == (10, 20)


def test_a_stopped_program_whose_page_in_is_overdue_is_not_said_to_hang() -> None:
    world = World("gpu 10 tq=10 mode=always")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "a asks 1; a ends 1; memory a=6; b asks 1")
    world.do(2, "#1 out 6 1s; memory b=6")
    world.do(3, "b ends 1; a asks 2")
    (order,) = (op for op in world.orders if op != 1)
    world.do(4, f"#{order} out 6 1s")
    coming = max(world.orders)
    scheduler, a = world.scheduler, SessionId("a")
    now_ns = 5 * NS_PER_S
    scheduler.handle(ev.SessionStopped(session=a, why="stopped by Ctrl-Z"), now_ns)
    scheduler.handle(ev.OperationOverdue(op=coming), now_ns)
    (entry,) = scheduler.view(now_ns).queue
    assert (entry.blocked, entry.detail) == (Notice.STOPPED, "stopped by Ctrl-Z")


def test_a_look_from_before_the_end_of_a_burst_does_not_judge_it() -> None:
    scheduler = Scheduler(10 * GIB, host_budget_bytes=64 * GIB, tq_ns=30 * NS_PER_S, checks=True)
    a = SessionId("a")
    scheduler.handle(ev.SessionJoined(session=a), 0)
    scheduler.handle(ev.LeaseRequested(session=a, burst=1), 1)
    scheduler.handle(ev.BurstEnded(session=a, burst=1), 10)
    session = scheduler._st.sessions[a]
    for began_ns, unjudged in ((5, 1), (11, 0)):
        seen = ev.MemoryObserved(
            free_bytes=10 * GIB, resident_bytes={a: 0}, busy={a: False}, began_ns=began_ns
        )
        scheduler.handle(seen, 12)
        assert session.unjudged_bursts == unjudged
    assert session.quiet_bursts == 0, "the GPU did nothing in it"
    scheduler.handle(ev.LeaseRequested(session=a, burst=2), 20)
    scheduler.handle(ev.BurstEnded(session=a, burst=2), 30)
    left = ev.MemoryObserved(
        free_bytes=10 * GIB, resident_bytes={a: 0}, busy={a: False}, allocated=[a], began_ns=31
    )
    scheduler.handle(left, 32)
    assert session.quiet_bursts == 1, "it left allocations"
