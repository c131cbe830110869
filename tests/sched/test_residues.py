"""Tests of what a page-out leaves in the GPU: contexts, and what a library cannot own."""

from __future__ import annotations

import pytest
from world import World, gib

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageIn, PageOut
from kiwi_core.sched.model.session import Session
from kiwi_core.sched.replay import MovedBytes
from kiwi_core.sched.rules.room import survey
from kiwi_core.states import Reason
from kiwi_core.units import GIB, NS_PER_S, OpId, SessionId

S = NS_PER_S


def session(world: World, name: str) -> Session:
    return world.scheduler._st.sessions[SessionId(name)]


def page_outs(world: World) -> list[str]:
    return [order.session for order in world.orders.values() if isinstance(order, PageOut)]


@pytest.mark.parametrize("owned", ["owned=ab", ""])
def test_bytes_that_were_out_before_do_not_count_as_moved_again(owned: str) -> None:
    """A second page-out of a session that is out reports all bytes that are out by then. It does
    not count for the speed of moves, since the driver makes it, not the library."""
    world = World("gpu 16 tq=30")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "a asks 1")
    world.do(2, f"memory a=9 {owned}; a ends 1; a releases")
    world.do(3, "#1 out 8.5 1s")
    world.do(4, f"memory a=0.5 {owned}")
    speed = world.scheduler._st.speed.out_ns_per_byte
    world.do(5, "b wants 15.8")
    assert page_outs(world)[-1] == "a"
    world.do(7, "#2 out 9 2s")
    assert world.scheduler.accounts(world.now_ns)[SessionId("a")].moved_out_bytes == gib("9")
    assert world.scheduler.view(world.now_ns).swaps[-1].bytes_moved == gib("0.5")
    assert world.scheduler.history(0, world.now_ns)[-1].bytes_moved == gib("0.5")
    assert world.scheduler._st.speed.out_ns_per_byte == speed
    assert session(world, "a").paged_out_bytes == session(world, "a").footprint_bytes == gib("9")


def test_a_restarted_daemon_finds_one_whose_page_out_was_cut_short() -> None:
    """The daemon knows only what the driver says, and goes on from there."""
    world = World("gpu 16 tq=30")
    joined = ev.SessionJoined(
        session=SessionId("a"),
        residency=ev.Residency.PAGED_OUT,
        resident_bytes=gib("6.5"),
        paged_out_bytes=gib("2.5"),
        mid_burst=True,
        burst=3,
    )
    world.scheduler.handle(joined, 0)
    assert world.do(1, "memory a=6.5 owned=a") == ["#1 page in a (its turn)"]
    assert world.orders[1].need_bytes == gib("2.5")


def test_what_each_report_of_a_move_moved() -> None:
    """The rest goes out later, then all comes back and goes out at once."""
    a, b = SessionId("a"), SessionId("b")
    moved = MovedBytes()

    def out(session: SessionId, bytes_: int) -> int:
        return moved.of(session, ev.PagedOut(op=OpId(1), moved_bytes=bytes_, elapsed_ns=1))

    assert [out(a, 3), out(a, 5), out(b, 4), out(a, 10)] == [3, 2, 4, 5]
    assert moved.of(a, ev.ResidueBack(op=OpId(1), moved_bytes=1, elapsed_ns=1)) == 1
    assert out(a, 10) == 1, "the driver has taken it again"
    assert moved.of(a, ev.PagedIn(op=OpId(1), moved_bytes=10, elapsed_ns=1)) == 10
    assert [out(a, 10), out(a, 11), out(a, 11)] == [10, 1, 0], "what had stayed, and nothing more"


# --- what stays in the GPU of one that is out -----------------------------------------------------


def out_but_for_its_context(line: str = "gpu 16 tq=30") -> World:
    """Return a world in which the library of a has moved 8.5 of its 9 GiB out, and 0.5 stays."""
    world = World(line)
    world.do(0, "a joins; memory")
    world.do(1, "a asks 1")
    world.do(2, "memory a=9 owned=a; a ends 1; a asks 2; a ends 2; a releases")
    world.do(3, "#1 out 8.5 1s stays=0.5")
    assert page_outs(world) == ["a"]
    return world


