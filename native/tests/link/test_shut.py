"""Tests of a shut gate: no call passes, each call requests the lease, and the library itself does
not call the driver."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from pager_daemon import eventually

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from pathlib import Path

    from cuda_processes import Worker

    from conftest import Controller, Stage

MIB = 1 << 20
NOT_YET_S = 0.3
GATE_ONLY = {"KIWI_PRELOAD_OWN": "0"}
SETUP = """
init(); p = alloc(4 * MIB); d = fill(p, 1, 4 * MIB); q = alloc(MIB)
context = ck(driver.cuCtxGetCurrent())
old = ck(driver.cuEventCreate(0)); ck(driver.cuEventRecord(old, 0)); sync()
"""
CALLS = {
    "wait": "driver.cuStreamSynchronize(0)",
    "old-event": "driver.cuEventSynchronize(old)",
    "query": "driver.cuStreamQuery(0)",
    "free": "driver.cuMemFree(q)",
    "destroy": "driver.cuEventDestroy(old)",
    "never": "driver.cuCtxSetCurrent(context)",
    "question": "driver.cuMemGetInfo()",
    "device": "driver.cuDeviceGetCount()",
    "look-up": "driver.cuGetProcAddress(b'cuMemAlloc', 12000, 0)",
    "gated": "driver.cuMemsetD8(q, 1, MIB)",
}
AT_EXIT = """
import atexit
atexit.register(free, alloc(MIB))
"""


@pytest.fixture(autouse=True)
def _without_mercy(stage: Stage) -> None:
    """Make every thread crash that synchronises or queries while the driver has its process."""
    emulator.set_driver(stage.state, "worst")


def held(stage: Stage, setup: str = SETUP, *, by_name: bool = False, **more: str) -> Worker:
    program = stage.program(setup, by_name=by_name, **more)
    assert stage.daemon.peer().do("hold")["outcome"] == "moved"
    assert stage.daemon.peer().state["state"] == "held"
    return program


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("more", [GATE_ONLY, {}], ids=["gate-only", "owning"])
def test_every_call_is_held_and_asks_for_the_lease(
    stage: Stage, call: str, more: dict[str, str]
) -> None:
    program = held(stage, **more)
    program.send(f"int({CALLS[call]}[0])")
    stage.daemon.peer().await_received("want-lease")
    assert not program.answered(NOT_YET_S)
    assert stage.daemon.peer().do("free")["outcome"] == "moved"
    assert program.answer() == 0
    assert program.get("digest(p, 4 * MIB) == d")


def test_a_call_that_waited_before_the_shut_asks_too(stage: Stage) -> None:
    """The call began to wait while the GPU was busy, at a closed gate, which requests nothing."""
    program = stage.program(SETUP, **GATE_ONLY)
    peer = stage.daemon.peer()
    program.do("launch('spin_ns', 800_000_000)")
    op = peer.begin("hold")
    program.do(
        "left = threading.Event()\n"
        "def submit():\n"
        "    ck(driver.cuCtxSetCurrent(context))\n"
        "    while not left.is_set(): ck(driver.cuMemsetD8Async(q, 1, 1, 0))\n"
        "worker = threading.Thread(target=submit, daemon=True)"
    )
    program.do("worker.start()")  # one of its calls finds the gate closed, whenever that is
    assert peer.end(op)["outcome"] == "moved"
    peer.await_received("want-lease")
    peer.do("free")
    program.do("left.set(); worker.join()")


def test_work_that_does_not_end_in_time_keeps_it_closed_until_it_ends(
    stage: Stage, tmp_path: Path
) -> None:
    program = stage.program(SETUP, **GATE_ONLY)
    peer, ends = stage.daemon.peer(), tmp_path / "ends"
    program.do(
        "stuck = Stuck()\n"
        "def end():\n"
        f"    while not os.path.exists({str(ends)!r}): time.sleep(0.01)\n"
        "    stuck.let_go()\n"
        "threading.Thread(target=end).start()"
    )
    program.send("sync()", "exec")
    done = peer.do("hold", within_s=0.2)
    assert (done["outcome"], done["reason"]) == ("refused", "draining")
    assert peer.state["state"] == "resident"
    ends.touch()
    program.answer()  # waits pass
    program.do("free(q)")
    assert peer.do("hold")["outcome"] == "moved", "the next time it has ended"
    peer.do("free")


def test_hold_once_more_is_nothing_new(stage: Stage, controller: Controller) -> None:
    """This also holds while the driver has the process: a library that called the driver would hang
    or crash."""
    program = held(stage, **GATE_ONLY)
    controller.take(program.pid)
    peer = stage.daemon.peer()
    for _ in range(3):
        assert peer.do("hold")["outcome"] == "moved"
    controller.give_back(program.pid)
    assert peer.do("free")["outcome"] == "moved"
    assert program.get("digest(p, 4 * MIB) == d")


def test_an_order_to_hold_what_the_driver_has_is_refused_and_crashes_nothing(
    stage: Stage, controller: Controller
) -> None:
    """No daemon should send this order: the driver took the process while the gate was open."""
    program = stage.program(SETUP, **GATE_ONLY)
    controller.take(program.pid)
    peer = stage.daemon.peer()
    done = peer.do("hold", within_s=0.5)
    assert (done["outcome"], done["reason"]) == ("refused", "draining")
    controller.give_back(program.pid)
    peer.do("free")
    assert program.get("digest(p, 4 * MIB) == d")
    assert peer.do("hold")["outcome"] == "moved"
    peer.do("free")


ASKER = """
found, go = [], threading.Event()
def ask():
    ck(driver.cuCtxSetCurrent(context))
    go.wait()
    found.append([int(x) for x in driver.cuMemGetInfo()])
