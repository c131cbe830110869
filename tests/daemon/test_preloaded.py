"""Tests of the daemon with the real preloaded library and plain CUDA programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from daemon import wait_until

from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from collections.abc import Callable

    from preloaded_program import PreloadedProgram


MIB = 1 << 20

Start = "Callable[..., Daemon]"


def test_two_that_do_not_fit_take_turns_and_each_asks_by_itself(
    start: Start, preloaded: Callable[..., PreloadedProgram]
) -> None:
    daemon = start("1x128MiB", "--tq", "0.5")
    first, second = preloaded(daemon), preloaded(daemon)
    first.take(80, 1)
    second.take(80, 2)
    for _ in range(2):
        assert first.intact()
        assert second.intact()
    rows = {s.pid: s for s in daemon.status().sessions}
    assert {row.pager for row in rows.values()} == {MovedBy.INPROCESS}
    assert rows[first.pid].paged_out_bytes or rows[second.pid].paged_out_bytes


def test_room_is_made_while_an_allocation_waits(
    start: Start, preloaded: Callable[..., PreloadedProgram]
) -> None:
    """One program idles with 70 % of the GPU, the other one grows from 10 % to 90 %."""
    daemon = start("1x256MiB")
    idle, grows = preloaded(daemon), preloaded(daemon)
    idle.take(176, 1)
    daemon.wait_state(idle.pid, "idle")
    grows.take(26, 2)
    grows.do(f"more = [alloc({6 * MIB}) for _ in range(34)]")
    grows.do("[free(one) for one in more]")
    assert grows.intact()
    assert idle.intact()


def test_memory_of_a_program_whose_code_broke_goes_out_without_a_copy(
    start: Start, preloaded: Callable[..., PreloadedProgram]
) -> None:
    """Its context answers each call with the same error from then on; the others continue."""
    daemon = start("1x128MiB")
    broken, other = preloaded(daemon), preloaded(daemon)
    broken.take(80, 1)
    assert broken.fails("launch('fill_u32', 8, 1, 1); sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    daemon.wait_state(broken.pid, "idle")
    other.take(80, 2)
    shown = daemon.wait_state(broken.pid, "lost")
    for words in ("CUDA error 700", "own GPU code", "lost"):
        assert words in shown.problem_text
    assert "Start it again" in shown.problem_text
    assert other.intact()
    assert broken.fails("sync()") == "CUDA_ERROR_ILLEGAL_ADDRESS", "it waits for nothing"
    broken.close()
    assert other.intact()


def test_memory_survives_a_crash_of_the_daemon(
    start: Start, preloaded: Callable[..., PreloadedProgram]
) -> None:
    daemon = start("1x128MiB")
    first, second = preloaded(daemon), preloaded(daemon)
    first.take(80, 1)
    daemon.wait_state(first.pid, "idle")
    second.take(80, 2)
    daemon.wait_state(first.pid, "paged-out")
    old = daemon.kill_child()
    daemon.wait_for(lambda s: s.daemon_pid != old, "a new daemon")
    assert second.intact()
    assert first.intact()
    wait_until(lambda: len(daemon.status().sessions) == 2, "both are sessions as before")


def test_a_context_that_stays_is_its_programs_and_stays(
    start: Start, preloaded: Callable[..., PreloadedProgram]
) -> None:
    """A paged-out program's context counts as its own. No newcomer, which may need the whole GPU,
    has the driver move it."""
    daemon = start("1x144MiB", "--idle-after", "0.3")
    first, second = preloaded(daemon), preloaded(daemon)
    first.take(80, 1)
    for seed in (2, 3):
        daemon.wait_state(first.pid, "idle")
        second.take(80, seed)
        out = daemon.wait_state(first.pid, "paged-out")
        assert out.resident_bytes > 0
        # NVML omits a part of each context. The last reading may be of the middle of the take.
        daemon.wait_for(lambda s: s.memory.outside_bytes <= 2 * 6 * MIB, "no memory is outside")
        second.do("free(p)")
        assert first.intact()
    swaps = daemon.status().swaps
    assert {swap.direction for swap in swaps} == {"out", "in"}
    # Before it had memory, nothing of it was moved for the other's first call.
    moved = [swap.bytes_moved for swap in swaps if swap.session == out.id]
    assert min(filter(None, moved)) > 16 * MIB, "no context"


@pytest.mark.parametrize("own", ["0", "1"], ids=["gate-only", "owning"])
@pytest.mark.parametrize("crash", [False, True], ids=["", "and-the-daemon-is-killed"])
def test_a_program_that_becomes_another_one_while_it_is_out(
    start: Start, preloaded: Callable[..., PreloadedProgram], own: str, *, crash: bool
) -> None:
    """Its memory, its gate and its state in the driver ended with the old program (exec). The new
    program takes its turns like any other."""
    daemon = start("1x128MiB", "--idle-after", "0.3")
    first, second = (preloaded(daemon, KIWI_PRELOAD_OWN=own) for _ in range(2))
    first.take(80, 1)
    daemon.wait_state(first.pid, "idle")
    second.take(80, 2)
    daemon.wait_state(first.pid, "paged-out")
    if crash:
        old = daemon.kill_child()
    first.do("become_anew()")
    if crash:
        daemon.wait_for(lambda s: s.daemon_pid != old, "a new daemon")
    first.do("init()")
    first.take(72, 3)
    daemon.wait_state(second.pid, "paged-out")
    assert daemon.wait_state(first.pid, "idle").paged_out_bytes == 0
    assert second.intact()
    daemon.wait_state(first.pid, "paged-out")
    assert first.intact()


def test_a_program_that_becomes_one_without_a_gpu(
    start: Start, preloaded: Callable[..., PreloadedProgram]
) -> None:
    """The old program's paged-out memory no longer exists, and no longer counts."""
    daemon = start("1x128MiB", "--idle-after", "0.3")
    first, second = (preloaded(daemon, KIWI_PRELOAD_OWN="0") for _ in range(2))
    first.take(80, 1)
    daemon.wait_state(first.pid, "idle")
    second.take(80, 2)
    daemon.wait_state(first.pid, "paged-out")
    first.do("become_anew()")
    wait_until(
        lambda: all(s.paged_out_bytes == 0 for s in daemon.status().sessions), "nothing is out"
    )
    assert second.intact()