def test_a_residue_counts_as_memory_of_its_session() -> None:
    world = out_but_for_its_context()
    st = world.scheduler._st
    assert (st.resident_bytes, st.free_bytes) == (gib("0.5"), gib("15.5"))
    world.do(4, "memory a=0.5 owned=a")
    assert st.outside_bytes == 0
    world.do(5, "a asks 3")
    assert list(st.waiting_partly_in) == ["a"], "none whose memory is in place"
    assert world.orders[OpId(2)].need_bytes == gib("8.5")
    world.do(6, "#2 in 8.5 1s")
    assert session(world, "a").resident_bytes == gib("9")


@pytest.mark.parametrize(
    ("holds", "wants", "answer"),
    [
        ("3", "1.2", "room for c, request 1"),
        ("15.2", "0.8", "#2 page out a (c asks for more)"),
    ],
)
def test_a_newcomer_and_the_margin_take_no_residue(holds: str, wants: str, answer: str) -> None:
    """They take none at the start nor when it grows: a session with a library asks for room."""
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 owned=a; c joins")
    assert world.do(5, "c asks 1") == ["grant c burst 1 for 30 s (nobody in the way)"]
    assert world.do(6, f"memory a=0.5 c={holds} owned=ac") == []
    assert world.do(7, f"c wants {wants}") == [answer]


def test_a_session_that_cannot_ask_for_room_has_its_margin() -> None:
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 owned=a; c joins; c asks 1")
    assert world.do(6, "memory a=0.5 c=14 owned=a") == []
    answers = world.do(7, "memory a=0.5 c=15.2 owned=a")
    assert answers == ["#2 page out a (the runners need more room)"]


def test_a_page_in_that_lacks_room_takes_residues() -> None:
    world = out_but_for_its_context("gpu 16 tq=30 ram=80")
    world.do(4, "memory a=0.5 owned=a; b joins paged-out 15.8; b asks 1")
    assert page_outs(world)[-1] == "a"
    world.do(5, "#2 out 9 1s")
    assert type(world.orders[3]) is PageIn


def test_a_residue_that_the_driver_refuses_is_left_alone_for_a_while() -> None:
    world = out_but_for_its_context("gpu 16 tq=30 ram=80")
    world.do(4, "memory a=0.5 owned=a; b joins paged-out 15.8; b asks 1")
    world.do(5, "#2 refuses driver")
    assert world.look("queue") == "queue b blocked-refused"
    world.do(7, "time")
    assert page_outs(world)[-1] == "a"


def test_runners_that_outgrow_the_gpu_together_take_residues_first() -> None:
    world = out_but_for_its_context()
    world.do(5, "b joins; b asks 1; memory a=0.5 b=5 owned=abc; b ends 1; b asks 2; b ends 2")
    world.do(10, "c joins; c asks 1")
    world.do(11, "#2 out 5 1s")
    world.do(12, "memory a=0.5 b=0 c=5 owned=abc; c ends 1; c asks 2; c ends 2; b asks 3")
    world.do(13, "#3 in 5 1s")
    world.do(20, "c asks 3; memory a=0.5 b=5 c=5 owned=abc")
    assert world.look("b, c") == "b running, c running"
    answers = world.do(21, "memory a=0.5 b=7.6 c=7.6 owned=abc")
    assert answers == ["#4 page out a (the runners need more room)"]


def test_a_session_that_makes_way_goes_out_rather_than_residues() -> None:
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 owned=a; c joins; c asks 1")
    world.do(5, "memory a=0.5 c=3 owned=ac; b joins; b asks 1")
    world.do(40, "time")
    assert page_outs(world) == ["a", "c"]
    world.do(42, "#2 out 2.5 1s stays=0.5")
    assert world.look("holders") == "holders b"
    assert page_outs(world) == ["a", "c"]


def test_no_residue_goes_for_a_hint() -> None:
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 owned=a; b joins paged-out 15.4")
    world.do(60, "b hinted")
    assert type(world.orders[2]) is PageIn, "it fits, though without the margin"
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 owned=a; b joins paged-out 15.8")
    assert world.do(60, "b hinted") == []


