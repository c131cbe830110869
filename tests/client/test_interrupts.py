"""Tests of an interrupt at each single place of the client's code.

The interpreter runs signal handlers when a function begins and when a call into C has returned. It
calls a profiler at the same places, so a profiler that raises acts like a signal handler.
"""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kiwi_core.client
from kiwi_core.client import LeaseCancelled
from kiwi_core.wire.messages import Acquire, EndBurst, GetStatus, Ping, Withdraw
from tests.client.scripted_daemon import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from kiwi_core.client import Client
    from tests.client.scripted_daemon import ScriptedDaemon

CLIENTS_CODE = kiwi_core.client.__path__[0]


@contextmanager
def interrupt_at(place: int) -> Iterator[list[bool]]:
    """Raise ``KeyboardInterrupt`` at the ``place``-th place of the client's code that this thread
    passes; the yielded list is filled once it was raised.

    Garbage is not collected meanwhile: a collection that begins in the client's code runs
    destructors and weak references' callbacks, and the interpreter only prints what those raise.
    """
    struck: list[bool] = []
    left = place

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and _is_clients(frame):
            left -= 1
            if left < 0:
                struck.append(True)
                raise KeyboardInterrupt  # the interpreter removes the profiler

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(look)
    try:
        yield struck
    except KeyboardInterrupt:
        assert struck
    finally:
        sys.setprofile(before)
        gc.enable()


def _is_clients(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(CLIENTS_CODE):
        frame = frame.f_back
    return frame is not None


def each_place(act: Callable[[], object]) -> Iterator[int]:
    """Interrupt ``act`` at its first place, then at its second, until it ends without an
    interrupt."""
    for place in range(10_000):
        with interrupt_at(place) as struck:
            act()
        if not struck:
            assert place > 5, "nearly nothing was interrupted"
            return
        yield place
    raise AssertionError("this has no end")


def test_a_burst_and_questions(daemon: ScriptedDaemon, client: Client) -> None:
    """Whatever was interrupted, the connection is the same, and each question gets its own
    answer."""

    def act() -> None:
        client.acquire()
        client.end_burst()
        client.ping(PATIENCE_S)
        client.status(PATIENCE_S)

    for place in each_place(act):
        client.end_burst()
        daemon.tq_s = float(place)
        assert client.status(PATIENCE_S).scheduler.tq_s == place
        client.ping(PATIENCE_S)
    act()
    assert len(daemon.peers) == 1
    *_, acquire, end, ping, status = daemon.peer.received
    assert isinstance(acquire, Acquire)
    assert (end, ping, status) == (EndBurst(burst=acquire.burst), Ping(), GetStatus())


def test_a_wait(daemon: ScriptedDaemon, client: Client) -> None:
    """The place in the queue is free afterwards or was never taken, also when the interrupt comes
    while the wait is already being cancelled."""
    daemon.grants = False
    looks = 0

    def again() -> bool:
        nonlocal looks
        looks += 1
        return looks > 2

    def act() -> None:
        nonlocal looks
        looks = 0
        client.acquire(cancelled=again, poll_s=0.001)

    place = 0
    while True:
        try:
            with interrupt_at(place):
                act()
        except LeaseCancelled:
            break
        client.ping(PATIENCE_S)
        asked = [m for m in daemon.peer.received if isinstance(m, (Acquire, Withdraw))]
        assert not asked or isinstance(asked[-1], Withdraw), place
        place += 1
    assert place > 20
    assert len(daemon.peers) == 1


def test_a_request_that_was_cut_short_keeps_nobody_out(client: Client) -> None:
    """Nobody has the ticket, so nobody could end that burst."""
    for _ in each_place(client.begin):
        client.acquire()
        client.end_burst()


def test_the_clients_own_thread_finishes_interrupted_questions(
    daemon: ScriptedDaemon, client: Client
) -> None:
    """Another thread's questions are answered although a question was interrupted."""
    for _ in each_place(lambda: client.ping(PATIENCE_S)):
        asked = threading.Thread(target=client.status, args=(PATIENCE_S,))
        asked.start()
        asked.join(PATIENCE_S)
        assert not asked.is_alive()
    assert daemon.received(Ping)
    assert len(daemon.peers) == 1
