"""Moves in part."""

from __future__ import annotations

import pytest
from world import World, gib

from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import PageIn, PageOut
from kiwi_core.sched.futures import futures
from kiwi_core.sched.moved import MovedBytes
from kiwi_core.sched.parts import grain_bytes, part_bytes, part_that_fits_bytes
from kiwi_core.sched.room import idle_ones, survey
from kiwi_core.sched.session import Session
from kiwi_core.sched.waits import expected_waits_ns
from kiwi_core.units import GIB, MIB, NS_PER_S, OpId, SessionId

S = NS_PER_S


def two(line: str = "gpu 16 tq=30") -> World:
    """a and b have 9 GiB each and are known to need no more; b's are in the GPU, a has 2.5 out."""
    world = World(line)
    world.do(0, "a joins; b joins; memory")
    for name, at_s in (("a", 1), ("b", 5)):
        world.do(at_s, f"{name} asks 1")
        if name == "b":
            world.do(6, "#1 out 9 3s")
        world.do(at_s + 2, f"memory {name}=9 parts=ab")
        world.do(at_s + 3, f"{name} ends 1; {name} asks 2; {name} ends 2")
    world.do(10, "a asks 3")
    world.do(11, "#2 out 2.5 1s left=6.5")
    world.do(12, "#3 in 9 3s")
    world.do(13, "memory a=9 b=6.5 parts=ab; a ends 3; b asks 3")
    world.do(14, "#4 out 2.5 1s left=6.5")
    world.do(15, "#5 in 2.5 1s; memory a=6.5 b=9 parts=ab")
    return world


def session(world: World, name: str) -> Session:
    return world.scheduler._st.sessions[SessionId(name)]


def orders(world: World) -> list[tuple[str, str, float]]:
    return [
        (type(order).__name__, order.session, order.bytes / GIB)
        for order in world.orders.values()
        if isinstance(order, PageOut)
    ]


# --- how much -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short_gib", "out_gib", "part_gib"),
    [
        (0.1, 0, 1),
        (1.0, 0, 1),
        (1.1, 0, 1.25),
        (1.1, 6, 3),
        (7.0, 0, 7),
        (8.2, 0, 8.25),
        (8.6, 0, 0),
        (20.0, 0, 0),
    ],
)
def test_what_goes_out(short_gib: float, out_gib: float, part_gib: float) -> None:
    """Whole grains; a sixteenth of the GPU at least, and half as much again as is out; all of it
    rather than leave a crumb."""
    st = World("gpu 16").scheduler._st
    one = Session(SessionId("a"), partial=True, resident_bytes=gib("9"))
    one.paged_out_bytes = gib(str(out_gib))
    assert part_bytes(st, one, gib(str(short_gib))) == part_gib * GIB
    one.partial = False
    assert part_bytes(st, one, gib(str(short_gib))) == 0


def test_what_fits_into_system_ram() -> None:
    st = World("gpu 16").scheduler._st
    one = Session(SessionId("a"), partial=True)
    assert part_that_fits_bytes(st, one, gib("2.6")) == gib("2.25"), "it may take a grain more"
    assert part_that_fits_bytes(st, one, gib("0.4")) == 0
    assert part_that_fits_bytes(st, one, -gib("3")) == 0
    one.partial = False
    assert part_that_fits_bytes(st, one, gib("2.6")) == 0


def test_grains() -> None:
    assert grain_bytes(80 * GIB) == 256 * MIB
    assert grain_bytes(4 * GIB) == 64 * MIB


# --- who ------------------------------------------------------------------------------------------


def test_the_rest_of_what_is_out_goes_before_what_was_used_longer_ago() -> None:
    world = two()
    world.do(20, "c joins resident 0.01; a asks 4; a withdraws 4")
    st = world.scheduler._st
    assert list(st.idle) == ["c", "a"], "c has been idle for longer"
    found = survey(st, gib("1.2"))
    assert [(victim.id, part) for victim, part in found.victims] == [("a", gib("1.25"))]
    assert [victim.id for victim in idle_ones(st)] == ["a", "c"]


