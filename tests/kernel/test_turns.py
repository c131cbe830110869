"""Tests that a turn belongs to the notebook: cells that follow at once continue its burst."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kiwi_core.wire.messages import Acquire, EndBurst, Release, Waiting
from kiwi_jupyter.kernel.config import Kiwi
from kiwi_jupyter.kernel.grace import Grace
from tests.client.scripted_daemon import eventually

if TYPE_CHECKING:
    from tests.client.scripted_daemon import ScriptedDaemon

LONG_GRACE = "c.Kiwi.turn_grace_s = 600.0"
"""Longer than any test, so that the assertions do not depend on the machine's load."""
DEFAULT = f"c.Kiwi.turn_grace_s = {Kiwi.turn_grace_s.default_value}"
NO_GRACE = "c.Kiwi.turn_grace_s = 0.0"

USES = 8


def turns_of_run_all(make_kernel: Any, daemon: ScriptedDaemon, config: str, between: str) -> int:
    """Return how many turns ``USES`` GPU cells request if all are queued at once."""
    before = len(daemon.received(Acquire))
    with make_kernel(config=config) as kernel:
        cells = [kernel.send(code) for code in ["import tripgpu", "tripgpu.use()", between] * USES]
        for cell in cells:
            kernel.finish(cell)
            assert cell.status == "ok"
        assert int(kernel.check("len(tripgpu.uses)").result) == USES
    return len(daemon.received(Acquire)) - before


def test_run_all_is_one_turn(daemon: ScriptedDaemon, make_kernel: Any) -> None:
    """CPU cells in between change nothing. Without the grace, each GPU cell is its own turn."""
    together = turns_of_run_all(make_kernel, daemon, LONG_GRACE, "x = 1")
    alone = turns_of_run_all(make_kernel, daemon, NO_GRACE, "x = 1")
    assert together == 1
    assert alone >= USES


def test_the_turn_ends_by_itself_after_the_last_cell(
    daemon: ScriptedDaemon, make_kernel: Any
) -> None:
    """This is the default behaviour; the next cell requests a new turn."""
    with make_kernel(config=DEFAULT) as kernel:
        for turn in (1, 2, 3):
            kernel.check("import tripgpu; tripgpu.use()")
            daemon.await_received(EndBurst, turn)
        assert len(daemon.received(Acquire)) == 3


def test_a_cpu_cell_does_not_keep_the_turn(daemon: ScriptedDaemon, make_kernel: Any) -> None:
    """The grace continues beside the cell: its turn ends before the cell does."""
    with make_kernel(config=DEFAULT) as kernel:
        kernel.check("import tripgpu, os, time; tripgpu.use()")
        ended = daemon.path.parent / "ended"
        cell = kernel.send(f"while not os.path.exists({str(ended)!r}): time.sleep(0.01)")
        daemon.await_received(EndBurst)
        assert not kernel.finished(cell)
        ended.touch()
        kernel.finish(cell)
        assert len(daemon.received(Acquire)) == 1


def test_a_turn_that_is_lost_between_two_cells_is_not_kept(
    daemon: ScriptedDaemon, make_kernel: Any
) -> None:
    """The burst was suspended in its grace, so the next cell waits for its own turn."""
    with make_kernel(config=LONG_GRACE) as kernel:
        kernel.check("import tripgpu; tripgpu.use()")
        [first] = daemon.received(Acquire)
        daemon.peer.say(Waiting(burst=first.burst, position=1, ahead=1, holder="other.ipynb"))
        kernel.check("import kiwi_jupyter.kernel as extension")
        heard = "extension._loaded.burst._ticket.last_waiting is not None"
        eventually(lambda: kernel.check(heard).result == "True")
        assert daemon.received(EndBurst) == []
        kernel.check("tripgpu.use()")
        assert len(daemon.received(Acquire)) == 2
        assert len(daemon.received(EndBurst)) == 1


def test_release_and_off_end_the_turn_at_once(daemon: ScriptedDaemon, make_kernel: Any) -> None:
    with make_kernel(config=LONG_GRACE) as kernel:
        kernel.check("import tripgpu; tripgpu.use()")
        assert daemon.received(EndBurst) == []
        kernel.check("%kiwi release")
        daemon.await_received(Release)
        assert len(daemon.received(EndBurst)) == 1
        kernel.check("tripgpu.use()")
        kernel.check("%kiwi off")
        kernel.check("%kiwi on")
        kernel.check("tripgpu.use()")
        assert len(daemon.received(Acquire)) == 3


def test_a_failed_cell_keeps_the_turn_as_any_other(
    daemon: ScriptedDaemon, make_kernel: Any
) -> None:
    with make_kernel(config=LONG_GRACE) as kernel:
        assert kernel.run("import tripgpu; tripgpu.use(); 1 / 0").status == "error"
        kernel.check("tripgpu.use()")
        assert len(daemon.received(Acquire)) == 1
        assert daemon.received(EndBurst) == []


def test_the_grace_begins_anew_with_each_start_and_can_be_called_off() -> None:
    lock, calls = threading.RLock(), []
    grace = Grace(0.02, lock, lambda: calls.append(threading.current_thread().name))
    for round_ in range(1, 4):
        with lock:
            for _ in range(50):
                grace.start()
                grace.stop()
            assert len(calls) == round_ - 1
            grace.start()
        eventually(lambda: len(calls) == round_)  # noqa: B023
    assert set(calls) == {"kiwi-grace"}


def test_without_a_grace_it_is_called_at_once() -> None:
    calls: list[str] = []
    Grace(0, threading.RLock(), lambda: calls.append(threading.current_thread().name)).start()
    assert calls == [threading.current_thread().name]
