"""Two programs that outgrow the GPU, with the library itself: the one's memory comes in while the
other's goes out, chunk by chunk, and no byte is lost, whoever dies in the middle of it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from cuda_processes import Worker
from daemon import wait_until

from kiwi_core import emulator, preload
from kiwi_core.sched.actions import PageIn, PageOut
from kiwi_core.states import Overlap, SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

MIB = 1 << 20
SIZE = 80
GPU = "1x128MiB"

Start = "Callable[..., Daemon]"
Preloaded = "Callable[[Daemon, int], Worker]"


@pytest.fixture
def preloaded() -> Iterator[Callable[[Daemon, int], Worker]]:
    """Makes plain CUDA programs under the library, with ``SIZE`` MiB each; all are ended."""
    made: list[Worker] = []

    def make(daemon: Daemon, seed: int) -> Worker:
        environment = daemon.env | emulator.environment(daemon.state_path, emulator.build())
        environment |= preload.environment(preload.library(), environment)
        environment["KIWI_PRELOAD_CLEAN"] = "0"  # what idles is to have something to copy
        one = Worker(environment)
        made.append(one)
        one.do("init()")
        one.do(f"p = alloc({SIZE * MIB}); before = fill(p, {seed}, {SIZE * MIB})")
        daemon.wait_state(one.pid, "idle")
        return one

    yield make
    for one in made:
        one.close()


def begin(worker: Worker) -> None:
    """A turn, in which all its bytes are read."""
    worker.send(f"digest(p, {SIZE * MIB}) == before")


def change(worker: Worker, seed: int) -> None:
    """All its bytes: nothing goes out without being copied."""
    worker.do(f"before = fill(p, {seed}, {SIZE * MIB})")


def overlapped(daemon: Daemon) -> list[PageIn]:
    ordered = [action for entry in daemon.journal() for action in entry.actions]
    return [action for action in ordered if isinstance(action, PageIn) and action.beside]


def slow(daemon: Daemon, mib_per_s: int) -> None:
    emulator.set_copy_bandwidth(daemon.state_path, mib_per_s * MIB)


def until_in_the_middle(daemon: Daemon, comes: Worker, goes: Worker) -> None:
    """A part of the one is in, and a part of the other still is."""

    def is_so() -> bool:
        books = daemon.books()
        there = [books.process(worker.pid).device_bytes.get(0, 0) for worker in (comes, goes)]
        return min(there) > 16 * MIB and max(there) < 76 * MIB

    wait_until(is_so, "in the middle", 60.0)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_two_that_do_not_fit_take_turns(start: Start, preloaded: Preloaded, overlap: str) -> None:
    daemon = start(GPU, "--tq", "0.5", "--overlap", overlap)
    first, second = preloaded(daemon, 1), preloaded(daemon, 2)
    slow(daemon, 400)
    for _ in range(2):
        for worker in (first, second):
            begin(worker)
            assert worker.answer() is True
    assert bool(overlapped(daemon)) == (overlap == "on")
    status = daemon.status().scheduler
    assert (status.overlap, status.overlaps) == (Overlap(overlap), overlap == "on")


def parts_out(daemon: Daemon, first: Worker, second: Worker) -> list[int]:
    """They take turns until the one needs a part of the other's room only: its bytes."""
    parts: list[int] = []
    for _ in range(6):  # until it is known what they need
        for worker in (first, second):
            begin(worker)
            assert worker.answer() is True
            daemon.wait_state(worker.pid, "idle")
        outs = [a for e in daemon.journal() for a in e.actions if isinstance(a, PageOut)]
        parts = [action.bytes for action in outs if action.bytes]
        if parts:
            break
    return parts


def test_only_what_is_short_goes_out_also_over_a_restart(
    start: Start, preloaded: Preloaded
) -> None:
    daemon = start("1x192MiB", "--overlap", "on")
    first, second = preloaded(daemon, 1), preloaded(daemon, 2)
    first.do(f"more = alloc({60 * MIB})")
    parts = parts_out(daemon, first, second)
    assert parts, "a part of it was enough"
    assert max(parts) < 100 * MIB
    row = daemon.wait_state(first.pid, "paged-out")
    assert 0 < row.paged_out_bytes < 130 * MIB
    assert row.resident_bytes > 10 * MIB
    old = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != old, "a new daemon")
    for worker in (second, first):
        begin(worker)
        assert worker.answer() is True


@pytest.mark.parametrize("dies", ["comes", "goes"])
def test_a_program_that_is_killed_in_the_middle(
    start: Start, preloaded: Preloaded, dies: str
) -> None:
    daemon = start(GPU, "--overlap", "on")
    goes_out, comes_in = preloaded(daemon, 1), preloaded(daemon, 2)
    change(goes_out, 3)
    slow(daemon, 60)
    begin(comes_in)
    until_in_the_middle(daemon, comes_in, goes_out)
    victim, survivor = (comes_in, goes_out) if dies == "comes" else (goes_out, comes_in)
    victim.kill()
    slow(daemon, 0)
    if dies == "comes":
        begin(survivor)
    assert survivor.answer() is True
    daemon.wait_for(lambda s: len(s.sessions) == 1, "the dead one is off the books")


def test_the_daemon_is_killed_in_the_middle(start: Start, preloaded: Preloaded) -> None:
    daemon = start(GPU, "--overlap", "on")
    goes_out, comes_in = preloaded(daemon, 1), preloaded(daemon, 2)
    change(goes_out, 3)
    slow(daemon, 60)
    begin(comes_in)
    until_in_the_middle(daemon, comes_in, goes_out)
    old = daemon.kill_child()
    slow(daemon, 0)
    daemon.wait_for(lambda s: s.daemon_pid != old, "a new daemon")
    assert comes_in.answer() is True
    begin(goes_out)
    assert goes_out.answer() is True
    begin(comes_in)
    assert comes_in.answer() is True


def test_one_that_is_stopped_while_it_comes_in(start: Start, preloaded: Preloaded) -> None:
    """SIGSTOP in the middle: it is overdue, who goes out does not wait for it, and all comes in."""
    daemon = start(GPU, "--overlap", "on", "--stuck-after", "0.5", "--lock-timeout", "0.5")
    goes_out, comes_in = preloaded(daemon, 1), preloaded(daemon, 2)
    change(goes_out, 3)
    slow(daemon, 60)
    begin(comes_in)
    until_in_the_middle(daemon, comes_in, goes_out)
    os.kill(comes_in.pid, signal.SIGSTOP)
    slow(daemon, 0)
    daemon.wait_for(
        lambda s: any(x.state is SessionState.PAGED_OUT for x in s.sessions), "the other is out"
    )
    os.kill(comes_in.pid, signal.SIGCONT)
    assert comes_in.answer() is True
    begin(goes_out)
    assert goes_out.answer() is True
