"""Each driver call about a program hangs in turn, in each state of it: ``kiwi status`` is answered
all the time, others go on, and when the call comes back nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from answering import answering, turn, works
from daemon import wait_until

from kiwi_core import emulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

pytestmark = pytest.mark.timeout(180)

QUICK = ("--tq", "0.3", "--swap-floor", "0", "--lock-timeout", "0.5", "--stuck-after", "0.5")
WORST = {"KIWI_EMULATOR_DRIVER": "worst"}
NVML = ("nvmlDeviceGetComputeRunningProcesses",)
"""Not the memory of the GPU: no daemon starts without knowing how much there is."""


def idle(_daemon: Daemon, _target: SessionProgram) -> None:
    """It holds memory, and computes nothing."""


def running(_daemon: Daemon, target: SessionProgram) -> None:
    target.start_burst()
    wait_until(target.granted, "it runs")


def paged_out(daemon: Daemon, target: SessionProgram) -> None:
    target.worker.do("client.release()")
    daemon.wait_state(target.pid, "paged-out")


@pytest.mark.parametrize(
    ("state", "call"),
    [
        *[(idle, call) for call in ("lock", "checkpoint", "get_state")],
        *[(running, call) for call in ("lock", "checkpoint", "get_state")],
        *[(paged_out, call) for call in ("restore", "unlock", "get_state")],
    ],
)
def test_a_call_that_hangs(
    start: Start, program: Program, state: Callable[[Daemon, SessionProgram], None], call: str
) -> None:
    daemon = start("1x256MiB", *QUICK, env=WORST)
    big, small = program(daemon, 150, name="big"), program(daemon, 20, name="small")
    target = program(daemon, 120, name="target")
    state(daemon, target)
    faults = emulator.Faults(daemon.state_path)
    faults.set("hang", pid=target.pid, operation=call, count=-1)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("call", NVML)
def test_nvml_hangs_from_the_start(start: Start, program: Program, call: str) -> None:
    daemon = start("1x256MiB", *QUICK, env=WORST | {"KIWI_EMULATOR_HANG": call})
    one, other = program(daemon, 20, name="one"), program(daemon, 20, name="other")
    with answering(daemon):
        for each in (one, other):
            turn(each)
    assert one.intact()
    assert other.intact()
