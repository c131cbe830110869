"""``kiwi daemon --storage custom`` on the emulated driver: real daemons, keepers and programs."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from cuda_processes import Worker, wait_until

from kiwi_core import emulator
from kiwi_core.gpu.processes import ref_of
from kiwi_core.pager.keeper.record import Place, Record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from daemon import Daemon
    from session_program import SessionProgram

    Start = Callable[..., Daemon]
    Program = Callable[..., SessionProgram]

CUSTOM = ("1x128MiB", "--storage", "custom", "--tq", "0.3")
SIZE_MIB = 60


def keepers_of(daemon: Daemon) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "kiwi_core.pager.keeper" in words and str(daemon.directory) in words[-1]:
            found.append(process.pid)
    return found


def record(daemon: Daemon, program: SessionProgram) -> Record | None:
    (directory,) = (daemon.directory / "state").glob("GPU-*.keepers")
    ref = ref_of(program.pid)
    assert ref is not None
    return Place(directory, ref).read()


def one_is_out_by_its_keeper(daemon: Daemon, a: SessionProgram, b: SessionProgram) -> None:
    """They take turns until the move of A finds its keeper there: a busy machine may take its time
    to start it."""

    def found() -> bool:
        assert a.intact()
        assert b.intact()
        said = record(daemon, a)
        return said is not None and said.way == "out"

    wait_until(found, "A goes out by custom storage")


def test_two_take_turns(start: Start, program: Program) -> None:
    daemon = start(*CUSTOM)
    a, b = program(daemon, SIZE_MIB), program(daemon, SIZE_MIB)
    one_is_out_by_its_keeper(daemon, a, b)
    assert any("unproven on hardware" in text for text in daemon.status().errors)
    assert "unproven on hardware" in daemon.log()
    for one in (a, b):
        one.start_burst()
    for one in (a, b, a, b):
        until = one.rounds() + 5
        wait_until(lambda one=one, until=until: one.rounds() >= until, "its turn")  # type: ignore[misc]
    for one in (a, b):
        one.stop_burst()
    assert a.intact()
    assert b.intact()
    assert keepers_of(daemon)
    for one in (a, b):
        one.close()
    wait_until(lambda: not keepers_of(daemon), "keepers end with their programs")


def test_told_to_end_it_brings_everybody_back_and_ends_the_keepers(
    start: Start, program: Program
) -> None:
    daemon = start(*CUSTOM)
    a, b = program(daemon, SIZE_MIB), program(daemon, 10)
    c = program(daemon, SIZE_MIB)
    one_is_out_by_its_keeper(daemon, a, c)
    c.close()
    wait_until(lambda: daemon.session(c.pid) is None, "C has left")
    assert daemon.terminate() == 0
    assert not keepers_of(daemon)
    books = daemon.books()
    assert [books.process(one.pid).state for one in (a, b)] == [0, 0]


@pytest.mark.parametrize(("who", "then"), [("child", "custom"), ("all", "driver")])
def test_a_killed_daemon_loses_nothing(start: Start, program: Program, who: str, then: str) -> None:
    """Nor does one that is told something else when it starts again: the record decides."""
    daemon = start(*CUSTOM)
    a, b = program(daemon, SIZE_MIB), program(daemon, SIZE_MIB)
    one_is_out_by_its_keeper(daemon, a, b)
    keepers = set(keepers_of(daemon))
    if who == "child":
        old = daemon.kill_child()
        daemon.wait_for(lambda status: status.daemon_pid != old, "a new daemon")
    else:
        daemon.kill_all()
        daemon.args = tuple(then if word == "custom" else word for word in daemon.args)
        daemon.start()
    assert then == "driver" or keepers <= set(keepers_of(daemon))
    for _ in range(2):
        assert a.intact()
        assert b.intact()
    if then == "driver":
        wait_until(lambda: not keepers_of(daemon), "nobody wants them any more")


def test_a_killed_keeper_is_told_in_plain_words(start: Start, program: Program) -> None:
    daemon = start(*CUSTOM)
    a, b = program(daemon, SIZE_MIB), program(daemon, SIZE_MIB)
    one_is_out_by_its_keeper(daemon, a, b)
    said = record(daemon, a)
    assert said is not None
    os.kill(said.keeper_pid, signal.SIGKILL)
    a.start_burst()
    daemon.wait_state(a.pid, "lost")
    wait_until(lambda: any("keeper" in text for _, text in a.told()), "the program is told")
    assert b.intact()


@pytest.mark.parametrize(("version", "wanted"), [(13_040, True), (13_000, False)])
def test_an_older_driver_steps_aside_and_says_so(
    tmp_path: Path, version: int, wanted: bool
) -> None:
    emulator.create_state(tmp_path / "gpus", emulator.parse_gpus("1x64MiB"))
    emulator.set_driver_version(tmp_path / "gpus", version)
    worker = Worker(emulator.environment(tmp_path / "gpus", emulator.build()))
    try:
        worker.do(
            "import pathlib\nfrom kiwi_core.daemon.storage import chosen\n"
            "from kiwi_core.states import Storage\n"
            f"here = pathlib.Path({str(tmp_path)!r})\n"
            "custom, driver = (chosen(one, here) for one in (Storage.CUSTOM, Storage.DRIVER))"
        )
        assert worker.get("[custom.wanted, driver.wanted]") == [wanted, False]
        assert worker.get("driver.note") == ""
        note = worker.get("custom.note")
        assert ("unproven" in note) == wanted
        assert wanted or "13.0" in note
    finally:
        worker.close()
