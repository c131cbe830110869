"""Tests of calls of NVML in programs whose context the driver has taken, with the real library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daemon import wait_until
from pagers import CHECKPOINTED, RUNNING
from session_program import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from preloaded_program import PreloadedProgram

    Start = Callable[..., Daemon]
    Preloaded = Callable[..., PreloadedProgram]

COUNT = "pynvml.nvmlDeviceGetCount()"
ASKS = "a call of NVML asks for the lease"


def state_of(daemon: Daemon, one: PreloadedProgram) -> int:
    process = daemon.books().process(one.pid)
    assert process is not None
    return process.state


def taken(
    daemon: Daemon, preloaded: Preloaded, **env: str
) -> tuple[PreloadedProgram, PreloadedProgram]:
    """Return an idle program whose context the driver has taken, and the one that needed the
    room."""
    one, other = preloaded(daemon, **env), preloaded(daemon, **env)
    one.do("import pynvml; pynvml.nvmlInit()")
    one.take(80, 1)
    daemon.wait_state(one.pid, "idle")
    other.take(80, 2)
    daemon.wait_state(one.pid, "paged-out")
    other.do("more = alloc(32 * MIB)")  # more than fits beside the context
    daemon.wait_for(lambda _: state_of(daemon, one) == CHECKPOINTED, "its context is out")
    return one, other


def test_a_call_of_nvml_brings_its_context_back(start: Start, preloaded: Preloaded) -> None:
    """It takes no turn, and its memory stays out: the other one goes on with its own."""
    daemon = start("1x128MiB", "--idle-after", "0.3")
    one, other = taken(daemon, preloaded)
    full = 112 * MIB
    daemon.wait_for(lambda _: daemon.session(other.pid).resident_bytes >= full, "all is seen")
    other.do("free(more)")
    daemon.wait_for(lambda _: daemon.session(other.pid).resident_bytes < full, "room is seen")
    assert one.get(COUNT) == 1
    assert state_of(daemon, one) == RUNNING
    assert daemon.session(one.pid).paged_out_bytes
    assert ASKS not in daemon.log()
    assert other.intact()
    assert one.intact()
    assert other.intact()


def test_a_call_of_nvml_takes_a_turn_where_there_is_no_room(
    start: Start, preloaded: Preloaded
) -> None:
    daemon = start("1x128MiB", "--idle-after", "0.3")
    one, other = taken(daemon, preloaded)
    assert one.get(COUNT) == 1
    assert ASKS in daemon.log()
    assert one.intact()
    assert other.intact()


def test_a_call_of_nvml_takes_a_turn_where_the_driver_moves_all(
    start: Start, preloaded: Preloaded
) -> None:
    daemon = start("1x128MiB", "--idle-after", "0.3")
    one, other = (preloaded(daemon, KIWI_PRELOAD_OWN="0") for _ in range(2))
    one.do("import pynvml; pynvml.nvmlInit()")
    one.take(80, 1)
    daemon.wait_state(one.pid, "idle")
    other.take(80, 2)
    daemon.wait_state(one.pid, "paged-out")
    one.send(COUNT)
    wait_until(lambda: daemon.log().count(ASKS) == 1, "it takes a turn")
    assert one.answer() == 1
    assert other.intact()
    daemon.wait_state(one.pid, "paged-out")
    assert one.get(COUNT) == 1, "a later one, too"
    assert one.intact()