def test_a_session_that_leaves_keeps_what_it_has_in_the_gpu() -> None:
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 owned=a; b joins; b asks 1; memory a=0.5 b=9 owned=ab; a detaches")
    st = world.scheduler._st
    assert (list(st.waiting_partly_in), list(st.ops)) == (["a"], [])
    assert not survey(st, GIB).victims


def test_what_a_page_out_cut_short_has_left_is_no_residue() -> None:
    """A library can move this memory, so it is paged out for a newcomer, too."""
    world = World("gpu 16 tq=30")
    world.do(0, "a joins; memory; a asks 1")
    world.do(2, "memory a=9 owned=a; a ends 1; a releases")
    world.do(3, "#1 out 4 1s stays=5; memory a=5 owned=a; c joins")
    assert world.do(4, "c asks 1") == ["#2 page out a (room for c)"]
    world.do(5, "#2 out 8.5 1s stays=0.5")
    assert world.look("c, ram") == "c running, ram 8.5"


def test_nothing_of_a_session_that_is_out_is_released_again() -> None:
    world = out_but_for_its_context()
    assert world.do(4, "memory a=0.5 owned=a; a releases") == []


# --- what the driver has taken comes back ---------------------------------------------------------


def taken_by_the_driver(line: str = "gpu 16 tq=30 ram=80") -> World:
    """Return a world in which the driver has taken the contexts of a (0.5 GiB), because b needed
    all of the GPU. Now b idles with 15.8 GiB."""
    world = out_but_for_its_context(line)
    world.do(4, "memory a=0.5 owned=a; b joins; b asks 1; memory a=0.5 b=15.2 owned=ab")
    assert world.do(5, "b wants 0.8") == ["#2 page out a (b asks for more)"]
    world.do(6, "#2 out 9 1s; memory taken=a:0.5 b=15.8 owned=b; b unwants 1; b ends 1")
    assert page_outs(world) == ["a", "a"]
    return world


BACK = "bring back the contexts of a"


def test_contexts_come_back_for_their_own_sake_once_there_is_room() -> None:
    """Only the driver's part: what the library has out stays out, and nobody gets the lease."""
    world = taken_by_the_driver()
    assert world.do(20, "memory taken=a:0.5 b=15.8 owned=b") == [], "there is no room"
    assert world.do(21, "memory taken=a:0.5 b=2 owned=b") == [f"#3 {BACK} (there is room)"]
    assert world.orders[OpId(3)].need_bytes == gib("0.5")
    assert world.look("a, ram") == "a paged-out, ram 9"
    world.do(22, "#3 back 0.5 1s")
    st = world.scheduler._st
    assert world.look("a, ram, holders") == "a paged-out, ram 8.5, holders -"
    assert (session(world, "a").resident_bytes, st.resident_bytes) == (gib("0.5"), gib("2.5"))
    assert world.do(23, "memory a=0.5 b=2 owned=ab; a asks 3") == ["#4 page in a (its turn)"]
    assert world.orders[OpId(4)].need_bytes == gib("8.5")


def test_contexts_that_were_just_taken_stay_out_for_a_while() -> None:
    """The pause doubles each time, until their session has run."""
    world = taken_by_the_driver()
    assert world.do(8, "memory taken=a:0.5 b=2 owned=b") == []
    assert world.look("wake") == "wake 16"
    assert world.do(16, "time") == [f"#3 {BACK} (there is room)"]
    answers = world.do(17, "#3 back 0.5 1s; memory a=0.5 b=2 owned=ab; b asks 2")
    assert answers == ["#4 page out a (room for b)"]
    world.do(20, "#4 out 9 1s; memory taken=a:0.5 b=2 owned=b; b ends 2")
    assert world.do(39, "time") == []
    assert world.do(40, "time") == [f"#5 {BACK} (there is room)"]
    world.do(41, "#5 refuses no-room")
    assert world.do(80, "time") == []
    assert world.do(81, "time") == [f"#6 {BACK} (there is room)"]
    world.do(82, "#6 back 0.5 1s; a asks 3")
    world.do(84, "#7 in 8.5 1s")
    assert session(world, "a").residue_pause_ns == 0