asker = threading.Thread(target=ask)
asker.start()
"""


@pytest.mark.parametrize("by_name", [False, True], ids=["preloaded", "by-name"])
def test_a_question_for_free_memory_gets_the_right_answer_once_the_driver_lets_go(
    stage: Stage, controller: Controller, *, by_name: bool
) -> None:
    """Without the gate the driver answers with an error at once: see the next test."""
    program = held(stage, SETUP + ASKER, by_name=by_name, **GATE_ONLY)
    (gpu,) = emulator.books(stage.state).gpus
    controller.take(program.pid)
    assert stage.used_bytes < gpu.used_bytes
    program.do("go.set()")
    peer = stage.daemon.peer()
    peer.await_received("want-lease")
    assert program.get("(found, asker.is_alive())") == [[], True]
    controller.give_back(program.pid)
    assert program.get("(found, asker.is_alive())") == [[], True]
    assert peer.do("free")["outcome"] == "moved"
    program.do("asker.join()")
    assert program.get("found") == [[0, gpu.total_bytes - gpu.used_bytes, gpu.total_bytes]]
    assert program.get("digest(p, 4 * MIB) == d")


def test_without_the_gate_the_same_question_gets_an_error(
    stage: Stage, controller: Controller
) -> None:
    program = stage.program(SETUP, KIWI_DISABLE="1")
    controller.take(program.pid)
    assert program.get("int(driver.cuMemGetInfo()[0])") == 304
    controller.give_back(program.pid)
    assert program.get("int(driver.cuMemGetInfo()[0])") == 0
    assert program.get("digest(p, 4 * MIB) == d")


def test_nothing_of_the_library_needs_the_driver_meanwhile(
    stage: Stage, controller: Controller
) -> None:
    """The library may hold RAM, is cut off and reconnects: its thread answers at once."""
    program = held(stage, **GATE_ONLY)
    controller.take(program.pid)
    peer = stage.daemon.peer()
    peer.say("gate", open=False)
    peer.say("pager-limits", arena_bytes=-1)
    program.send("sync()", "exec")
    peer.await_received("want-lease")
    assert not program.answered(3.0)
    stage.daemon.stop()
    stage.daemon.start()
    again = stage.daemon.peer(2)
    assert again.state["state"] == "held"
    again.await_received("want-lease")
    for action in ("hold", "page-out", "hold"):
        assert again.do(action)["outcome"] == "moved"
    controller.give_back(program.pid)
    assert again.do("page-in")["outcome"] == "moved"
    program.answer()
    assert program.get("digest(p, 4 * MIB) == d")


def test_without_a_daemon_it_stays_shut(stage: Stage, controller: Controller) -> None:
    """The library cannot know whether the driver has the process, so the setting does not
    matter."""
    program = held(stage, **GATE_ONLY, KIWI_PRELOAD_ALONE_S="1")
    controller.take(program.pid)
    stage.daemon.stop()
    program.send("sync()", "exec")
    eventually(lambda: "the driver may have this program's GPU memory" in stage.log)
    assert not program.answered(NOT_YET_S)
    stage.daemon.start()
    peer = stage.daemon.peer(2)
    peer.await_received("want-lease")
    controller.give_back(program.pid)
    assert peer.do("free")["outcome"] == "moved"
    program.answer()
    assert program.get("digest(p, 4 * MIB) == d")


@pytest.mark.parametrize("again", [False, True], ids=["there", "restarted"])
def test_frees_at_exit_wait_until_it_opens(
    stage: Stage, controller: Controller, *, again: bool
) -> None:
    program = held(stage, SETUP + AT_EXIT, **GATE_ONLY)
    controller.take(program.pid)
    program.end_input()
    if again:
        stage.daemon.stop()
        stage.daemon.start()
    peer = stage.daemon.peer(2 if again else 1)
    peer.await_received("want-lease")
    assert not program.ended(NOT_YET_S)
    controller.give_back(program.pid)
    peer.say("pager-do", op=99, action="free", within_ns=10**9)
    assert program.ended(30)
    assert program.returncode == 0


def test_a_program_without_further_calls_ends_at_once(stage: Stage) -> None:
    program = held(stage, **GATE_ONLY)
    program.end_input()
    assert program.ended(30)
    assert program.returncode == 0
    assert stage.daemon.peer().of("want-lease") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_end_it(stage: Stage, controller: Controller, number: int) -> None:
    program = held(stage, **GATE_ONLY)
    controller.take(program.pid)
    program.send("sync()", "exec")
    stage.daemon.peer().await_received("want-lease")
    os.kill(program.pid, number)
    assert program.ended(30)
    assert program.returncode == -number


def test_the_gate_under_the_drivers_name_is_the_same(stage: Stage, controller: Controller) -> None:
    program = held(stage, by_name=True)
    assert stage.daemon.peer().received[0]["owns"] is False
    controller.take(program.pid)
    program.send("sync()", "exec")
    stage.daemon.peer().await_received("want-lease")
    assert not program.answered(NOT_YET_S)
    controller.give_back(program.pid)
    assert stage.daemon.peer().do("free")["outcome"] == "moved"
    program.answer()
    assert program.get("digest(p, 4 * MIB) == d")


SPINNERS = """
import random
stop, rounds, wrong = False, [0, 0, 0], []
def work(number):
    ck(driver.cuCtxSetCurrent(context))
    stream, event = ck(driver.cuStreamCreate(1)), ck(driver.cuEventCreate(0))
    mine, chance = alloc(64 * 1024), random.Random(number)
    ends = (
        lambda: driver.cuStreamSynchronize(stream), lambda: driver.cuCtxSynchronize(),
        lambda: driver.cuEventSynchronize(event), lambda: driver.cuEventQuery(event),
        lambda: driver.cuStreamQuery(stream), lambda: driver.cuMemGetInfo(),
    )
    ck(driver.cuEventRecord(event, stream))
    try:
        while not stop:
            value = chance.randrange(256)
            ck(driver.cuMemsetD8Async(mine, value, 64 * 1024, stream))
            assert int(chance.choice(ends)()[0]) in (0, 600)
            ck(driver.cuEventRecord(event, stream))
            ck(driver.cuStreamSynchronize(stream))
            if set(read(mine, 4096)) != {value}: wrong.append(number)
            rounds[number] += 1
    except BaseException as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
[thread.start() for thread in threads]
"""


@pytest.mark.parametrize("by_name", [False, True], ids=["preloaded", "by-name"])
def test_threads_that_synchronise_at_every_second_call(
    stage: Stage, controller: Controller, *, by_name: bool
) -> None:
    """The program is taken out of the GPU and put back 200 times, at any point of its loops."""
    program = stage.program(SETUP + SPINNERS, by_name=by_name, **GATE_ONLY)
    peer = stage.daemon.peer()
    for _ in range(200):
        assert peer.do("hold")["outcome"] == "moved"
        controller.take(program.pid)
        controller.give_back(program.pid)
        assert peer.do("free")["outcome"] == "moved"
    before = program.get("list(rounds)")
    eventually(lambda: all(a > b for a, b in zip(program.get("rounds"), before, strict=True)))
    program.do("stop = True\n[thread.join() for thread in threads]")
    assert program.get("wrong") == []
    assert program.get("digest(p, 4 * MIB) == d")
