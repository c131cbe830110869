"""Tests of memory that is held for a moment only: the library counts what passes its gate, and the
scheduler learns from its count what NVML, read twice a second, never sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cuda_processes import WorkerError

from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]


def brief(one: SessionProgram, size_mib: int, call: str = "alloc") -> None:
    """Run a burst in which it holds ``size_mib`` for a moment."""
    one.worker.do(
        f"begin(); init()\ntry: q = {call}({size_mib * MIB}); free(q)\nfinally: client.end_burst()"
    )


def peak_mib(daemon: Daemon, one: SessionProgram) -> int:
    session = daemon.session(one.pid)
    return ((session.peak_bytes if session else 0) or 0) // MIB


@pytest.mark.parametrize("pager", ["0", "1"], ids=["gate", "owner"])
def test_a_peak_between_two_readings_is_learnt(start: Start, program: Program, pager: str) -> None:
    daemon = start("1x256MiB")
    one = program(daemon, environment={"KIWI_PRELOAD_OWN": pager})
    brief(one, 150)
    daemon.wait_for(lambda _: 150 <= peak_mib(daemon, one) < 180, "the peak is learnt")


def test_memory_that_a_context_takes_along_is_not_counted_for_ever(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB")
    one = program(daemon)
    one.worker.do(
        "begin(); ck(driver.cuInit(0)); dev = ck(driver.cuDeviceGet(0))\n"
        "for _ in range(3):\n"
        "    ck(driver.cuCtxSetCurrent(ck(driver.cuDevicePrimaryCtxRetain(dev))))\n"
        "    alloc(100 * MIB); ck(driver.cuDevicePrimaryCtxReset(dev))\n"
        "client.end_burst()"
    )
    brief(one, 20)
    daemon.wait_for(lambda _: peak_mib(daemon, one) >= 100, "the peak is learnt")
    assert peak_mib(daemon, one) < 130


def test_an_allocation_that_failed_is_a_need(start: Start, program: Program) -> None:
    daemon = start("1x256MiB", "--anti-thrash", "off")
    runner, one = program(daemon, 150), program(daemon, 10)
    runner.start_burst()
    with pytest.raises(WorkerError, match="OUT_OF_MEMORY"):
        brief(one, 140)
    daemon.wait_for(lambda _: peak_mib(daemon, one) >= 150, "what it lacked is learnt")
    client = daemon.client()
    client.set(anti_thrash="on")
    client.close()
    for _ in range(3):
        brief(one, 140)  # it goes in turns now
    runner.stop_burst()
    assert runner.intact()


PREALLOCATE = """
begin(); init()
told = ck(driver.cuMemGetInfo())
q = alloc(int(told[0] * {share}))
client.end_burst()
"""


@pytest.mark.parametrize("pager", ["0", "1"], ids=["gate", "owner"])
def test_what_takes_a_share_of_what_is_free_needs_that_share_of_the_gpu(
    start: Start, program: Program, pager: str
) -> None:
    daemon = start("1x256MiB", "--anti-thrash", "off")
    runner = program(daemon, 120)
    one = program(daemon, environment={"KIWI_PRELOAD_OWN": pager})
    runner.start_burst()
    one.worker.do(PREALLOCATE.format(share=0.75))
    assert one.worker.get("told[0]") < 136 * MIB, "the runner has the rest"
    daemon.wait_for(lambda _: peak_mib(daemon, one) >= 180, "what it would take alone is learnt")
    assert peak_mib(daemon, one) < 200, "and no more, but for a context"
    runner.stop_burst()
    assert runner.intact()


def test_an_allocation_that_is_small_beside_what_is_free_needs_its_size(
    start: Start, program: Program
) -> None:
    daemon = start("1x256MiB", "--anti-thrash", "off")
    runner, one = program(daemon, 120), program(daemon)
    runner.start_burst()
    one.worker.do(PREALLOCATE.format(share=0.3))
    daemon.wait_for(lambda _: peak_mib(daemon, one) >= 38, "the peak is learnt")
    assert peak_mib(daemon, one) < 60
    runner.stop_burst()


def test_bursts_that_only_look_do_not_make_it_small(start: Start, program: Program) -> None:
    """It then takes nearly everything, as JAX and TensorFlow do, and gets the GPU for itself."""
    daemon = start("1x512MiB")
    runner, one = program(daemon, 200), program(daemon)
    runner.start_burst()
    for look in ("ck(driver.cuInit(0))", "init()", "ck(driver.cuMemGetInfo())"):
        one.worker.do(f"begin(); {look}; client.end_burst()")
    one.worker.do(PREALLOCATE.format(share=0.9))
    assert one.worker.get("told[0]") > 480 * MIB
    assert runner.stop_burst() > 0
    assert runner.intact()
