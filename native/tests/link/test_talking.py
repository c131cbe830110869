"""Tests of the messages between a preloaded program and the daemon, and of their order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pager_daemon import eventually

if TYPE_CHECKING:
    from conftest import Stage

MIB = 1 << 20
NOT_YET_S = 0.3
"""Time in which a call that is not held up ends on any machine."""


def test_it_introduces_itself_and_says_how_things_are(stage: Stage) -> None:
    program = stage.program()
    peer = stage.daemon.peer()
    hello, ping, state = peer.received[:3]
    assert (hello["type"], ping["type"]) == ("hello", "ping")
    assert (hello["role"], hello["protocol"]) == ("pager", 1)
    assert hello["client"].startswith("kiwi-preload ")
    assert hello["name"].startswith("python")
    assert hello["owns"] is True
    assert (state["type"], state["state"]) == ("pager-state", "resident")
    program.do("p = alloc(8 * MIB)")
    eventually(lambda: peer.state["resident_bytes"] >= 8 * MIB)
    program.do("free(p)")
    eventually(lambda: peer.state["resident_bytes"] < 8 * MIB)
    assert len(stage.daemon.peers) == 1


def test_it_says_that_it_is_only_the_gate(stage: Stage) -> None:
    stage.program(KIWI_PRELOAD_OWN="0")
    assert stage.daemon.peer().received[0]["owns"] is False


def test_changes_of_bytes_are_told_four_times_a_second_at_most(
    stage: Stage, tmp_path: Path
) -> None:
    program = stage.program()
    peer = stage.daemon.peer()
    enough = tmp_path / "enough"
    before, began_s = len(peer.of("pager-state")), time.monotonic()
    program.send(f"while not os.path.exists({str(enough)!r}): free(alloc(3 * MIB))", "exec")
    eventually(lambda: len(peer.of("pager-state")) >= before + 5)
    enough.touch()
    program.answer()
    program.do("p = alloc(5 * MIB)")
    eventually(lambda: peer.state["resident_bytes"] >= 5 * MIB)
    told, took_s = len(peer.of("pager-state")) - before, time.monotonic() - began_s
    assert told <= took_s / 0.25 + 2, "the library's clock runs no faster"


def test_page_out_and_page_in_report_their_bytes(stage: Stage) -> None:
    program = stage.program("init(); p = alloc(32 * MIB); d = fill(p, 1, 32 * MIB)")
    peer = stage.daemon.peer()
    used = stage.used_bytes
    out = peer.do("page-out")
    assert (out["outcome"], out["reason"]) == ("moved", "")
    assert out["bytes"] >= 32 * MIB
    assert out["elapsed_ns"] > 0
    assert stage.used_bytes <= used - 32 * MIB
    state = peer.state
    assert (state["state"], state["resident_bytes"]) == ("out", 0)
    assert state["paged_out_bytes"] == out["bytes"]
    program.send("digest(p, 32 * MIB) == d")
    assert not program.answered(NOT_YET_S), "its memory is not there"
    back = peer.do("page-in")
    assert (back["outcome"], back["bytes"]) == ("moved", out["bytes"])
    assert program.answer() is True
    assert peer.state["state"] == "resident"


def test_the_state_is_told_before_the_operation_is_done(stage: Stage) -> None:
    """A caller that waits for the answer then reads the last state, which must not be an old
    one."""
    stage.program("init(); p = alloc(4 * MIB)")
    peer = stage.daemon.peer()
    expected = {"hold": "held", "page-out": "out", "page-in": "resident"}
    for action in expected:
        peer.do(action)
    told = [m["state"] for m in peer.received if m["type"] == "pager-state"]
    for op, state in enumerate(expected.values(), 1):
        at = next(i for i, m in enumerate(peer.received) if m.get("op") == op)
        before = [m["state"] for m in peer.received[:at] if m["type"] == "pager-state"]
        assert before[-1] == state, told


def test_all_orders_may_be_given_twice(stage: Stage) -> None:
    program = stage.program("init(); p = alloc(16 * MIB); d = fill(p, 2, 16 * MIB)")
    peer = stage.daemon.peer()

    def moved(action: str) -> int:
        done = peer.do(action)
        assert done["outcome"] == "moved", done
        return int(done["bytes"])

    assert [moved("free"), moved("page-in")] == [0, 0]
    assert [moved("hold"), moved("hold")] == [0, 0]
    assert moved("page-out") == moved("page-out") >= 16 * MIB
    free = peer.do("free")
    assert (free["outcome"], peer.state["state"]) == ("refused", "out")
    assert moved("page-in") >= 16 * MIB
    assert moved("page-in") == 0
    assert program.get("digest(p, 16 * MIB) == d")
    assert [moved("hold"), moved("page-in")] == [0, 0]
    assert program.get("digest(p, 16 * MIB) == d"), "a page-in lets go, too"


def test_held_calls_wait_until_let_go(stage: Stage) -> None:
    program = stage.program("init(); p = alloc(MIB)")
    peer = stage.daemon.peer()
    assert peer.do("hold")["outcome"] == "moved"
    assert peer.state["state"] == "held"
    program.send("free(alloc(MIB))", "exec")
    assert not program.answered(NOT_YET_S)
    assert peer.do("free")["outcome"] == "moved"
    program.answer()
    assert peer.state["state"] == "resident"


def test_an_action_of_a_later_version_is_refused(stage: Stage) -> None:
    program = stage.program()
    done = stage.daemon.peer().do("somersault")
    assert (done["outcome"], done["reason"]) == ("refused", "unsupported")
    program.do("free(alloc(MIB))")


def test_what_does_not_come_to_rest_in_time_is_refused(stage: Stage) -> None:
    program = stage.program("init(); p = alloc(4 * MIB); d = fill(p, 3, 4 * MIB)")
    peer = stage.daemon.peer()
    program.do("stuck = Stuck()")
    for action in ("hold", "page-out"):
        done = peer.do(action, within_s=0.1)
        assert (done["outcome"], done["reason"]) == ("refused", "draining"), action
        assert done["detail"]
        assert peer.state["state"] == "resident"
    program.do("free(alloc(MIB)); stuck.end()")  # no order follows: the gate opens
    assert peer.do("page-out")["outcome"] == "moved", "the work ends, then it can be done"
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("digest(p, 4 * MIB) == d")


COPY_OUT = 3
"""Number of ``KP_FAULT_COPY_OUT`` in ``native/tests/library``."""


@pytest.mark.parametrize("held", [False, True])
def test_a_refused_page_out_changes_nothing(stage: Stage, held: bool) -> None:
    program = stage.program("init(); p = alloc(16 * MIB); d = fill(p, 3, 16 * MIB)")
    program.do("import ctypes; fault = ctypes.CDLL(None).kiwi_preload_test_fault")
    peer = stage.daemon.peer()
    program.do(f"fault({COPY_OUT}, 0, -1)")
    if held:
        assert peer.do("hold")["outcome"] == "moved"
    done = peer.do("page-out")
    assert (done["outcome"], done["reason"]) == ("refused", "driver"), done
    assert peer.state["state"] == ("held" if held else "resident")
    program.send("digest(p, 16 * MIB) == d")
    if held:
        assert not program.answered(NOT_YET_S)
        assert peer.do("free")["outcome"] == "moved"
    assert program.answer() is True
    program.do(f"fault({COPY_OUT}, 0, 0)")
    assert peer.do("page-out")["bytes"] >= 16 * MIB
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("digest(p, 16 * MIB) == d")


def test_without_a_lease_a_call_asks_once_and_waits(stage: Stage) -> None:
    stage.daemon.opens = False
    program = stage.program("")
    program.send("init(); p = alloc(MIB)", "exec")
    peer = stage.daemon.peer()
    peer.await_received("want-lease")
    assert not program.answered(NOT_YET_S)
    assert len(peer.of("want-lease")) == 1
    peer.say("gate", open=True)
    program.answer()
    peer.gate(open=False)
    program.send("free(alloc(MIB))", "exec")
    peer.await_received("want-lease", 2)
    peer.say("gate", open=True)
    program.answer()
    assert len(peer.of("want-lease")) == 2


def test_a_call_asks_for_the_lease_when_the_memory_is_out_too(stage: Stage) -> None:
    """A program that was paged out while idle must be able to ask for the GPU again."""
    program = stage.program("init(); p = alloc(MIB); d = fill(p, 1, MIB)")
    peer = stage.daemon.peer()
    peer.gate(open=False)
    assert peer.do("page-out")["outcome"] == "moved"
    program.send("digest(p, MIB) == d")
    peer.await_received("want-lease")
    assert peer.do("page-in")["outcome"] == "moved"
    assert not program.answered(NOT_YET_S), "in the GPU, but without a lease"
    peer.say("gate", open=True)
    assert program.answer() is True


def test_a_call_that_waits_since_before_the_lease_was_taken_away_asks_again(stage: Stage) -> None:
    program = stage.program("init(); p = alloc(MIB); d = fill(p, 1, MIB)")
    peer = stage.daemon.peer()
    assert peer.do("page-out")["outcome"] == "moved"
    program.send("digest(p, MIB) == d")
    peer.await_received("want-lease")
    assert not program.answered(NOT_YET_S)
    peer.gate(open=False)
    peer.await_received("want-lease", 2)
    peer.say("gate", open=True)
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.answer() is True


def test_free_returns_the_gate_to_its_last_ordered_state(stage: Stage) -> None:
    program = stage.program()
    peer = stage.daemon.peer()
    peer.do("hold")
    peer.gate(open=False)
    peer.do("free")
    program.send("free(alloc(MIB))", "exec")
    peer.await_received("want-lease")
    assert not program.answered(NOT_YET_S)
    peer.say("gate", open=True)
    program.answer()


FILL = (
    "hoard = []\nwhile True:\n    try: hoard.append(alloc(32 * MIB))\n    except CudaError: break"
)


def test_an_allocation_fails_only_after_the_daemon_was_asked_for_room(stage: Stage) -> None:
    program = stage.program("init()\n" + FILL)
    peer = stage.daemon.peer()
    asked = peer.of("want-room")
    assert [m["bytes"] >= 32 * MIB for m in asked] == [True]
    assert program.fails("alloc(64 * MIB)") == "CUDA_ERROR_OUT_OF_MEMORY"
    requests = [m["request"] for m in peer.of("want-room")]
    assert len(set(requests)) == len(requests) == 2


def test_room_that_was_made_is_used(stage: Stage) -> None:
    stage.daemon.grants_room = None
    other = stage.program("init(); q = alloc(128 * MIB); d = fill(q, 5, 128 * MIB)")
    other_peer = stage.daemon.peer(1)
    program = stage.program("init(); p = alloc(64 * MIB)")
    peer = stage.daemon.peer(2)
    program.send("alloc(100 * MIB) > 0")
    [asked] = peer.await_received("want-room")
    assert not program.answered(NOT_YET_S)
    assert other_peer.do("page-out")["outcome"] == "moved"
    peer.say("room", request=asked["request"], granted=True, detail="")
    assert program.answer() is True
    assert other_peer.do("page-in")["reason"] == "no-room"
    assert other_peer.state["state"] == "out"
    program.kill()
    assert other_peer.do("page-in")["outcome"] == "moved"
    assert other.get("digest(q, 128 * MIB) == d")


VMM = """
props = driver.CUmemAllocationProp()
props.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
"""
OTHER_CALLS = {
    "pool": "int(driver.cuMemAllocAsync(100 * MIB, 0)[0])",
    "named-pool": "int(driver.cuMemAllocFromPoolAsync(100 * MIB, pool, 0)[0])",
    "vmm": "int(driver.cuMemCreate(100 * MIB, props, 0)[0])",
}


@pytest.mark.parametrize("kind", OTHER_CALLS)
def test_room_is_asked_for_by_other_calls_than_cu_mem_alloc_too(stage: Stage, kind: str) -> None:
    stage.daemon.grants_room = None
    stage.program("init(); q = alloc(128 * MIB)")
    other_peer = stage.daemon.peer(1)
    program = stage.program("init(); p = alloc(64 * MIB)")
    program.do(VMM + "pool = ck(driver.cuDeviceGetDefaultMemPool(0))")
    peer = stage.daemon.peer(2)
    program.send(OTHER_CALLS[kind])
    [asked] = peer.await_received("want-room")
    assert asked["bytes"] == 100 * MIB
    assert not program.answered(NOT_YET_S)
    assert other_peer.do("page-out")["outcome"] == "moved"
    peer.say("room", request=asked["request"], granted=True, detail="")
    assert program.answer() == 0
    program.send(OTHER_CALLS[kind])
    second = peer.await_received("want-room", 2)[-1]
    peer.say("room", request=second["request"], granted=False, detail="")
    assert program.answer() == 2, "out of memory, by the daemon's word"


def test_no_room_is_asked_for_where_the_process_has_no_addresses_left(stage: Stage) -> None:
    """The call runs out of memory, but room in the GPU does not help: the driver's own call
    decides."""
    program = stage.program(
        "init(); import ctypes, os; kiwi = ctypes.CDLL(os.environ['LD_PRELOAD'].split(':')[0])"
    )
    peer = stage.daemon.peer()
    program.do("kiwi.kiwi_preload_test_fault(8, 0, 1); p = alloc(8 * MIB)")
    eventually(lambda: peer.state["unowned"].get("plain") == 8 * MIB)
    assert peer.of("want-room") == []


@pytest.mark.parametrize("own", ["0", "1"])
def test_memory_of_cu_mem_alloc_has_no_handle(stage: Stage, own: str) -> None:
    """Frameworks find out in this way whether they may share memory by a handle."""
    program = stage.program("init(); p = alloc(8 * MIB)", KIWI_PRELOAD_OWN=own)
    peer = stage.daemon.peer()
    assert program.get("int(driver.cuMemRetainAllocationHandle(p)[0])") == 1
    assert not peer.state["unowned"].get("ipc")


MAPPED = (
    VMM
    + """
