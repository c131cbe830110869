"""Tests that other users and root are served although one user takes everything they can.

The tests use the installed ``kiwi`` with a root daemon; ``setpriv`` plays the users.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from patience import wait_until
from unprivileged import (
    ALICE,
    BOB,
    KIWI,
    PATIENCE_S,
    RootDaemon,
    as_user,
    bursts,
    crowd,
    needs_other_users,
    root_daemon,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

FEW_DESCRIPTORS = 2000
"""With so few, the daemon's limits are about a fifth of the usual ones, and reached quickly."""

QUANTUM_S = "3600"
"""No burst is suspended: a suspended one stays in the queue, and its place goes to another one."""

MORE_THAN_A_SHARE = 320
FULL = "too-many-sessions"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RootDaemon]:
    needs_other_users()
    with root_daemon("--tq", QUANTUM_S, descriptors=FEW_DESCRIPTORS) as one:
        yield one
        assert one.process.poll() is None, one.log()
        assert "crashed" not in one.log()


@pytest.fixture(autouse=True)
def nobody_left(daemon: RootDaemon) -> Iterator[None]:
    yield
    wait_until(lambda: not daemon.status()["sessions"], "all sessions gone")


def test_one_user_takes_sessions_and_another_still_gets_the_gpu(daemon: RootDaemon) -> None:
    with crowd(daemon, "session", MORE_THAN_A_SHARE) as said:
        assert said.keys() == {"welcome", FULL}
        assert said["welcome"] < MORE_THAN_A_SHARE
        seen = bursts(daemon, 5, uid=BOB)
        assert len(seen["grants_s"]) == 5
        assert len(daemon.status()["sessions"]) >= said["welcome"]
        assert daemon.refused("sessions") >= said[FULL]


def test_many_users_take_all_they_can_and_a_newcomer_still_gets_the_gpu(daemon: RootDaemon) -> None:
    from contextlib import ExitStack

    with ExitStack() as stack:
        counts = [
            stack.enter_context(crowd(daemon, "session", MORE_THAN_A_SHARE, uid=uid))["welcome"]
            for uid in range(54400, 54404)
        ]
        assert counts == sorted(counts, reverse=True), "each gets a part of what is left"
        assert counts[-1] > 0
        assert len(bursts(daemon, 5, uid=BOB)["grants_s"]) == 5
        assert daemon.status()["sessions"], "root's own reserve"


def test_one_user_takes_connections_and_others_still_connect(daemon: RootDaemon) -> None:
    with crowd(daemon, "many", 1200) as said:
        assert said.keys() == {"welcome", "too-many-connections"}
        assert len(bursts(daemon, 5, uid=BOB)["grants_s"]) == 5
        assert daemon.status(BOB)
        assert daemon.status()
        assert daemon.refused("connections") >= said["too-many-connections"]


def test_programs_with_the_library_are_shared_too(daemon: RootDaemon) -> None:
    with crowd(daemon, "pager", MORE_THAN_A_SHARE) as said:
        assert said.keys() == {"welcome", FULL}
        assert len(bursts(daemon, 3, uid=BOB)["grants_s"]) == 3


def test_the_queue_is_shared_and_who_waits_outside_it_gets_in(daemon: RootDaemon) -> None:
    """All of one user's hundred sessions want the GPU, and each keeps it until it is killed."""
    share = 32
    with crowd(daemon, "session", 100, {"type": "acquire", "burst": 1}) as said:
        assert said == {"welcome": 100}
        wait_until(lambda: daemon.status()["holders"], "somebody has the GPU")
        wait_until(lambda: len(daemon.status()["queue"]) == share, "a queue as long as the share")
        holder = daemon.status()["holders"][0]
        (pid,) = [s["pid"] for s in daemon.status()["sessions"] if s["id"] == holder]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: daemon.status()["holders"] not in ([holder], []), "the next one")
        wait_until(lambda: len(daemon.status()["queue"]) == share, "another one is in the queue")


def test_a_program_waits_for_a_place_and_does_not_run_without_kiwi(daemon: RootDaemon) -> None:
    """``kiwi run`` of a user whose share is used up says so, waits, and starts when there is
    room."""
    with crowd(daemon, "session", MORE_THAN_A_SHARE, uid=ALICE) as said:
        assert said[FULL]
        process = subprocess.Popen(
            [*as_user(ALICE), str(KIWI), "run", "--", "/bin/echo", "it runs"],
            env={**daemon.env, "HOME": "/nonexistent"}, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stderr.readline()
        assert "waits for a place" in first, first
        time.sleep(2.5)  # two more attempts: the program must not start by itself
        assert process.poll() is None
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "it runs\n"), err
    said = (first + err).replace("without Kiwi's gate", "")  # this user could not compile the gate
    assert "without Kiwi" not in said
