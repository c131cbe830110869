"""Tests of programs that have given the GPU more work than ends while one order to stop them lasts
(a training loop that never waits): what has ended is kept, and who waits is told what for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from daemon import wait_until

from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

ONE_NS = NS_PER_S // 2
KERNELS = 10
LOOP = f"""
queued = 0
def keep_full():
    global queued
    begin()
    ck(driver.cuCtxSetCurrent(context))
    while not stop.is_set():
        launch('spin_ns', {ONE_NS})
        queued += 1
        if queued % {KERNELS} == 0:
            sync()
    client.end_burst()
stop = threading.Event()
loop = threading.Thread(target=keep_full, daemon=True)
loop.start()
"""


def fill_and_ask(daemon: Daemon, full: SessionProgram, other: SessionProgram) -> None:
    """Fill the queue of ``full``, and let ``other`` ask until it is told what it waits for."""
    full.worker.do(LOOP)
    wait_until(lambda: full.worker.get("queued") >= 4, "its queue fills")
    other.start_burst()
    told = lambda s: any(  # noqa: E731
        x.pid == other.pid and "already given to the GPU" in x.problem_text for x in s.sessions
    )
    daemon.wait_for(told, "it is told what it waits for")


@pytest.mark.parametrize("pager", ["0", "1"], ids=["gate", "owner"])
def test_a_queue_longer_than_an_order_is_drained_once(
    start: Start, program: Program, pager: str
) -> None:
    daemon = start("1x128MiB", "--tq", "0.3", "--swap-floor", "0", "--lock-timeout", "1")
    other = program(daemon, 80, environment={"KIWI_PRELOAD_OWN": pager})
    full = program(daemon, 80, environment={"KIWI_PRELOAD_OWN": pager})
    fill_and_ask(daemon, full, other)
    wait_until(other.granted, "it gets the GPU once that queue has ended")
    assert full.worker.get("queued") <= 2 * KERNELS, "nothing was added meanwhile"
    other.stop_burst()
    full.worker.do("stop.set(); loop.join()")
    assert full.intact()
    assert other.intact()


def test_a_gate_that_nobody_waits_for_any_more_opens(start: Start, program: Program) -> None:
    daemon = start("1x128MiB", "--tq", "0.3", "--swap-floor", "0", "--lock-timeout", "1")
    other, full = program(daemon, 80), program(daemon, 80)
    fill_and_ask(daemon, full, other)
    other.close()
    seen = full.worker.get("queued")
    wait_until(lambda: full.worker.get("queued") > seen + KERNELS, "it goes on")
    full.worker.do("stop.set(); loop.join()")
    assert full.intact()
