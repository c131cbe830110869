"""Two programs of which only a part has to go out, with the library itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cuda_processes import Worker

from kiwi_core import emulator, preload
from kiwi_core.sched.actions import PageOut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

MIB = 1 << 20
SIZE = 80

Start = "Callable[..., Daemon]"
Preloaded = "Callable[[Daemon, int], Worker]"


@pytest.fixture
def preloaded() -> Iterator[Callable[[Daemon, int], Worker]]:
    """Makes plain CUDA programs under the library, with ``SIZE`` MiB each; all are ended."""
    made: list[Worker] = []

    def make(daemon: Daemon, seed: int) -> Worker:
        environment = daemon.env | emulator.environment(daemon.state_path, emulator.build())
        environment |= preload.environment(preload.library(), environment)
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
    daemon = start("1x192MiB")
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
