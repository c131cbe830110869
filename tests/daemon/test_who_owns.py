"""Tests of the daemon's decision who owns a program's memory, with the real library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daemon import wait_until

from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from daemon import Daemon
    from preloaded_program import PreloadedProgram

    from kiwi_core.wire.messages import SessionStatus

Start = "Callable[..., Daemon]"
Preloaded = "Callable[..., PreloadedProgram]"


def moved_in_turns(*programs: PreloadedProgram) -> None:
    """Let programs that do not fit together use the GPU in turns."""
    for seed, one in enumerate(programs, 1):
        one.take(80, seed)
    for one in programs * 2:
        assert one.intact()


def told(daemon: Daemon, one: PreloadedProgram) -> tuple[MovedBy, str]:
    """Return who moves its memory, and why, once the daemon has looked."""
    session: SessionStatus = daemon.wait_state(one.pid, "idle", "running", "paged-out")
    return session.pager, session.pager_text


def test_a_program_under_a_profiler_leaves_its_memory_to_the_driver(
    start: Start, preloaded: Preloaded
) -> None:
    daemon = start("1x128MiB", "--tq", "0.5")
    watched = preloaded(daemon, NSYS_PROFILING_SESSION_ID="1")
    plain = preloaded(daemon)
    moved_in_turns(watched, plain)
    by, why = told(daemon, watched)
    assert by is MovedBy.CHECKPOINT
    assert "NSYS_PROFILING_SESSION_ID is set" in why
    assert told(daemon, plain) == (MovedBy.INPROCESS, "")


def test_a_program_that_crashed_after_a_move_is_the_gate_only_at_its_next_start(
    start: Start, preloaded: Preloaded
) -> None:
    daemon = start("1x128MiB", "--tq", "0.5")
    first, second = preloaded(daemon), preloaded(daemon)
    moved_in_turns(first, second)
    second.send("os.abort()", "exec")
    wait_until(lambda: daemon.session(second.pid) is None, "the daemon has seen it end")
    again = preloaded(daemon)
    again.take(8, 3)
    by, why = told(daemon, again)
    assert by is MovedBy.CHECKPOINT
    assert "has crashed within 10 s of a move" in why
    assert first.intact(), "who runs goes on as it is"
    pid = daemon.kill_child()
    daemon.wait_ready()
    wait_until(lambda: daemon.status().daemon_pid != pid, "another daemon")
    wait_until(lambda: daemon.session(again.pid), "it is back")
    assert again.intact()
    assert "has crashed" in told(daemon, again)[1]
    third = preloaded(daemon)
    third.take(8, 4)
    assert "has crashed" in told(daemon, third)[1]


def test_a_program_that_asked_for_handles_has_memory_of_the_drivers_at_its_next_start(
    start: Start, preloaded: Preloaded
) -> None:
    daemon = start("1x128MiB")
    first = preloaded(daemon)
    first.take(8)
    assert "NOT_SUPPORTED" in first.fails("ck(driver.cuIpcGetMemHandle(p))")
    wait_until(lambda: b"ipc-refused" in _roster(daemon), "the daemon has learnt of it")
    again = preloaded(daemon)
    again.take(8)
    by, why = told(daemon, again)
    assert by is MovedBy.CHECKPOINT
    assert "share its GPU memory" in why


def test_the_driver_moves_what_a_library_owns_that_nobody_could_ask_before(
    start: Start, preloaded: Preloaded
) -> None:
    """It began without a daemon, and owns. The daemon that comes finds a profiler in it."""
    daemon = start("1x128MiB", "--tq", "0.5")
    daemon.stop()
    watched = preloaded(daemon, NSYS_PROFILING_SESSION_ID="1")
    watched.take(80, 1)
    daemon.start()
    daemon.wait_ready()
    wait_until(lambda: daemon.session(watched.pid), "it has found the daemon")
    other = preloaded(daemon)
    other.take(80, 2)
    assert watched.intact()
    assert other.intact()
    assert watched.intact()
    by, why = told(daemon, watched)
    assert by is MovedBy.CHECKPOINT
    assert "NSYS_PROFILING_SESSION_ID is set" in why


def _roster(daemon: Daemon) -> bytes:
    return b"".join(path.read_bytes() for path in daemon.directory.rglob("*.roster"))
