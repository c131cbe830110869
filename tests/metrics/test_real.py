"""Tests of real daemons on emulated GPUs with real sessions, scraped over HTTP."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from checks import unharmed
from daemon import PATIENCE_S, Daemon, running_daemon, wait_until
from samples import Scrape, scrape
from session_program import MIB, SessionProgram

from kiwi_core.client import Client
from kiwi_core.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(180)

ROUNDING_S = 1e-6
"""Tolerance for sums of the same numbers in different order."""


def url_of(daemon: Daemon) -> str:
    said = re.search(r"metrics at (http://\S+)", daemon.log())
    assert said, daemon.log()
    return said[1]


def until(daemon: Daemon, condition: Callable[[Scrape], Any], what: str) -> Scrape:
    """Return the first scrape that satisfies ``condition``. A daemon that has not answered within
    the listener's limit has no sample but ``kiwi_up``."""
    last: list[Scrape] = []

    def look() -> Scrape | None:
        last[:] = [scrape(url_of(daemon))]
        with suppress(AssertionError):  # a sample that is not there
            return last[0] if condition(last[0]) else None
        return None

    try:
        found: Scrape = wait_until(look, what)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{last[0].text if last else ''}") from None
    return found


def test_two_sessions_that_do_not_fit_together() -> None:
    with running_daemon("1x256MiB", "--metrics", ":0", "--tq", "0.3") as daemon:
        quiet = until(daemon, lambda s: s("kiwi_up") == 1, "the daemon answers")
        assert quiet("kiwi_memory_total_bytes") == 256 * MIB
        assert quiet("kiwi_lease_held_seconds_total") == 0
        first = SessionProgram(daemon, 160, seed=1, name="secret-name.ipynb")
        try:
            second = SessionProgram(daemon, 160, seed=2, name="secret-name.ipynb")
            try:
                first.start_burst()
                second.start_burst()
                seen = until(
                    daemon,
                    lambda s: (
                        s("kiwi_lease_suspensions_total") >= 2
                        and s("kiwi_swaps_total", direction="in") >= 2
                    ),
                    "both are suspended and come back",
                )
                check_while_they_share(daemon, seen)
                first.stop_burst()
                second.stop_burst()
            finally:
                second.close()
        finally:
            first.close()
        after = until(
            daemon,
            lambda s: s("kiwi_lease_holders") == 0 and s("kiwi_sessions", state="running") == 0,
            "both have left",
        )
        waits = "kiwi_lease_wait_seconds_count"
        # Two takes and two bursts were requested and granted.
        assert after("kiwi_lease_grants_total", after="request") == 4
        assert after(waits, after="request") == 4
        assert after(waits, after="suspension") == after(
            "kiwi_lease_grants_total", after="suspension"
        )
        daemon.stop()
        unharmed(daemon)


def check_while_they_share(daemon: Daemon, seen: Scrape) -> None:
    status = daemon.status()
    assert "secret-name" not in seen.text
    assert str(status.sessions[0].pid) not in re.findall(r'"(\d+)"', seen.text)
    assert seen("kiwi_serialised") == 1
    assert seen("kiwi_time_quantum_seconds") == pytest.approx(0.3)
    held_s = seen("kiwi_lease_held_seconds_total")
    assert 0 < held_s <= sum(session.held_s for session in status.sessions) + ROUNDING_S
    assert held_s <= seen("kiwi_lease_session_held_seconds_total") + ROUNDING_S
    assert seen("kiwi_swap_bytes_total", direction="out") >= 2 * 160 * MIB
    assert seen("kiwi_swap_seconds_total", direction="out") > 0
    assert seen("kiwi_swap_last_bytes_per_second", direction="in") > 0
    waited_s = sum(
        seen("kiwi_lease_wait_seconds_sum", after=after) for after in ("request", "suspension")
    )
    assert 0 < waited_s <= sum(session.waited_s for session in status.sessions) + ROUNDING_S
    total, free, resident, outside = (
        seen(f"kiwi_memory_{part}_bytes") for part in ("total", "free", "resident", "outside")
    )
    assert free == max(0, total - resident - outside)


