"""Tests of a stopped program (Ctrl-Z, a debugger, a frozen control group) in every state.

Its neighbour gets the GPU, ``kiwi status`` says why, and everything continues with correct bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from answering import answering, turn, works
from daemon import wait_until
from halted import WAYS, WORDS

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

pytestmark = pytest.mark.timeout(180)

WORST = {"KIWI_EMULATOR_DRIVER": "worst"}
QUICK = ("--tq", "0.3", "--swap-floor", "0")
SLOW_BYTES_PER_S = 6 << 20
"""At this speed a page-out of 120 MiB takes twenty seconds: it is under way when the program is
stopped. The copy speeds up as soon as the speed is set back."""


class Stage:
    """``target`` will be stopped. ``small`` fits beside it, ``big`` does not."""

    def __init__(self, daemon: Daemon, program: Program) -> None:
        self.daemon = daemon
        self.big = program(daemon, 150, name="big")
        self.small = program(daemon, 20, name="small")
        self.target = program(daemon, 120, name="target")

    def idle(self) -> None:
        self.daemon.wait_state(self.target.pid, "idle")

    def running(self) -> None:
        self.target.start_burst()
        wait_until(self.target.granted, "it runs")

    def waiting(self) -> None:
        self.daemon.client().set(tq_s=60)
        self.big.start_burst()
        wait_until(self.big.granted, "the other one runs")
        self.target.start_burst()
        self.daemon.wait_state(self.target.pid, "waiting")
        self.daemon.client().set(tq_s=0.3)

    def paged_out(self) -> None:
        self.target.worker.do("client.release()")
        self.daemon.wait_state(self.target.pid, "paged-out")

    def paging_out(self) -> None:
        emulator.set_copy_bandwidth(self.daemon.state_path, SLOW_BYTES_PER_S)
        self.target.worker.send("client.release()", "exec")
        self.daemon.wait_state(self.target.pid, "paging-out")

    def paging_in(self) -> None:
        self.paged_out()
        emulator.set_copy_bandwidth(self.daemon.state_path, SLOW_BYTES_PER_S)
        self.target.start_burst()
        wait_until(self._comes_in, "the driver brings it back")

    def _comes_in(self) -> bool:
        process = self.daemon.books().process(self.target.pid)
        return process is not None and process.device_bytes.get(0, 0) > 0


STATES = ("idle", "running", "waiting", "paged_out", "paging_out", "paging_in")
CASES = [
    pytest.param(
        where, way, marks=() if where == "running" or way == "ctrl-z" else pytest.mark.slow
    )
    for where in STATES
    for way in WAYS
]
"""The quick cases: all states under Ctrl-Z, and all ways of stopping a program that computes."""


@pytest.mark.parametrize(("where", "way"), CASES)
def test_a_halted_program_holds_nobody_up(
    start: Start, program: Program, where: str, way: str
) -> None:
    daemon = start("1x256MiB", *QUICK, env=WORST)
    stage = Stage(daemon, program)
    getattr(stage, where)()
    neighbour = stage.big if where in ("waiting", "paged_out") else stage.small
    with answering(daemon), WAYS[way](stage.target.pid):
        emulator.set_copy_bandwidth(daemon.state_path, 0)
        if where == "waiting":
            works(stage.big)
            stage.big.stop_burst()
        for _ in range(2):
            turn(neighbour)
        daemon.wait_for(lambda _: WORDS[way] in stopped(daemon, stage.target), "the words")
    if where == "paging_out":
        stage.target.worker.answer()
    daemon.wait_for(lambda _: not stopped(daemon, stage.target), "it goes on")
    if where in ("running", "waiting", "paging_in"):
        wait_until(stage.target.granted, "it has its turn")
        works(stage.target)
        stage.target.stop_burst()
    for one in (stage.target, stage.big, stage.small):
        assert one.intact()


def stopped(daemon: Daemon, one: SessionProgram) -> str:
    session = daemon.session(one.pid)
    assert session is not None
    return session.stopped


@pytest.mark.parametrize("noticed", [False, True], ids=["unnoticed", "noticed"])
@pytest.mark.parametrize("where", ["idle", "running"])
def test_a_program_that_ctrl_z_stopped_makes_room_for_one_that_does_not_fit_beside_it(
    start: Start, program: Program, where: str, *, noticed: bool
) -> None:
    """It is continued while it is moved out, and then stopped again, whether or not the daemon has
    noticed that it is stopped when another session asks for the GPU."""
    daemon = start("1x256MiB", *QUICK, env=WORST)
    stage = Stage(daemon, program)
    getattr(stage, where)()

    def shown() -> None:
        daemon.wait_for(lambda _: WORDS["ctrl-z"] in stopped(daemon, stage.target), "the words")

    with answering(daemon), WAYS["ctrl-z"](stage.target.pid):
        if noticed:
            shown()
        turn(stage.big)
        shown()
    if where == "running":
        works(stage.target)
        stage.target.stop_burst()
    for one in (stage.target, stage.big, stage.small):
        assert one.intact()


@pytest.mark.parametrize("way", ["ctrl-z", pytest.param("debugger", marks=pytest.mark.slow)])
def test_one_without_a_gate_that_is_stopped_in_its_turn_is_left_where_it_is(
    start: Start, program: Program, way: str
) -> None:
    """It does not run, and cannot be suspended: a session that fits beside it gets the GPU."""
    daemon = start("1x256MiB", *QUICK, "--anti-thrash", "always", env=WORST)
    big, small = program(daemon, 150, name="big"), program(daemon, 20, name="small")
    target = program(daemon, 120, name="target", guarded=False)
    daemon.wait_for(lambda _: not daemon.session(target.pid).guarded, "it is unguarded")
    target.start_burst()
    wait_until(target.granted, "it runs")
    with answering(daemon), WAYS[way](target.pid):
        for _ in range(2):
            turn(small)
        daemon.wait_for(lambda _: WORDS[way] in stopped(daemon, target), "the words")
        assert daemon.session(target.pid).state.value == "suspended"
        big.start_burst()
        wait_until(
            lambda: any(WORDS[way] in word[3] for word in big.waits()),
            "who waits is told",
        )
        assert not big.granted()
    works(target)
    target.stop_burst()
    wait_until(big.granted, "now there is room")
    big.stop_burst()
    for one in (target, big, small):
        assert one.intact()