def test_contexts_whose_call_waits_come_back_at_once_into_any_room() -> None:
    world = taken_by_the_driver()
    assert world.do(7, "a stands") == [], "there is no room"
    answers = world.do(8, "memory taken=a:0.5 b=9 owned=b; b asks 2")
    assert answers[0] == f"#3 {BACK} (a call waits for them)"
    assert world.look("a, b") == "a paged-out, b running"
    world.do(9, "#3 back 0.5 1s")
    assert world.scheduler._st.taken == {}
    assert world.do(10, "a stands; a stands") == [f"#4 {BACK} (a call waits for them)"]


def test_a_call_that_waits_before_the_driver_was_seen_to_have_anything() -> None:
    """It may have taken the process since the last reading, or not at all: the pager finds out."""
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 owned=a")
    assert world.do(5, "a stands") == [f"#2 {BACK} (a call waits for them)"]
    world.do(6, "#2 back 0 0s")
    assert session(world, "a").resident_bytes == gib("0.5")
    assert world.do(8, "a asks 3; a stands") == ["#3 page in a (its turn)"]
    world.do(9, "#3 in 8.5 1s")
    assert world.do(10, "a stands") == world.do(11, "nobody stands") == []


def test_contexts_do_not_come_back_for_which_a_turn_would_take_them_again() -> None:
    """Two sessions take turns; with the larger one there is no room for the contexts."""
    world = taken_by_the_driver()
    world.do(30, "memory taken=a:0.5 b=15.8 owned=b; c joins paged-out 4; c asks 1")
    assert page_outs(world)[-1] == "b"
    world.do(33, "#3 out 15.3 1s stays=0.5; b asks 2")
    world.do(35, "#4 in 4 1s")
    assert world.look("c, b") == "c running, b waiting"
    assert world.do(40, "memory taken=a:0.5 b=0.5 c=4 owned=bc") == []
    assert world.do(41, "b withdraws 2") == [f"#5 {BACK} (there is room)"]


@pytest.mark.parametrize(
    "words", ["a suspended an admin", "a stops by Ctrl-Z", "a asks 3; a withdraws 3; a asks 4"]
)
def test_whose_contexts_are_left_where_they_are(words: str) -> None:
    world = taken_by_the_driver()
    world.do(7, words)
    answers = world.do(30, "memory taken=a:0.5 b=2 owned=b")
    assert not [answer for answer in answers if "contexts" in answer]


def test_contexts_come_back_one_at_a_time_and_after_all_else() -> None:
    world = taken_by_the_driver()
    world.do(8, "c joins paged-out 4; memory taken=c:0.5 b=15.8; memory taken=a:0.5 b=15.8")
    assert world.do(29, "time") == [], "neither has room"
    world.do(30, "b releases")
    assert world.do(31, "memory taken=a:0.5 b=15.8") == [], "memory moves"
    assert world.do(32, "#3 out 15.8 1s") == [f"#4 {BACK} (there is room)"]
    assert world.do(34, "memory taken=c:0.5") == []
    answers = world.do(35, "#4 back 0.5 1s")
    assert answers == ["#5 bring back the contexts of c (there is room)"]
    assert world.do(36, "b asks 2") == [], "a restore is under way"
    answers = world.do(37, "#5 back 0.5 1s")
    assert answers == ["#6 page out a (room for b)", "#7 page out c (room for b)"]


def test_a_session_that_asks_while_its_contexts_come_back_goes_on_from_there() -> None:
    world = taken_by_the_driver()
    assert world.do(21, "memory taken=a:0.5 b=2 owned=b") == [f"#3 {BACK} (there is room)"]
    assert world.do(22, "a asks 3") == []
    assert world.look("queue") == "queue a about 1 s"
    assert world.do(23, "#3 back 0.5 1s") == ["#4 page in a (its turn)"]


def test_a_session_whose_contexts_are_lost_is_lost() -> None:
    world = taken_by_the_driver()
    world.do(21, "memory taken=a:0.5 b=2 owned=b")
    assert world.do(22, "#3 loses")[0].startswith("tell a lost")
    assert world.look("a") == "a lost [lost]"


