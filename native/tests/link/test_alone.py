"""Tests that no program waits for ever if the daemon hangs or never comes back."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from pager_daemon import eventually

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from cuda_processes import Worker

    from conftest import Controller, Stage

MIB = 1 << 20
FILLED = "init(); p = alloc({0} * MIB); d = fill(p, 1, {0} * MIB)"
NOT_YET_S = 0.3
SOON = {"KIWI_PRELOAD_ALONE_S": "1"}
IMPATIENT = {"KIWI_PRELOAD_SILENCE_S": "1"}
SILENCE_S = 3
PATIENT = {"KIWI_PRELOAD_SILENCE_S": str(SILENCE_S)}
"""For tests whose daemon must not be given up: on a busy machine it answers late."""


def asks(program: Worker, mib: int) -> None:
    program.send(f"digest(p, {mib} * MIB) == d")


def page_out(stage: Stage, number: int = 1) -> None:
    assert stage.daemon.peer(number).do("page-out")["outcome"] == "moved"


# --- gone for good -------------------------------------------------------------------------------


def test_its_memory_comes_back_by_itself(stage: Stage) -> None:
    program = stage.program(FILLED.format(64), **SOON)
    page_out(stage)
    stage.daemon.stop()
    asks(program, 64)
    assert program.answer() is True
    eventually(lambda: "was brought back without one" in stage.log)
    stage.daemon.opens = False
    stage.daemon.start()
    peer = stage.daemon.peer(2)
    assert [m["state"] for m in peer.of("pager-state")] == ["resident"]
    asks(program, 64)
    peer.await_received("want-lease")  # the program is scheduled again
    peer.say("gate", open=True)
    assert program.answer() is True


def test_memory_is_not_paged_in_before_the_time_limit(stage: Stage) -> None:
    program = stage.program(FILLED.format(16), KIWI_PRELOAD_ALONE_S="86400")
    page_out(stage)
    stage.daemon.stop()
    asks(program, 16)
    assert not program.answered(1.5)
    stage.daemon.start()
    assert stage.daemon.peer(2).do("page-in")["outcome"] == "moved"
    assert program.answer() is True


def test_where_there_is_no_room_it_goes_on_trying(stage: Stage) -> None:
    program = stage.program(FILLED.format(120), **SOON)
    page_out(stage)
    other = stage.program(FILLED.format(160), KIWI_DISABLE="1")
    stage.daemon.stop()
    asks(program, 120)
    eventually(lambda: "goes on trying" in stage.log)
    assert not program.answered(NOT_YET_S)
    other.do("free(p)")
    assert program.answer() is True
    assert stage.log.count("goes on trying") == 1, "said once"


def test_of_several_programs_those_that_fit_run(stage: Stage) -> None:
    programs = []
    for number in (1, 2, 3):
        programs.append(stage.program(FILLED.format(100), **SOON))
        page_out(stage, number)
    stage.daemon.stop()
    for program in programs:
        asks(program, 100)
    running = [program for program in programs if program.answered(8.0)]
    assert len(running) <= 2, "no more than the GPU holds"
    while programs:  # each that runs makes room for another
        program = eventually(lambda: next((one for one in programs if one.answered()), None))
        assert program.answer() is True
        program.do("free(p)")
        programs.remove(program)


def test_a_daemon_that_starts_at_that_very_moment(stage: Stage) -> None:
    program = stage.program(FILLED.format(64), **SOON)
    for round_ in range(3):
        page_out(stage, len(stage.daemon.peers) if round_ else 1)
        before = len(stage.daemon.peers)
        stage.daemon.stop()
        asks(program, 64)
        time.sleep(0.9 + round_ * 0.1)  # any moment will do
        stage.daemon.start()
        peer = stage.daemon.peer(before + 1)
        assert peer.do("page-in")["outcome"] == "moved", "whatever it finds"
        assert program.answer() is True
        assert peer.state["state"] == "resident"
        assert peer.state["paged_out_bytes"] == 0


# --- while the driver has the process ------------------------------------------------------------


@pytest.mark.parametrize("mib", [0, 16], ids=["owns-nothing", "owns-some"])
def test_it_waits_for_a_daemon(stage: Stage, controller: Controller, mib: int) -> None:
    """The library knows that the driver may have the process. A synchronise call would kill the
    process, so without a daemon no memory comes back, and no call passes."""
    emulator.set_driver(stage.state, "worst")
    program = stage.program(FILLED.format(mib) if mib else "init()", **SOON)
    page_out(stage)
    peer = stage.daemon.peer()
    assert peer.do("yield")["outcome"] == "moved"
    controller.take(program.pid)
    stage.daemon.stop()
    program.send("sync()", "exec")
    eventually(lambda: "the driver may have this program's GPU memory" in stage.log)
    assert not program.answered(1.5)
    stage.daemon.start()
    again = stage.daemon.peer(2)
    assert again.state["state"] == "out"
    again.await_received("want-lease")
    controller.give_back(program.pid)
    assert again.do("page-in")["outcome"] == "moved"
    program.answer()
    if mib:
        assert program.get(f"digest(p, {mib} * MIB) == d")


@pytest.mark.parametrize("action", ["page-in", "page-out"])
def test_memory_comes_back_by_itself_once_the_driver_has_released_the_process(
    stage: Stage, action: str
) -> None:
    program = stage.program(FILLED.format(16), **SOON)
    page_out(stage)
    peer = stage.daemon.peer()
    assert peer.do("yield")["outcome"] == "moved"
    assert peer.do(action)["outcome"] == "moved"
    page_out(stage)
    stage.daemon.stop()
    asks(program, 16)
    assert program.answer() is True


def test_a_program_that_runs_cannot_be_left_to_the_driver(stage: Stage) -> None:
    program = stage.program(FILLED.format(16))
    done = stage.daemon.peer().do("yield")
    assert (done["outcome"], done["reason"]) == ("refused", "driver")
    assert program.get(f"digest(p, {16 * MIB}) == d")


def test_a_program_that_ends_meanwhile_waits_in_its_last_frees(
    stage: Stage, controller: Controller
) -> None:
    emulator.set_driver(stage.state, "worst")
    program = stage.program(
        FILLED.format(16) + "; import atexit; atexit.register(lambda: (sync(), free(p)))", **SOON
    )
    page_out(stage)
    peer = stage.daemon.peer()
    assert peer.do("yield")["outcome"] == "moved"
    controller.take(program.pid)
    program.end_input()
    peer.await_received("want-lease")
    assert not program.ended(NOT_YET_S)
    controller.give_back(program.pid)
    peer.begin("page-in")
    assert program.ended(30)
    assert program.returncode == 0


# --- hangs ---------------------------------------------------------------------------------------


def test_a_daemon_that_hangs_while_a_call_waits_for_the_lease(stage: Stage) -> None:
    program = stage.program(FILLED.format(4), **IMPATIENT)
    peer = stage.daemon.peer()
    peer.gate(open=False)
    stage.daemon.deaf = stage.daemon.welcoming = True
    stage.daemon.welcoming = False
    asks(program, 4)
    peer.await_received("want-lease")
    assert program.answer() is True, "it goes on without Kiwi"
    assert "does not answer" in stage.log
    eventually(lambda: peer.ended)


def test_a_daemon_that_hangs_while_memory_is_out(stage: Stage) -> None:
    program = stage.program(FILLED.format(16), **IMPATIENT, **SOON)
    page_out(stage)
    stage.daemon.deaf, stage.daemon.welcoming = True, False
    asks(program, 16)
    assert program.answer() is True
    stage.daemon.deaf, stage.daemon.welcoming = False, True


@pytest.mark.parametrize("what", ["lease", "room", "out"])
def test_a_slow_daemon_is_waited_for(stage: Stage, what: str) -> None:
    stage.daemon.grants_room = None
    program = stage.program(FILLED.format(16), **PATIENT, **SOON)
    peer = stage.daemon.peer()
    if what == "lease":
        peer.gate(open=False)
    elif what == "out":
        page_out(stage)
    if what == "room":
        program.send("alloc(250 * MIB)", "exec")
        peer.await_received("want-room")
    else:
        asks(program, 16)
    pings = len(peer.of("ping"))
    peer.await_received("ping", pings + 4)  # longer than the daemon may be silent
    assert not program.answered()
    assert len(stage.daemon.peers) == 1
    if what == "room":
        peer.say("room", request=peer.of("want-room")[0]["request"], granted=False, detail="")
        with pytest.raises(Exception, match="OUT_OF_MEMORY"):
            program.answer()
    else:
        if what == "out":
            assert peer.do("page-in")["outcome"] == "moved"
        peer.say("gate", open=True)
        assert program.answer() is True


def test_a_program_that_was_frozen_itself_does_not_blame_the_daemon(stage: Stage) -> None:
    program = stage.program(FILLED.format(4), **PATIENT)
    peer = stage.daemon.peer()
    peer.gate(open=False)
    asks(program, 4)
    peer.await_received("want-lease")
    os.kill(program.pid, signal.SIGSTOP)
    time.sleep(SILENCE_S + 1)
    os.kill(program.pid, signal.SIGCONT)
    pings = len(peer.of("ping"))
    peer.await_received("ping", pings + 3)
    assert len(stage.daemon.peers) == 1
    peer.say("gate", open=True)
    assert program.answer() is True


def test_a_program_that_waits_for_nothing_sends_no_ping(stage: Stage) -> None:
    program = stage.program(FILLED.format(4), **PATIENT)
    peer = stage.daemon.peer()
    stage.daemon.deaf = True
    time.sleep(SILENCE_S + 1)
    assert len(peer.of("ping")) == 1, "the one with its hello"
    assert program.get(f"digest(p, {4 * MIB}) == d")
    assert not peer.ended
