"""Tests of contexts that the driver has taken: its program may stand still in a call that is none
of CUDA, and nothing asks for the lease.

The library is the scripted one, which sees no calls but CUDA's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linked_program import QUICK
from pagers import CHECKPOINTED, RUNNING
from session_program import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from linked_program import LinkedProgram

QUIET_S = 1.0
"""Time after which a call that has not answered counts as waiting."""


def state_of(daemon: Daemon, one: LinkedProgram) -> int:
    process = daemon.books().process(one.pid)
    assert process is not None
    return process.state


def stands_still(
    start: Callable[..., Daemon], linked: Callable[..., LinkedProgram]
) -> tuple[Daemon, LinkedProgram, LinkedProgram]:
    """Return a daemon, a program that idles and stands still in a call of NVML, and the one for
    which the driver has taken its context."""
    daemon = start(*QUICK)
    one = linked(daemon, 24)
    daemon.wait_state(one.pid, "idle")
    other = linked(daemon, 24)
    daemon.wait_state(one.pid, "paged-out")
    one.do("import pynvml; pynvml.nvmlInit()")
    # More than fits beside the context, and no more than the GPU has less what NVML omits of both.
    other.do(f"library.take({26 * MIB}, 9)")
    daemon.wait_for(lambda _: state_of(daemon, one) == CHECKPOINTED, "its context is out")
    one.worker.send("pynvml.nvmlDeviceGetCount()")
    assert not one.worker.answered(QUIET_S)
    return daemon, one, other


def test_a_program_that_stands_still_in_nvml_goes_on_when_there_is_room(
    start: Callable[..., Daemon], linked: Callable[..., LinkedProgram]
) -> None:
    """The other program does nothing more and keeps its memory until it ends."""
    daemon, one, other = stands_still(start, linked)
    other.close()
    assert one.worker.answer() == 1
    assert state_of(daemon, one) == RUNNING
    assert daemon.session(one.pid).paged_out_bytes >= 24 * MIB, "it has only its context back"
    assert "page-in" not in one.get("library.orders")
    swaps = len(daemon.status().swaps)
    daemon.wait_for(lambda s: s.sessions[0].state == "paged-out", "and waits for nothing")
    assert len(daemon.status().swaps) == swaps
    assert one.digest()
