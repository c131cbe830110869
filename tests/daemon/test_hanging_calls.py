"""Tests in which each driver call about a program hangs, in each state of the program.

``kiwi status`` is always answered, others continue, and nothing is lost when the call returns.

The daemon locks, checkpoints and queries a program whose memory is in the GPU (idle, running,
waiting, paging-out). It restores, unlocks and queries one whose memory is out (suspended,
paged-out, paging-in). It makes no other call in these states. The readings of NVML hang while a
program is idle, paged out, or about to come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from answering import answering, turn, works
from daemon import wait_until

import kiwi_emulator as emulator
from kiwi_core.states import AntiThrash, Priority

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    from kiwi_core.wire.messages import GpuStatus
    from kiwi_emulator import Operation

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]
    Arm = Callable[[], emulator.Faults]
    """Makes the call hang from now on."""

pytestmark = pytest.mark.timeout(180)

QUICK = ("--tq", "0.3", "--swap-floor", "0", "--lock-timeout", "0.5", "--stuck-after", "0.5")
WORST = {"KIWI_EMULATOR_DRIVER": "worst"}
OUT, IN = ("lock", "checkpoint", "get_state"), ("restore", "unlock", "get_state")
"""The calls about a program whose memory leaves the GPU, and about one whose memory returns."""
READINGS: tuple[Operation, ...] = ("nvml_memory", "nvml_processes")
"""The readings of NVML that the daemon makes in every state; they concern the whole GPU."""
NVML = ("nvmlDeviceGetComputeRunningProcesses",)
"""The GPU's memory is not among them, since no daemon starts without knowing its size."""


def hang(daemon: Daemon, target: SessionProgram, call: Operation) -> emulator.Faults:
    """Make ``call`` hang until cleared: the call about ``target``, or each reading of NVML."""
    faults = emulator.Faults(daemon.state_path)
    faults.set("hang", pid=0 if call in READINGS else target.pid, operation=call, count=-1)
    return faults


def told(daemon: Daemon, target: SessionProgram) -> str:
    """Return the code of what ``kiwi status`` says is wrong with ``target``."""
    return next(s.problem for s in daemon.status().sessions if s.pid == target.pid)


def idle(_daemon: Daemon, _target: SessionProgram) -> None:
    """Leave the target as it is: it holds memory and computes nothing."""


def running(_daemon: Daemon, target: SessionProgram) -> None:
    target.start_burst()
    wait_until(target.granted, "it runs")


def paged_out(daemon: Daemon, target: SessionProgram) -> None:
    def is_out() -> bool:
        target.worker.do("client.release()")  # again, if it did not come to rest in time
        return daemon.session(target.pid).state.value == "paged-out"  # type: ignore[union-attr]

    wait_until(is_out, "its memory is out")


@pytest.mark.parametrize(
    ("state", "call"),
    [
        *[(state, call) for state in (idle, running) for call in OUT],
        *[(paged_out, call) for call in IN],
    ],
)
def test_a_call_that_hangs(
    start: Start,
    program: Program,
    state: Callable[[Daemon, SessionProgram], None],
    call: Operation,
) -> None:
    daemon = start("1x256MiB", *QUICK, env=WORST)
    big, small = program(daemon, 150, name="big"), program(daemon, 20, name="small")
    target = program(daemon, 120, name="target")
    state(daemon, target)
    faults = hang(daemon, target, call)
    mover = target if state is paged_out else big
    with answering(daemon):
        mover.start_burst()
        wait_until(lambda: faults.hits("hang"), "the call hangs")
        for _ in range(2):
            turn(small)
        faults.clear("hang")
        wait_until(mover.granted, "it goes on")
        works(mover)
        mover.stop_burst()
        if state is running:
            works(target)
            target.stop_burst()
    for one in (target, big, small):
        assert one.intact()