def test_a_rest_of_a_waiter_is_not_in_place() -> None:
    """Policies serve those first whose memory is in the GPU; what is partly out has to come in."""
    world = two("gpu 16 tq=30 policy=interactive")
    world.do(16, "a asks 4")
    st = world.scheduler._st
    assert (list(st.waiting_in), list(st.waiting_partly_in)) == ([], ["a"])
    world.do(17, "a withdraws 4")
    assert not st.waiting_partly_in


def test_parallel_runners_that_outgrow_the_gpu_give_what_is_short() -> None:
    world = World("gpu 16 tq=30")
    world.do(0, "a joins; b joins; memory")
    for n in (1, 2):
        world.do(n, f"a asks {n}; memory a=5 parts=ab; a ends {n}")
    for n in (1, 2):
        world.do(n + 3, f"b asks {n}")
        if n == 1:
            world.do(4.5, "#1 out 5 1s")
        world.do(n + 3.6, f"memory b=5 parts=ab; b ends {n}")
    world.do(6, "a asks 3")
    world.do(7, "#2 in 5 1s")
    world.do(8, "b asks 3; memory a=5 b=5 parts=ab")
    assert world.look("a, b") == "a running, b running"
    world.do(17, "memory a=8 b=7.9 parts=ab")
    (stop,) = [o for o in world.orders.values() if isinstance(o, PageOut)][1:]
    assert (stop.session, stop.bytes) == ("b", GIB)


def test_a_hint_moves_only_what_is_short() -> None:
    world = two()
    world.do(20, "b ends 3")
    world.do(60, "a hinted")
    assert orders(world)[-1] == ("PageOut", "b", 2.5)


# --- what is learned and shown --------------------------------------------------------------------


def test_what_was_out_before_does_not_count_as_moved_again() -> None:
    world = two()
    speed = world.scheduler._st.speed.out_ns_per_byte
    before = world.scheduler.accounts(world.now_ns)[SessionId("a")].moved_out_bytes
    world.do(20, "b wants 2")
    order = world.orders[max(world.orders)]
    assert (order.session, order.bytes) == ("a", gib("2"))
    world.do(21, f"#{order.op} out 4.5 0.8s left=4.5")
    account = world.scheduler.accounts(world.now_ns)[SessionId("a")]
    assert account.moved_out_bytes - before == gib("2")
    assert world.scheduler.view(world.now_ns).swaps[-1].bytes_moved == gib("2")
    assert world.scheduler.history(0, world.now_ns)[-1].bytes_moved == gib("2")
    assert world.scheduler._st.speed.out_ns_per_byte == pytest.approx(speed, rel=0.5)
    assert session(world, "a").footprint_bytes == gib("9")


@pytest.mark.parametrize("parts", ["parts=ab", ""])
def test_nor_where_the_driver_takes_what_a_library_has_left(parts: str) -> None:
    """A second page-out of what is out tells all that is out by then. It is none of the moves that
    say how fast memory moves: the driver's way is another one."""
    world = World("gpu 16 tq=30")
    world.do(0, "a joins; b joins; memory")
    world.do(1, "a asks 1")
    world.do(2, f"memory a=9 {parts}; a ends 1; a releases")
    world.do(3, "#1 out 8.5 1s")
    world.do(4, f"memory a=0.5 {parts}")
    speed = world.scheduler._st.speed.out_ns_per_byte
    world.do(5, "b wants 15.8")
    assert orders(world)[-1] == ("PageOut", "a", 0)
    world.do(7, "#2 out 9 2s")
    assert world.scheduler.accounts(world.now_ns)[SessionId("a")].moved_out_bytes == gib("9")
    assert world.scheduler.view(world.now_ns).swaps[-1].bytes_moved == gib("0.5")
    assert world.scheduler.history(0, world.now_ns)[-1].bytes_moved == gib("0.5")
    assert world.scheduler._st.speed.out_ns_per_byte == speed
    assert session(world, "a").paged_out_bytes == session(world, "a").footprint_bytes == gib("9")


def test_stopping_costs_what_is_lacking() -> None:
    world = two()
    st = world.scheduler._st
    a, b = session(world, "a"), session(world, "b")
    assert st.swap_ns(b) == 0, "nobody is in its way"
    world.do(16, "a asks 4")
    lacking = 18 * GIB + st.margin_bytes - 16 * GIB
    assert st.stopping_bytes(b) == lacking
    assert st.swap_ns(b) == st.speed.round_trip_ns(lacking)
    assert st.moving_ns(a) == st.speed.round_trip_ns(gib("2.5")), "the rest is there"
    b.partial = False
    assert st.stopping_bytes(b) == 9 * GIB


