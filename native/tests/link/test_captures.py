"""Tests of stream captures and CUDA graphs while a daemon wants the program's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cuda_processes import wait_until
from cuda_setups import GRAPHS
from pager_daemon import eventually

if TYPE_CHECKING:
    from cuda_processes import Worker

    from conftest import Stage

MIB = 1 << 20
NOT_YET_S = 0.3
ALLOWED_S = 0.3
SETUP = (
    "init()\n"
    + GRAPHS
    + """
p, q = alloc(8 * MIB), alloc(8 * MIB)
d = fill(p, 1, 8 * MIB)
begin(mode=RELAXED)
ck(driver.cuMemcpyDtoDAsync(q, p, 8 * MIB, s))
put(q, 7, MIB)
copies = instantiate(end())
def right():
    return set(read(q, MIB)) == {7} and read(q + MIB, 7 * MIB) == read(p + MIB, 7 * MIB)
"""
)


@pytest.fixture
def program(stage: Stage) -> Worker:
    return stage.program(SETUP)


def test_a_graph_replays_after_a_page_in(stage: Stage, program: Worker) -> None:
    peer = stage.daemon.peer()
    for seed in range(2, 5):
        program.do(f"d = fill(p, {seed}, 8 * MIB); write(q, bytes(8 * MIB))")
        assert peer.do("page-out")["outcome"] == "moved"
        program.send("run(copies)", "exec")
        assert not program.answered(NOT_YET_S), "its memory is out"
        assert peer.do("page-in")["outcome"] == "moved"
        assert program.answer() is None
        assert program.get("right() and digest(p, 8 * MIB) == d")


def test_a_graph_launch_asks_for_the_lease(stage: Stage, program: Worker) -> None:
    peer = stage.daemon.peer()
    peer.gate(open=False)
    program.send("run(copies)", "exec")
    peer.await_received("want-lease")
    assert not program.answered(NOT_YET_S)
    peer.gate(open=True)
    assert program.answer() is None
    assert program.get("right()")


def test_a_capture_delays_the_page_out(stage: Stage, program: Worker) -> None:
    peer = stage.daemon.peer()
    program.do("begin(mode=RELAXED); put(q, 9, MIB)")
    order = peer.begin("page-out")
    program.do("put(q + MIB, 9, MIB)")
    assert all(done["op"] != order for done in peer.of("pager-done"))
    program.do("g = end()")
    assert peer.end(order)["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    program.do("run(instantiate(g))")
    assert program.get("set(read(q, 2 * MIB)) == {9}")


def test_a_capture_that_goes_on_refuses_the_page_out(stage: Stage, program: Worker) -> None:
    peer = stage.daemon.peer()
    program.do("begin(); put(q, 9, MIB)")
    said = peer.do("page-out", within_s=ALLOWED_S)
    assert (said["outcome"], said["reason"]) == ("refused", "lock-timeout")
    assert program.get("status()") == 1, "nothing has spoiled it"
    program.do("run(instantiate(end()))")
    assert program.get("set(read(q, MIB)) == {9}")
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"


@pytest.mark.parametrize(
    ("fails", "ends"),
    [
        ("elsewhere(driver.cuStreamEndCapture, c)", "driver.cuStreamEndCapture(c)"),
        ("name_of(driver.cuStreamEndCapture, s)", "driver.cuStreamDestroy(c)"),
    ],
)
def test_a_capture_counts_as_open_until_it_has_really_ended(
    stage: Stage, program: Worker, fails: str, ends: str
) -> None:
    peer = stage.daemon.peer()
    program.do("c = ck(driver.cuStreamCreate(1)); begin(c)")
    assert program.get(fails) != "CUDA_SUCCESS"
    assert peer.do("page-out", within_s=ALLOWED_S)["reason"] == "lock-timeout"
    program.do(ends)
    assert peer.do("page-out")["outcome"] == "moved"


def test_a_capture_comes_to_its_end_without_a_lease(stage: Stage, program: Worker) -> None:
    peer = stage.daemon.peer()
    program.do("begin(mode=RELAXED); put(q, 9, MIB)")
    peer.gate(open=False)
    program.do("put(q + MIB, 9, MIB); r = alloc(MIB); put(r, 9, MIB); g = end()")
    program.send("run(instantiate(g))", "exec")
    peer.await_received("want-lease")
    assert not program.answered(NOT_YET_S)
    peer.gate(open=True)
    assert program.answer() is None
    assert program.get("set(read(r, MIB)) == {9}")


def test_room_is_asked_for_in_a_capture(stage: Stage) -> None:
    """The program's own memory stays in meanwhile: it cannot go out before the capture has
    ended."""
    stage.daemon.grants_room = None
    other = stage.program("init(); r = alloc(160 * MIB); d = fill(r, 5, 160 * MIB)")
    other_peer = stage.daemon.peer(1)
    program = stage.program(SETUP)
    peer = stage.daemon.peer(2)
    program.do("begin(mode=RELAXED); put(q, 9, MIB)")
    program.send("r = alloc(100 * MIB); put(r, 9, 100 * MIB); e = instantiate(end())", "exec")
    [asked] = peer.await_received("want-room")
    assert peer.do("page-out", within_s=ALLOWED_S)["reason"] == "lock-timeout"
    assert other_peer.do("page-out")["outcome"] == "moved"
    peer.say("room", request=asked["request"], granted=True, detail="")
    assert program.answer() is None
    program.do("run(e)")
    assert program.get("set(read(q, MIB)) == {9} and set(read(r, 100 * MIB)) == {9}")
    assert peer.do("page-out")["outcome"] == "moved"
    assert other_peer.do("page-in")["outcome"] == "moved"
    assert other.get("digest(r, 160 * MIB) == d")


def test_memory_freed_in_a_capture_goes_when_it_is_over(stage: Stage, program: Worker) -> None:
    peer = stage.daemon.peer()
    program.do("r = alloc(16 * MIB); begin(); put(q, 9, MIB)")
    held_bytes = stage.used_bytes
    program.do("free(r); put(q + MIB, 9, MIB)")
    assert stage.used_bytes == held_bytes
    assert program.get("status()") == 1
    program.do("e = instantiate(end()); sync(); free(alloc(MIB))")
    wait_until(lambda: stage.used_bytes <= held_bytes - 16 * MIB, "what was freed is given back")
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    program.do("run(e)")
    assert program.get("set(read(q, 2 * MIB)) == {9}")


def test_small_memory_freed_in_captures_does_not_pile_up(stage: Stage, program: Worker) -> None:
    """The slots of small allocations are used again after the capture, and empty slabs go back."""
    program.do(
        "def rounds(count):\n"
        "    for _ in range(count):\n"
        "        begin(mode=RELAXED); put(q, 9, MIB)\n"
        "        for small in [alloc(64 * 1024) for _ in range(40)]: free(small)\n"
        "        ck(driver.cuGraphDestroy(end()))\n"
    )
    before_bytes = stage.used_bytes
    program.do("rounds(20)")
    wait_until(lambda: stage.used_bytes == before_bytes, "what was freed is given back")
    # what is in use beside it stays, and is right
    program.do("kept = [alloc(3000) for _ in range(3)]; write(kept[1], b'kiwi' * 700)")
    program.do("begin(mode=RELAXED); free(kept[0]); free(kept[2]); other = alloc(3000)")
    program.do("ck(driver.cuGraphDestroy(end())); write(other, bytes(3000))")
    assert program.get("read(kept[1], 2800) == b'kiwi' * 700")
    peer = stage.daemon.peer()
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("read(kept[1], 2800) == b'kiwi' * 700")


def test_memory_freed_between_overlapping_captures(stage: Stage, program: Worker) -> None:
    program.do("c = ck(driver.cuStreamCreate(1)); r = alloc(2000)")
    before_bytes = stage.used_bytes
    program.do("begin(mode=RELAXED); small = [alloc(64 * 1024) for _ in range(40)]")
    program.do("begin(c, RELAXED)")
    program.do("for one in small: free(one)")
    program.do("g = end()")
    assert program.get("status(c)") == 1, "the other capture is open, and not spoiled"
    program.do("h = end(c); instantiate(g), instantiate(h)")
    wait_until(lambda: stage.used_bytes == before_bytes, "what was freed is given back")


def test_captures_while_memory_comes_and_goes(stage: Stage, program: Worker) -> None:
    program.do(
        "stop, rounds, context = False, [0], ck(driver.cuCtxGetCurrent())\n"
        "def capture_on():\n"
        "    ck(driver.cuCtxSetCurrent(context))\n"
        "    while not stop:\n"
        "        begin(b, LOCAL); put(q, rounds[0] % 251, MIB, b); e = instantiate(end(b))\n"
        "        run(e, b); assert set(read(q, MIB)) == {rounds[0] % 251}\n"
        "        ck(driver.cuGraphExecDestroy(e)); rounds[0] += 1\n"
        "thread = threading.Thread(target=capture_on); thread.start()"
    )
    peer = stage.daemon.peer()
    for _ in range(10):
        before = program.get("rounds[0]")
        eventually(lambda before=before: program.get("rounds[0]") > before)
        assert peer.do("page-out")["outcome"] == "moved"
        assert peer.do("page-in")["outcome"] == "moved"
    program.do("stop = True; thread.join()")
    assert program.get("digest(p, 8 * MIB) == d")