class Stage:
    """Bring ``target`` into a state, and make a call about it hang. ``big`` does not fit beside it,
    ``small`` does. Programs in ``over`` have a burst to end."""

    def __init__(self, daemon: Daemon, program: Program) -> None:
        self.daemon = daemon
        self.big, self.small = program(daemon, 150, name="big"), program(daemon, 20, name="small")
        self.target = program(daemon, 120, name="target")
        self.over: list[SessionProgram] = []

    def waiting(self, arm: Arm) -> None:
        """Let the target wait in the GPU, and page it out for a session that is served first."""
        client = self.daemon.client()
        client.set(tq_s=60, anti_thrash=AntiThrash.ALWAYS)
        big = self.daemon.wait_state(self.big.pid, "paged-out")
        client.set(session=big.id, priority=Priority.HIGH)
        self.small.start_burst()
        wait_until(self.small.granted, "another one runs")
        for one in (self.target, self.big):
            one.start_burst()
            self.daemon.wait_state(one.pid, "waiting")
        self.over = [self.big, self.target]
        arm()
        self.small.stop_burst()

    def suspended(self, arm: Arm) -> None:
        """Suspend the target in mid-burst, and bring it back."""
        self.target.start_burst()
        wait_until(self.target.granted, "it runs")
        self.big.start_burst()

        def another_runs(status: GpuStatus) -> bool:
            state = {one.pid: one.state.value for one in status.sessions}
            return (state[self.target.pid], state[self.big.pid]) == ("suspended", "running")

        self.daemon.in_a_long_turn(another_runs, "another one has its turn")
        self.over = [self.target]
        arm()
        self.big.stop_burst()

    def paging_out(self, arm: Arm) -> None:
        faults = arm()

        def hangs() -> bool:
            self.target.worker.do("client.release()")  # again, if it was refused before the call
            return faults.hits("hang") > 0

        wait_until(hangs, "the call hangs")
        self.daemon.wait_state(self.target.pid, "paging-out")

    def paging_in(self, arm: Arm) -> None:
        paged_out(self.daemon, self.target)
        arm()
        self.target.start_burst()
        self.over = [self.target]
        self.daemon.wait_state(self.target.pid, "paging-in")


@pytest.mark.parametrize(
    ("state", "call"),
    [
        *[(state, call) for state in ("waiting", "paging_out") for call in OUT],
        *[(state, call) for state in ("suspended", "paging_in") for call in IN],
    ],
)
def test_a_call_that_hangs_while_it_waits_or_moves(
    start: Start, program: Program, state: str, call: Operation
) -> None:
    daemon = start("1x256MiB", *QUICK, env=WORST)
    stage = Stage(daemon, program)
    faults = emulator.Faults(daemon.state_path)
    with answering(daemon):
        getattr(stage, state)(lambda: hang(daemon, stage.target, call))
        wait_until(lambda: faults.hits("hang"), "the call hangs")
        for _ in range(2):
            turn(stage.small)
        faults.clear("hang")
        daemon.client().set(tq_s=0.3, anti_thrash=AntiThrash.ON)
        for one in stage.over:
            wait_until(one.granted, f"{one.name} goes on")
            works(one)
            one.stop_burst()
    for one in (stage.target, stage.big, stage.small):
        assert one.intact()


@pytest.mark.parametrize("call", READINGS)
@pytest.mark.parametrize("state", [idle, paged_out])
def test_a_reading_of_nvml_that_hangs(
    start: Start,
    program: Program,
    state: Callable[[Daemon, SessionProgram], None],
    call: Operation,
) -> None:
    daemon = start("1x256MiB", *QUICK, env=WORST)
    target, small = program(daemon, 120, name="target"), program(daemon, 20, name="small")
    state(daemon, target)
    faults = hang(daemon, target, call)
    with answering(daemon):
        wait_until(lambda: faults.hits("hang"), "the reading hangs")
        for _ in range(2):
            turn(small)
        faults.clear("hang")
        turn(target)
    assert target.intact()
    assert small.intact()


@pytest.mark.parametrize("call", READINGS)
def test_memory_comes_back_by_the_drivers_own_figure_while_nvml_hangs(
    start: Start, program: Program, call: Operation
) -> None:
    """A restore without room fails for good. So the room is claimed before it is used."""
    daemon = start("1x256MiB", *QUICK, env=WORST)
    target, small = program(daemon, 120, name="target"), program(daemon, 20, name="small")
    paged_out(daemon, target)
    faults = hang(daemon, target, call)
    with answering(daemon):
        target.start_burst()
        wait_until(target.granted, "it comes back all the same")
        works(target)
        target.stop_burst()
        text = "free GPU memory is asked of the driver"
        assert any(text in error for error in daemon.status().errors)
        paged_out(daemon, target)
        turn(small)
        turn(target)
        faults.clear("hang")
        daemon.wait_for(lambda s: not s.errors, "NVML is asked again")
    assert target.intact()
    assert small.intact()


@pytest.mark.parametrize("call", NVML)
def test_nvml_hangs_from_the_start(start: Start, program: Program, call: str) -> None:
    daemon = start("1x256MiB", *QUICK, env=WORST | {"KIWI_EMULATOR_HANG": call})
    one, other = program(daemon, 20, name="one"), program(daemon, 20, name="other")
    with answering(daemon):
        for each in (one, other):
            turn(each)
        daemon.wait_for(lambda status: bool(status.errors), "it is shown")
    assert one.intact()
    assert other.intact()