def test_waits_know_of_parts() -> None:
    world = two()
    world.do(16, "a asks 4")
    st = world.scheduler._st
    # b's bursts are of no length: it is there for its quantum
    stop_s = (session(world, "b").granted_ns + st.quantum_ns(session(world, "b"))) / S - 16
    out_s, in_s = st.speed.out_ns(gib("2.5")) / S, st.speed.in_ns(gib("2.5")) / S
    waits = futures(st, 16 * S).waits_ns[SessionId("a")]
    assert max(waits) / S == pytest.approx(stop_s + out_s + in_s, abs=0.1)
    roughly = expected_waits_ns(st, 16 * S)[SessionId("a")]
    assert roughly is not None
    assert roughly / S == pytest.approx(stop_s + out_s + in_s, abs=1)
    # ... and the same while it is under way.
    world.do(16 + stop_s, "time")
    assert [type(order) for order in st.actions[1:]] == [PageOut]
    waits = futures(st, world.now_ns).waits_ns[SessionId("a")]
    assert max(waits) / S == pytest.approx(out_s + in_s, abs=0.1)


def test_a_restarted_daemon_finds_what_is_partly_out() -> None:
    """By the driver's word alone: it goes on from there."""
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
    assert world.do(1, "memory a=6.5 parts=a") == ["#1 page in a (its turn)"]
    assert world.orders[1].need_bytes == gib("2.5")


def test_what_a_program_frees_while_it_is_out_is_not_left() -> None:
    world = two()
    world.do(20, "memory a=1 b=9 parts=ab")
    assert session(world, "a").left_bytes == GIB
    world.do(21, "memory a=0 b=9 parts=ab")
    assert not world.scheduler._st.parted


def test_what_each_report_of_a_move_moved() -> None:
    """Part by part, then back, then all at once; and one that is gone is forgotten."""
    a, b = SessionId("a"), SessionId("b")
    moved = MovedBytes()

    def out(session: SessionId, bytes_: int, left: int = 0) -> int:
        event = ev.PagedOut(op=OpId(1), moved_bytes=bytes_, elapsed_ns=1, left_bytes=left)
        return moved.of(session, event)

    assert [out(a, 3, 7), out(a, 5, 5), out(b, 4), out(a, 10)] == [3, 2, 4, 5]
    assert moved.of(a, ev.PagedIn(op=OpId(1), moved_bytes=10, elapsed_ns=1)) == 10
    assert [out(a, 10), out(a, 11), out(a, 11)] == [10, 1, 0], "what had stayed, and nothing more"
    moved.forget(b)
    assert [out(b, 4, 1), out(b, 3, 1), out(b, 4, 0)] == [4, 0, 0]
    out(a, 3, 7)
    moved.forget(a)
    moved.forget(a)
    assert out(a, 4, 1) == 4


# --- what stays in the GPU of one that is out -----------------------------------------------------


def out_but_for_its_context(line: str = "gpu 16 tq=30") -> World:
    """a has 9 GiB; its library moved 8.5 of it out, and 0.5 stays."""
    world = World(line)
    world.do(0, "a joins; memory")
    world.do(1, "a asks 1")
    world.do(2, "memory a=9 parts=a; a ends 1; a asks 2; a ends 2; a releases")
    world.do(3, "#1 out 8.5 1s stays=0.5")
    assert [order[1:] for order in orders(world)] == [("a", 0)]
    return world


def test_what_stays_is_its_own_at_once() -> None:
    world = out_but_for_its_context()
    st = world.scheduler._st
    assert (st.resident_bytes, st.free_bytes) == (gib("0.5"), gib("15.5"))
    assert not session(world, "a").left_bytes, "its library has left nothing"
    world.do(4, "memory a=0.5 parts=a")
    assert st.outside_bytes == 0
    world.do(5, "a asks 3")
    assert list(st.waiting_partly_in) == ["a"], "none whose memory is in place"
    assert world.orders[OpId(2)].need_bytes == gib("8.5")
    world.do(6, "#2 in 8.5 1s")
    assert session(world, "a").resident_bytes == gib("9")


