"""Tests of which GPU a program is placed on, from made-up statuses and beside real daemons."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest
from daemon import PATIENCE_S, Daemon, running_daemon, wait_until
from leftovers import nothing_left
from made_up_status import gpu, session

from kiwi_core.client import Client, discover, gpu_placement
from kiwi_core.config import PLACING_LOCK
from kiwi_core.errors import PeerError
from kiwi_core.states import SessionState
from kiwi_core.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus


def best(*gpus: GpuStatus) -> int:
    return min(gpus, key=gpu_placement.rank).index


def test_the_shortest_wait_wins() -> None:
    assert best(gpu(0, wait_s=5.0), gpu(1, session("a"), session("b"), wait_s=0.0)) == 1
    assert best(gpu(0, wait_s=5.0), gpu(1, wait_s=25.0)) == 0


def test_a_gpu_of_which_nobody_can_tell_is_the_last_resort() -> None:
    assert best(gpu(0, wait_s=None), gpu(1, wait_s=900.0)) == 1


def test_equal_waits_are_decided_by_sessions_then_memory_then_index() -> None:
    little = session("little", resident_bytes=GIB)
    out = {"state": SessionState.PAGED_OUT}
    crowded = gpu(0, session("a", **out), session("b", **out), wait_s=0.0)
    assert best(crowded, gpu(1, little, wait_s=0.25)) == 1
    assert best(gpu(0, wait_s=0.0, expected=1), gpu(1, wait_s=0.0)) == 1
    assert best(gpu(0, wait_s=0.0, outside_bytes=GIB), gpu(1, wait_s=0.0)) == 1
    assert best(gpu(1, wait_s=0.0), gpu(0, wait_s=0.0)) == 0


@pytest.mark.parametrize(
    ("emulated", "index"), [((False, True), 0), ((True, True), 1), ((False, False), 1)], ids=str
)
def test_an_emulated_gpu_does_not_hide_a_real_one(emulated: tuple[bool, bool], index: int) -> None:
    first = gpu(0, wait_s=9.0, emulated=emulated[0])
    second = gpu(1, wait_s=0.0, emulated=emulated[1])
    assert best(*gpu_placement._usable([first, second])) == index


# --- beside real daemons ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with (
        pytest.MonkeyPatch.context() as patch,
        nothing_left(patch),
        running_daemon("2x256MiB") as daemon,
    ):
        yield daemon


KEYS = (*"abcd", *(f"k{n}" for n in range(8)))
"""Keys that the tests use."""


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """Provide daemons of two GPUs that have no session and expect none."""
    yield shared
    for index in (0, 1):
        uuid = shared.status(index).uuid
        for key in KEYS:
            gpu_placement.expect(shared.directory / f"{uuid}.sock", key, 0)

        def alone(index: int = index) -> bool:
            status = shared.status(index)
            return not status.sessions and not status.expected

        wait_until(alone, "all have left")


def placed(daemon: Daemon, key: str) -> int:
    chosen = gpu_placement.place(discover(daemon.directory), key, within_s=PATIENCE_S)
    assert chosen is not None
    return chosen.index


def watching(daemon: Daemon, index: int) -> Client:
    return Client(daemon.directory / f"{daemon.status(index).uuid}.sock", name=f"on {index}")


def test_eight_programs_that_start_at_once_spread(daemon: Daemon) -> None:
    """Each asks from its own process, as the servers of different users do."""
    script = (
        "import sys; from pathlib import Path;"
        "from kiwi_core.client import discover, gpu_placement;"
        "sys.stdin.read(1);"
        "gpu = gpu_placement.place(discover(Path(sys.argv[1])), sys.argv[2], within_s=60);"
        "print(gpu.index, flush=True);"
        "sys.stdin.read()"
    )
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(daemon.directory), f"k{n}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for n in range(8)
    ]  # fmt: skip
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("x")
        program.stdin.flush()
    with ThreadPoolExecutor(8) as pool:
        told = list(
            pool.map(lambda program: program.stdout and program.stdout.readline(), programs)
        )
    assert Counter(told) == {"0\n": 4, "1\n": 4}
    assert [daemon.status(index).expected for index in (0, 1)] == [4, 4]
    for program in programs:
        program.communicate(timeout=PATIENCE_S)


def test_a_session_that_joins_is_not_expected_any_more(daemon: Daemon) -> None:
    assert [placed(daemon, key) for key in "abc"] == [0, 1, 0]
    client = Client(
        daemon.directory / f"{daemon.status(0).uuid}.sock", name="a.ipynb", kernel_id="a"
    )
    with client:
        client.connect()
        assert daemon.status(0).expected == 1
        assert placed(daemon, "d") == 1


def test_an_expectation_can_be_taken_back_and_renewed(daemon: Daemon) -> None:
    path = daemon.directory / f"{daemon.status(0).uuid}.sock"
    gpu_placement.expect(path, "a", 60)
    gpu_placement.expect(path, "a", 60)
    assert daemon.status(0).expected == 1
    gpu_placement.expect(path, "a", 0)
    assert daemon.status(0).expected == 0


def test_an_expectation_lapses(daemon: Daemon) -> None:
    path = daemon.directory / f"{daemon.status(0).uuid}.sock"
    gpu_placement.expect(path, "a", 0.2)
    wait_until(lambda: daemon.status(0).expected == 0, "the end of the expectation")


ANNOUNCER = """
import subprocess, sys
from pathlib import Path
from kiwi_core.client import gpu_placement
socket = Path(sys.argv[1])
gpu_placement.expect(socket, "a", 60)
input()
child = subprocess.Popen(["sleep", "1000"])
gpu_placement.expect(socket, "a", 60, pid=child.pid, name="a.ipynb")
print(child.pid, flush=True)
input()
"""


@pytest.fixture
def announcer(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    """Start a server that has announced a program on GPU 0, and starts it on a line."""
    path = daemon.directory / f"{daemon.status(0).uuid}.sock"
    with subprocess.Popen(
        [sys.executable, "-c", ANNOUNCER, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        wait_until(lambda: daemon.status(0).expected == 1, "the announcement")
        yield process
        process.kill()


def test_what_an_announcer_has_not_started_ends_with_it(
    daemon: Daemon, announcer: subprocess.Popen[str]
) -> None:
    announcer.kill()
    wait_until(lambda: daemon.status(0).expected == 0, "the end of the expectation")


def test_a_program_that_runs_is_expected_until_it_ends(
    daemon: Daemon, announcer: subprocess.Popen[str]
) -> None:
    assert announcer.stdin is not None
    assert announcer.stdout is not None
    announcer.stdin.write("\n")
    announcer.stdin.flush()
    program = psutil.Process(int(announcer.stdout.readline()))
    announcer.kill()
    announcer.wait()
    assert daemon.status(0).expected == 1, "it lives without the server that started it"
    program.kill()
    wait_until(lambda: daemon.status(0).expected == 0, "the end of the expectation")


def test_a_program_that_has_ended_already_is_not_expected(daemon: Daemon) -> None:
    path = daemon.directory / f"{daemon.status(0).uuid}.sock"
    program = subprocess.Popen(["true"])
    program.wait()
    gpu_placement.expect(path, "a", 60)
    gpu_placement.expect(path, "a", 60, pid=program.pid)
    assert daemon.status(0).expected == 0


def test_a_program_that_joined_before_it_was_introduced_is_not_expected(daemon: Daemon) -> None:
    path = daemon.directory / f"{daemon.status(0).uuid}.sock"
    with Client(path, name="a.ipynb", kernel_id="a") as client:
        client.connect()
        gpu_placement.expect(path, "a", 60, pid=os.getpid())
        assert daemon.status(0).expected == 0


def test_a_time_that_is_none_is_refused(daemon: Daemon) -> None:
    with watching(daemon, 0) as client:
        client.connect()
        for for_s in (-1.0, 1e9):
            with pytest.raises(PeerError, match="cannot be expected"):
                client.expect("a", for_s)


def test_a_busy_gpu_is_avoided(daemon: Daemon) -> None:
    with watching(daemon, 0) as client:
        client.connect()
        client.acquire(timeout_s=PATIENCE_S)
        wait_s = daemon.status(0).newcomer_wait_s
        assert wait_s is not None
        assert wait_s > 1.0
        assert placed(daemon, "a") == 1
        client.end_burst()


def test_a_program_without_the_lock_is_placed_all_the_same(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = gpu_placement._lock
    monkeypatch.setattr(
        gpu_placement, "_lock", lambda place, _until_s: take(place, time.monotonic() + 0.1)
    )
    lock = os.open(daemon.directory / PLACING_LOCK, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        placed(daemon, "a")
    finally:
        os.close(lock)


def test_one_gpu_is_no_choice(tmp_path: Path) -> None:
    assert gpu_placement.place(discover(tmp_path / "nowhere"), "a") is None


def test_a_daemon_that_hangs_holds_up_nobody(daemon: Daemon) -> None:
    """It accepts the connection and sends nothing, like a stopped daemon."""
    path = daemon.directory / "GPU-zzz.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        chosen = gpu_placement.place(discover(daemon.directory), "a", within_s=10.0)
        path.unlink()
        assert chosen is not None
        assert chosen.index == 0
