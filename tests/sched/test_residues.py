"""Tests of what a page-out leaves in the GPU: contexts, and what a library cannot own."""

from __future__ import annotations

import pytest
from world import World, gib

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageIn, PageOut
from kiwi_core.sched.model.session import Session
from kiwi_core.sched.replay import MovedBytes
from kiwi_core.sched.rules.room import survey
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