def test_a_part_that_is_left_and_what_stays_besides() -> None:
    world = two()
    world.do(20, "b wants 2")
    world.do(21, f"#{max(world.orders)} out 4.5 0.8s left=4 stays=0.5")
    assert session(world, "a").resident_bytes == gib("4.5")
    assert session(world, "a").left_bytes == gib("4")


@pytest.mark.parametrize(
    ("holds", "wants", "answer"),
    [
        ("3", "1.2", "room for c, request 1"),
        ("15.2", "0.8", "#2 page out a (c asks for more)"),
    ],
)
def test_a_newcomer_and_the_margin_take_no_residue(holds: str, wants: str, answer: str) -> None:
    """Not at the start, nor when it grows: a linked one asks for room where it lacks any."""
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 parts=a; c joins")
    assert world.do(5, "c asks 1") == ["grant c burst 1 for 30 s (nobody in the way)"]
    assert world.do(6, f"memory a=0.5 c={holds} parts=ac") == []
    assert world.do(7, f"c wants {wants}") == [answer]


def test_one_that_cannot_ask_for_room_has_its_margin() -> None:
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 parts=a; c joins; c asks 1")
    assert world.do(6, "memory a=0.5 c=14 parts=a") == []
    answers = world.do(7, "memory a=0.5 c=15.2 parts=a")
    assert answers == ["#2 page out a (the runners need more room)"]


def test_a_page_in_that_lacks_room_takes_residues() -> None:
    world = out_but_for_its_context("gpu 16 tq=30 ram=80")
    world.do(4, "memory a=0.5 parts=a; b joins paged-out 15.8; b asks 1")
    assert orders(world)[-1] == ("PageOut", "a", 0)
    world.do(5, "#2 out 9 1s")
    assert type(world.orders[3]) is PageIn


def test_a_residue_that_the_driver_refuses_is_left_alone_for_a_while() -> None:
    world = out_but_for_its_context("gpu 16 tq=30 ram=80")
    world.do(4, "memory a=0.5 parts=a; b joins paged-out 15.8; b asks 1")
    world.do(5, "#2 refuses driver")
    assert world.look("queue") == "queue b:blocked-refused"
    world.do(7, "time")
    assert orders(world)[-1] == ("PageOut", "a", 0)


def test_runners_that_outgrow_the_gpu_together_take_residues_first() -> None:
    world = out_but_for_its_context()
    world.do(5, "b joins; b asks 1; memory a=0.5 b=5 parts=abc; b ends 1; b asks 2; b ends 2")
    world.do(10, "c joins; c asks 1")
    world.do(11, "#2 out 5 1s")
    world.do(12, "memory a=0.5 b=0 c=5 parts=abc; c ends 1; c asks 2; c ends 2; b asks 3")
    world.do(13, "#3 in 5 1s")
    world.do(20, "c asks 3; memory a=0.5 b=5 c=5 parts=abc")
    assert world.look("b, c") == "b running, c running"
    answers = world.do(21, "memory a=0.5 b=7.6 c=7.6 parts=abc")
    assert answers == ["#4 page out a (the runners need more room)"]


def test_who_makes_way_goes_out_rather_than_residues() -> None:
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 parts=a; c joins; c asks 1")
    world.do(5, "memory a=0.5 c=3 parts=ac; b joins; b asks 1")
    world.do(40, "time")
    assert [order[1] for order in orders(world)] == ["a", "c"]
    world.do(42, "#2 out 2.5 1s stays=0.5")
    assert world.look("holders") == "holders b"
    assert [order[1] for order in orders(world)] == ["a", "c"]


def test_no_residue_goes_for_a_hint() -> None:
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 parts=a; b joins paged-out 15.4")
    world.do(60, "b hinted")
    assert type(world.orders[2]) is PageIn, "it fits, though without the margin"
    world = out_but_for_its_context()
    world.do(4, "memory a=0.5 parts=a; b joins paged-out 15.8")
    assert world.do(60, "b hinted") == []


def test_one_that_leaves_gives_up_nothing_that_it_has_left() -> None:
    world = two()
    world.do(20, "a detaches")
    st = world.scheduler._st
    assert (list(st.waiting_partly_in), list(st.ops)) == (["a"], [])
    assert not survey(st, GIB).victims