posix = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
props.requestedHandleTypes = posix
access = driver.CUmemAccessDesc()
access.location = props.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
def take(size):
    h = ck(driver.cuMemCreate(size, props, 0))
    at = int(ck(driver.cuMemAddressReserve(size, 0, 0, 0)))
    ck(driver.cuMemMap(at, size, 0, h, 0)); ck(driver.cuMemSetAccess(at, size, [access], 1))
    return h, at
h, at = take(8 * MIB)
d = fill(at, 3, 8 * MIB)
"""
)


def test_memory_that_a_program_maps_itself_is_owned(stage: Stage) -> None:
    program = stage.program("init()")
    peer = stage.daemon.peer()
    program.do(MAPPED)
    eventually(lambda: peer.state["resident_bytes"] == 8 * MIB)
    assert peer.state["unowned"] == {}
    moved = peer.do("page-out")
    assert (moved["outcome"], moved["bytes"]) == ("moved", 8 * MIB)
    program.send("ck(driver.cuMemUnmap(at, 8 * MIB)), ck(driver.cuMemRelease(h))")
    assert not program.answered(NOT_YET_S), "the gate is shut"
    assert peer.do("page-in")["outcome"] == "moved"
    program.answer()
    eventually(lambda: peer.state["resident_bytes"] == 0)


def test_exported_memory_counts_as_shared_until_the_program_ends(stage: Stage) -> None:
    """Another process may still use the memory by its descriptor after the program's release.
    Nobody moves it, so a session with much of it is not left to the driver."""
    program = stage.program("init()")
    peer = stage.daemon.peer()
    program.do(MAPPED + "g, there = take(4 * MIB)")
    program.do("ck(driver.cuMemExportToShareableHandle(h, posix, 0))")
    eventually(lambda: peer.state["unowned"].get("ipc") == 8 * MIB + 1)
    assert peer.state["unowned_bytes"] == 0
    assert peer.state["held_bytes"] == 12 * MIB
    assert peer.do("page-out")["bytes"] == 4 * MIB
    assert peer.do("page-in")["outcome"] == "moved"
    assert program.get("digest(at, 8 * MIB) == d")
    program.do("ck(driver.cuMemUnmap(at, 8 * MIB)); ck(driver.cuMemRelease(h))")
    eventually(lambda: peer.state["unowned"].get("ipc") == 1)


def test_a_program_that_waits_for_room_can_be_paged_out(stage: Stage) -> None:
    """Otherwise two programs that together outgrow the GPU would wait for each other for ever."""
    stage.daemon.grants_room = None
    program = stage.program("init(); p = alloc(64 * MIB); d = fill(p, 5, 64 * MIB)")
    peer = stage.daemon.peer()
    program.send("alloc(220 * MIB)", "exec")
    [asked] = peer.await_received("want-room")
    assert peer.do("page-out")["outcome"] == "moved"
    peer.say("room", request=asked["request"], granted=False, detail="")
    assert not program.answered(NOT_YET_S), "the answer is no way through a closed gate"
    assert peer.do("page-in")["outcome"] == "moved"
    with pytest.raises(Exception, match="OUT_OF_MEMORY"):
        program.answer()
    assert program.get("digest(p, 64 * MIB) == d")


def test_a_program_paged_out_while_waiting_for_room_asks_for_the_lease(stage: Stage) -> None:
    """The program's burst may be over by then: nothing else would bring its memory back."""
    stage.daemon.grants_room = None
    program = stage.program("init(); p = alloc(64 * MIB); d = fill(p, 5, 64 * MIB)")
    peer = stage.daemon.peer()
    program.send("alloc(220 * MIB)", "exec")
    [asked] = peer.await_received("want-room")
    peer.gate(open=False)
    assert peer.do("page-out")["outcome"] == "moved"
    assert peer.of("want-lease") == [], "it waits for room still"
    peer.say("room", request=asked["request"], granted=False, detail="")
    peer.await_received("want-lease")
    assert peer.do("page-in")["outcome"] == "moved"
    with pytest.raises(Exception, match="OUT_OF_MEMORY"):
        program.answer()
    peer.gate(open=True)
    assert program.get("digest(p, 64 * MIB) == d")