def test_two_gpus_and_one_whose_daemon_hangs() -> None:
    with running_daemon("2x64MiB", "--metrics", ":0") as daemon:
        clients = [Client(path, reconnect=False) for path in daemon.sockets()]
        try:
            served = [client.connect() for client in clients]
            for client in clients:
                client.acquire(timeout_s=PATIENCE_S)
            both = until(
                daemon,
                lambda s: s("kiwi_up", index="0") == s("kiwi_up", index="1") == 1,
                "both answer",
            )
            for welcome in served:
                gpu = {"gpu": welcome.gpu_uuid, "index": str(welcome.gpu_index)}
                assert both("kiwi_lease_holders", **gpu) == 1
                assert both("kiwi_build_info", emulated="true", **gpu) == 1
            hung = psutil.Process(daemon.status(1).daemon_pid)
            hung.send_signal(signal.SIGSTOP)
            try:
                down = until(
                    daemon,
                    lambda s: (s("kiwi_up", index="0"), s("kiwi_up", index="1")) == (1, 0),
                    "it hangs, and the other one answers",
                )
                assert down("kiwi_lease_holders", index="0") == 1
            finally:
                hung.send_signal(signal.SIGCONT)
            until(daemon, lambda s: s("kiwi_up", index="1") == 1, "it is back")
        finally:
            for client in clients:
                client.close()


def test_a_daemon_that_is_killed_counts_from_zero() -> None:
    with running_daemon("1x64MiB", "--metrics", ":0") as daemon:
        with Client(daemon.sockets()[0], reconnect=False) as client:
            client.connect()
            client.acquire(timeout_s=PATIENCE_S)
            client.end_burst()
            until(daemon, lambda s: s("kiwi_lease_grants_total", after="request") == 1, "granted")
            killed_s = time.monotonic()
            daemon.kill_child()
        anew = until(
            daemon,
            lambda s: s("kiwi_up") == 1 and s("kiwi_lease_grants_total", after="request") == 0,
            "a new daemon answers",
        )
        # By the roster the session may be in a burst: then it has the GPU until it is missed.
        assert anew("kiwi_lease_held_seconds_total") <= time.monotonic() - killed_s


def test_hints_are_counted_by_what_came_of_them() -> None:
    with running_daemon("1x128MiB", "--metrics", ":0") as daemon:
        program = SessionProgram(daemon, 32)
        try:
            session = daemon.wait_state(program.pid, "idle").id
            with Client(daemon.sockets()[0], role=Role.OBSERVER, reconnect=False) as client:
                client.connect()
                begun, why = client.bring_back(session)
                assert not begun
                assert why
                client.release(session)
                daemon.wait_state(program.pid, "paged-out")
                assert client.bring_back(session) == (True, "")
                daemon.wait_state(program.pid, "idle")
            seen = until(daemon, lambda s: s("kiwi_up") == 1, "the daemon answers")
        finally:
            program.close()
        assert seen("kiwi_bring_back_hints_begun_total") == 1
        assert seen("kiwi_bring_back_hints_declined_total") == 1
        assert seen("kiwi_swaps_total", direction="in") == 1


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    """A daemon with metrics, for tests that leave it as they found it."""
    with running_daemon("1x64MiB", "--metrics", ":0") as daemon:
        yield daemon


def test_what_breaks_the_protocol_is_counted_by_its_code(served: Daemon) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(served.sockets()[0]))
        rude.sendall(b"what?\n")
        assert b"malformed" in rude.recv(4096)
    seen = until(served, lambda s: "malformed" in s.text, "it is counted")
    assert seen("kiwi_connections_refused_total", code="malformed") == 1


def test_without_the_option_nobody_listens() -> None:
    with running_daemon("1x64MiB") as daemon:
        assert daemon.process is not None
        family = [psutil.Process(daemon.process.pid)]
        family += family[0].children(recursive=True)
        for process in family:
            with suppress(psutil.NoSuchProcess):  # a mover that was not needed
                assert not process.net_connections(kind="inet")
        assert "metrics" not in daemon.log()


def test_a_port_in_use_ends_the_command_before_anything_starts(
    tmp_path: Any, served: Daemon
) -> None:
    port = re.search(r":(\d+)/", url_of(served))
    assert port
    ended = subprocess.run(
        [sys.executable, "-m", "kiwi_core.cli", "daemon", "--emulate", "1x64MiB",
         "--socket-dir", str(tmp_path / "s"), "--metrics", f":{port[1]}"],
        capture_output=True, text=True, timeout=PATIENCE_S * 2, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ended.returncode == 1
    assert f"Cannot serve metrics at 127.0.0.1:{port[1]}" in ended.stderr
    assert "name another port" in ended.stderr
    assert "ready" not in ended.stdout


def test_it_says_when_other_machines_can_read(served: Daemon) -> None:
    with running_daemon("1x64MiB", "--metrics", "0.0.0.0:0") as daemon:
        assert "other machines can read the metrics" in daemon.log()
    assert "other machines" not in served.log()
