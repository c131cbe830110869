"""Tests that a daemon whose socket directory is removed is found again and stays the only one."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from installed import (
    KIWI,
    MALLORY,
    as_user,
    daemons_of,
    environment,
    eventually,
    kiwi,
    needs_users,
    remove_at_once,
    short,
    started,
    status,
)

__all__ = ["short"]

MIB = 1 << 20

HOLD = """
import sys, time
from cuda.bindings import driver as cuda
def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) > 1 else None
ok(cuda.cuInit(0))
context = ok(cuda.cuDevicePrimaryCtxRetain(ok(cuda.cuDeviceGet(0))))
ok(cuda.cuCtxSetCurrent(context))
memory = ok(cuda.cuMemAlloc(int(sys.argv[1])))
print("has", flush=True)
time.sleep(float(sys.argv[2]))
ok(cuda.cuMemFree(memory))
"""
"""A program that takes the given bytes of GPU memory for the given seconds."""


AT_REST = ("idle", "running", "suspended", "paged-out")


def started_by_itself(short: Path, *more: str) -> dict[str, str]:
    """Return the environment of a user whose first program starts the daemon."""
    args = " ".join(["--emulate", "1x64MiB", *more])
    return environment(KIWI_SOCKET_DIR=str(short / "s"), KIWI_DAEMON_ARGS=args)


def run(env: dict[str, str], *command: str) -> None:
    done = kiwi("run", "--require", "--", *command, env=env)
    assert done.returncode == 0, done.stderr


def the_gpu(short: Path) -> Any:
    (gpu,) = eventually(lambda: status(short / "s"), "the daemon answers")
    return gpu


def test_it_is_the_same_daemon_that_is_found_again(short: Path) -> None:
    env = started_by_itself(short, "--tq", "7")
    run(env, "/bin/true")
    before = the_gpu(short)
    remove_at_once(short / "s")
    run(env, sys.executable, "-c", HOLD, str(32 * MIB), "0")
    after = the_gpu(short)
    assert after["daemon_pid"] == before["daemon_pid"]
    assert after["scheduler"]["tq_s"] == 7
    assert (short / "s" / "state").is_dir(), "what it needs after a crash is on disk again"
    eventually(lambda: len(daemons_of(short)) == 2, "one supervisor and one daemon")


def test_it_comes_back_without_being_asked_for(short: Path) -> None:
    env = environment(KIWI_SOCKET_DIR=str(short / "s"))
    command = [str(KIWI), "daemon", "--emulate", "1x64MiB", "--socket-dir", str(short / "s")]
    with started(command, short / "log", env) as process:
        before = the_gpu(short)
        for what in ("the directory", "the socket", "the lock"):
            if what == "the directory":
                remove_at_once(short / "s")
            else:
                end = ".sock" if what == "the socket" else ".lock"
                (short / "s" / (before["uuid"] + end)).unlink()
            assert the_gpu(short)["daemon_pid"] == before["daemon_pid"], what
        mode = (short / "s").stat().st_mode & 0o777
        assert mode == (0o755 if os.getuid() == 0 else 0o700)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not list((short / "s").glob("*.sock")), "and goes with it"


def test_what_it_needs_after_a_crash_comes_back_alone(short: Path) -> None:
    """A removal that goes file by file may meet the state directory after the daemon has made its
    address again; then the socket is there, and only the state is missing."""
    env = environment(KIWI_SOCKET_DIR=str(short / "s"))
    command = [str(KIWI), "daemon", "--emulate", "1x64MiB", "--socket-dir", str(short / "s")]
    with started(command, short / "log", env):
        gpu = the_gpu(short)
        remove_at_once(short / "s" / "state")
        roster = short / "s" / "state" / f"{gpu['uuid']}.roster"
        eventually(roster.exists, "the roster is on disk again")
        run(env, "/bin/true")
        after = the_gpu(short)
        assert after["daemon_pid"] == gpu["daemon_pid"]
        assert after["errors"] == []


def test_two_programs_that_do_not_fit_share_one_gpu(short: Path) -> None:
    """One has memory when the directory disappears; the other one comes after it."""
    env = started_by_itself(short)
    program = [str(KIWI), "run", "--require", "--", sys.executable, "-c", HOLD]
    log = short / "log"
    with started([*program, str(20 * MIB), "600"], log, env):
        eventually(lambda: b"has" in log.read_bytes(), "the first one has memory")
        remove_at_once(short / "s")
        run(env, sys.executable, "-c", HOLD, str(16 * MIB), "0")
        eventually(
            lambda: [one["state"] in AT_REST for one in the_gpu(short)["sessions"]] == [True],
            "the first one alone, whose memory does not move any more",
        )


def test_after_that_it_can_crash_and_loses_nobody(short: Path) -> None:
    env = started_by_itself(short)
    program = [str(KIWI), "run", "--require", "--", sys.executable, "-c", HOLD, str(20 * MIB)]
    log = short / "log"
    with started([*program, "600"], log, env):
        eventually(lambda: b"has" in log.read_bytes(), "it has memory")
        before = the_gpu(short)
        remove_at_once(short / "s")
        eventually(lambda: status(short / "s"), "it is found again")
        os.kill(before["daemon_pid"], signal.SIGKILL)
        eventually(
            lambda: any(
                gpu["daemon_pid"] != before["daemon_pid"] and len(gpu["sessions"]) == 1
                for gpu in status(short / "s")
            ),
            "the next daemon has the session",
        )


def test_many_that_come_at_once_start_no_second_one(short: Path) -> None:
    env = started_by_itself(short)
    run(env, "/bin/true")
    before = the_gpu(short)
    for _ in range(3):
        remove_at_once(short / "s")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: run(env, "/bin/true"), range(4)))
    assert the_gpu(short)["daemon_pid"] == before["daemon_pid"]
    eventually(lambda: len(daemons_of(short)) == 2, "one supervisor and one daemon")


def abstract_names(pid: int) -> list[str]:
    """Return the abstract sockets on which process ``pid`` listens, from the system's list."""
    inodes = {
        os.readlink(entry).removeprefix("socket:[").rstrip("]")
        for entry in Path(f"/proc/{pid}/fd").iterdir()
    }
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [words[7] for words in lines if len(words) > 7 and words[6] in inodes]


TAKE = """
import os, socket, sys, time
sock = socket.socket(socket.AF_UNIX)
sock.bind("\\0" + sys.argv[1][1:])
if sys.argv[2] == "listens": sock.listen(0)
print("ready", flush=True)
time.sleep(600)
"""


@needs_users
@pytest.mark.parametrize("how", ["listens", "is silent"])
def test_a_stranger_cannot_keep_the_daemon_from_starting(short: Path, how: str) -> None:
    """Anybody can take an abstract name first."""
    env = environment(KIWI_SOCKET_DIR=str(short / "s"))
    command = [str(KIWI), "daemon", "--emulate", "1x64MiB", "--socket-dir", str(short / "s")]
    with started(command, short / "log", env):
        gpu = the_gpu(short)
        (name,) = (n for n in abstract_names(gpu["daemon_pid"]) if n.startswith("@kiwi"))
    log = short / "stranger"
    taker = [*as_user(MALLORY), sys.executable, "-c", TAKE, name, how]
    with started(taker, log, environment()):
        eventually(lambda: b"ready" in log.read_bytes(), "the stranger has the name")
        with started(command, short / "log", env):
            assert the_gpu(short)["uuid"] == gpu["uuid"]