def test_an_answer_about_contexts_that_nobody_ordered_changes_nothing() -> None:
    world = taken_by_the_driver()
    world.do(21, "memory taken=a:0.5 b=2 owned=b")
    world.scheduler.handle(ev.PagedIn(op=OpId(3), moved_bytes=1, elapsed_ns=1), world.now_ns)
    for outcome in (
        ev.ResidueBack(op=OpId(2), moved_bytes=1, elapsed_ns=1),
        ev.ResidueRefused(op=OpId(2), reason=Reason.DRIVER),
    ):
        world.scheduler.handle(outcome, world.now_ns)
    assert world.look("a, ignored") == "a paged-out, ignored 3"
    world.do(22, "#3 overdue; a dies")
    assert world.look("a") == "a unknown"
    world.do(23, "#3 back 0.5 1s")
    assert world.scheduler._st.resident_bytes == gib("2")


def test_room_that_a_hung_operation_may_take_is_not_given_to_contexts() -> None:
    world = taken_by_the_driver()
    world.do(7, "memory b=2 taken=a:0.5 owned=b; c joins paged-out 13.5; c asks 1")
    world.do(8, "#3 out 2 1s; #4 overdue; b joins; memory b=2 taken=a:0.5")
    assert world.do(60, "memory b=2 taken=a:0.5") == []
    assert world.do(61, "memory b=0 taken=a:0.5") == [f"#5 {BACK} (there is room)"]


# --- contexts of sessions that have been idle for long --------------------------------------------


def idle_with_contexts(sizes: dict[str, float]) -> World:
    """Return a world of sessions that have only contexts in the GPU, and idle since 3 s."""
    world = World("gpu 16 tq=30 ram=80")
    for n, (name, size) in enumerate(sizes.items(), 1):
        world.do(0, f"{name} joins; memory; {name} asks 1")
        world.do(2, f"memory {name}=5 owned={name}; {name} ends 1; {name} releases")
        world.do(3, f"#{n} out {5 - size} 1s stays={size}")
    return world


def reading(sizes: dict[str, float]) -> str:
    held = " ".join(f"{name}={size}" for name, size in sizes.items())
    return f"memory {held} owned={''.join(sizes)}"


def test_contexts_of_the_longest_idle_are_taken_early_if_all_take_much() -> None:
    """They go one at a time, until all others take an eighth of the GPU at most; and what is out
    comes back only within that."""
    sizes = {"a": 0.75, "b": 0.75, "c": 0.75}
    world = idle_with_contexts(sizes)
    assert world.do(601, reading(sizes)) == []
    answers = world.do(604, reading(sizes))
    assert answers == ["#4 page out a (idle for long, and contexts take much of the GPU)"]
    world.do(606, "#4 out 5 1s; memory b=0.75 c=0.75 taken=a:0.75 owned=bc")
    assert world.do(700, "memory b=0.75 c=0.75 taken=a:0.75 owned=bc") == []
    assert world.do(701, "a stands") == ["#5 bring back the contexts of a (a call waits for them)"]
    world.do(702, "#5 refuses driver")
    assert world.do(725, "c dies; memory b=0.75 taken=a:0.75 owned=b") != []


@pytest.mark.parametrize(
    ("sizes", "before"),
    [
        ({"a": 0.75, "b": 0.75}, ""),
        ({"a": 0.75, "b": 0.75, "c": 0.75}, "d joins; d asks 1; e joins paged-out 15; e asks 1"),
        ({"a": 0.75, "b": 0.75, "c": 0.75}, "ram 0"),
    ],
    ids=["little", "somebody-waits", "no-ram"],
)
def test_no_contexts_are_taken_early(sizes: dict[str, float], before: str) -> None:
    world = idle_with_contexts(sizes)
    if before:
        world.do(600, before)
    assert not [one for one in world.do(604, reading(sizes)) if "idle for long" in one]


def test_a_session_that_cannot_go_is_passed_over() -> None:
    sizes = {"a": 0.75, "b": 0.75, "c": 0.75}
    world = idle_with_contexts(sizes)
    world.do(600, "a stops by Ctrl-Z")
    assert world.do(604, reading(sizes))[0].startswith("#4 page out b (idle for long")
    assert world.do(605, "#4 refuses driver")[-1].startswith("#5 page out c (idle for long")
    world = idle_with_contexts(sizes)
    world.do(600, "a detaches; a continues; b unguarded; b stops by Ctrl-Z")
    assert not [one for one in world.do(602, reading(sizes)) if "idle for long" in one]