def test_two_gpus_have_two_daemons(stage: Stage) -> None:
    from pager_daemon import PagerDaemon

    other = PagerDaemon(stage.sockets / "GPU-00000000-0000-0000-0000-000000000000.sock")
    other.start()
    try:
        stage.program()
        stage.daemon.peer()
        assert other.peers == []
    finally:
        other.stop()


def test_a_fork_has_no_part_in_the_connection(stage: Stage) -> None:
    program = stage.program("init(); import signal")
    peer = stage.daemon.peer()
    child = program.get("os.fork() or signal.pause()")
    try:
        assert peer.do("hold")["outcome"] == "moved"
        assert peer.do("free")["outcome"] == "moved"
        assert len(stage.daemon.peers) == 1
        os.kill(program.pid, signal.SIGKILL)
        eventually(lambda: peer.ended)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_thread_has_a_name_and_leaves_signals_to_the_program(stage: Stage) -> None:
    program = stage.program("init(); import signal; hits = []")
    stage.daemon.peer()
    tasks = Path(f"/proc/{program.pid}/task")
    mine = [task for task in tasks.iterdir() if (task / "comm").read_text() == "kiwi-pager\n"]
    assert mine
    for task in mine:  # its helpers have its name
        lines = (task / "status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
            assert mask & 1 << (number - 1), number
    assert "kiwi-pager" not in program.get("[t.name for t in threading.enumerate()]")
