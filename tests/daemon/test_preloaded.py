"""The daemon with the preloaded library itself: plain CUDA programs that know nothing of Kiwi."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cuda_processes import Worker
from daemon import wait_until

from kiwi_core import emulator, preload
from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon import Daemon

MIB = 1 << 20

Start = "Callable[..., Daemon]"


@pytest.fixture
def preloaded() -> Iterator[Callable[[Daemon], Worker]]:
    """Makes plain CUDA programs under the library; all are ended."""
    made: list[Worker] = []

    def make(daemon: Daemon) -> Worker:
        environment = daemon.env | emulator.environment(daemon.state_path, emulator.build())
        environment |= preload.environment(preload.library(), environment)
        one = Worker(environment)
        made.append(one)
        one.do("init()")
        return one

    yield make
    for one in made:
        one.close()


def take(worker: Worker, size_mib: int, seed: int) -> None:
    worker.do(f"p = alloc({size_mib * MIB}); before = fill(p, {seed}, {size_mib * MIB})")


def intact(worker: Worker, size_mib: int) -> bool:
    return bool(worker.get(f"digest(p, {size_mib * MIB}) == before"))


def test_two_that_do_not_fit_take_turns_and_each_asks_by_itself(
    start: Start, preloaded: Callable[[Daemon], Worker]
) -> None:
    daemon = start("1x128MiB", "--tq", "0.5")
    first, second = preloaded(daemon), preloaded(daemon)
    take(first, 80, 1)
    take(second, 80, 2)
    for _ in range(2):
        assert intact(first, 80)
        assert intact(second, 80)
    rows = {s.pid: s for s in daemon.status().sessions}
    assert {row.pager for row in rows.values()} == {MovedBy.INPROCESS}
    assert rows[first.pid].paged_out_bytes or rows[second.pid].paged_out_bytes


def test_room_is_made_while_an_allocation_waits(
    start: Start, preloaded: Callable[[Daemon], Worker]
) -> None:
    """Issue 4's case: one idles with 70 % of the GPU, the other grows from 10 % to 90 %."""
    daemon = start("1x256MiB")
    idle, grows = preloaded(daemon), preloaded(daemon)
    take(idle, 176, 1)
    daemon.wait_state(idle.pid, "idle")
    take(grows, 26, 2)
    grows.do(f"more = [alloc({6 * MIB}) for _ in range(34)]")
    grows.do("[free(one) for one in more]")
    assert intact(grows, 26)
    assert intact(idle, 176)


def test_memory_of_a_program_whose_code_broke_goes_out_without_a_copy(
    start: Start, preloaded: Callable[[Daemon], Worker]
) -> None:
    """Its context answers each call with the same error from then on: the others go on."""
    daemon = start("1x128MiB")
    broken, other = preloaded(daemon), preloaded(daemon)
    take(broken, 80, 1)
    assert broken.fails("launch('fill_u32', 8, 1, 1); sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    daemon.wait_state(broken.pid, "idle")
    take(other, 80, 2)
    shown = daemon.wait_state(broken.pid, "lost")
    for words in ("CUDA error 700", "own GPU code", "lost"):
        assert words in shown.problem_text
    assert "Restart this kernel" in shown.problem_text
    assert intact(other, 80)
    assert broken.fails("sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS", "it waits for nothing"
    broken.close()
    assert intact(other, 80)


def test_over_a_crash_of_the_daemon(start: Start, preloaded: Callable[[Daemon], Worker]) -> None:
    daemon = start("1x128MiB")
    first, second = preloaded(daemon), preloaded(daemon)
    take(first, 80, 1)
    daemon.wait_state(first.pid, "idle")
    take(second, 80, 2)
    daemon.wait_state(first.pid, "paged-out")
    old = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != old, "a new daemon")
    assert intact(second, 80)
    assert intact(first, 80)
    wait_until(lambda: len(daemon.status().sessions) == 2, "both are sessions as before")


def test_a_context_that_stays_is_its_programs_and_stays(
    start: Start, preloaded: Callable[[Daemon], Worker]
) -> None:
    """Of one that is out: it counts as its own, and no newcomer, who may need the whole GPU, has it
    moved by the driver as well."""
    daemon = start("1x144MiB", "--idle-after", "0.3")
    first, second = preloaded(daemon), preloaded(daemon)
    take(first, 80, 1)
    for seed in (2, 3):
        daemon.wait_state(first.pid, "idle")
        take(second, 80, seed)
        out = daemon.wait_state(first.pid, "paged-out")
        assert out.resident_bytes > 0
        # NVML leaves out a part of each context.
        assert daemon.status().memory.outside_bytes <= 2 * 5 * MIB
        second.do("free(p)")
        assert intact(first, 80)
    swaps = daemon.status().swaps
    assert {swap.direction for swap in swaps} == {"out", "in"}
    assert min(s.bytes_moved for s in swaps if s.session == out.id) > 16 * MIB, "no context"
