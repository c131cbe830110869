"""Tests that each GPU and user has one daemon, whatever the socket directories are."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import threading
import uuid
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from patience import PATIENCE_S

from kiwi_core.daemon import __main__ as process
from kiwi_core.daemon.base import claim as claims
from kiwi_core.daemon.base.claim import GpuClaim
from kiwi_core.daemon.base.sockets import OneDaemonLock, alone, already_running
from kiwi_core.daemon.base.tasks import endless
from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE, THERE = Path("/run/user/1/kiwi/GPU.sock"), Path("/tmp/kiwi-1/GPU.sock")


@pytest.fixture
def gpu() -> str:
    """Return a GPU that no other test uses, since names apply to the whole machine."""
    return f"GPU-{uuid.uuid4()}"


def name(gpu: str) -> str:
    return GpuClaim(gpu, HERE)._name


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a daemon that starts wait for the answer of the other one, however busy the machine is:
    it asks once."""
    monkeypatch.setattr(claims, "ASK_WITHIN_S", PATIENCE_S)


async def asked_by(second: GpuClaim) -> bool:
    return await asyncio.to_thread(second.try_take)


def test_the_first_has_it_and_says_where_it_is(gpu: str, patient: None) -> None:
    asyncio.run(_first_and_second(gpu))


async def _first_and_second(gpu: str) -> None:
    first, second, other = GpuClaim(gpu, HERE), GpuClaim(gpu, THERE), GpuClaim(f"{gpu}0", THERE)
    assert first.try_take()
    assert first.try_take()
    reached = True
    first.serve(lambda: reached)
    assert not await asked_by(second)
    assert (second.daemon_pid, second.daemon_path) == (os.getpid(), str(HERE))
    error = already_running(OneDaemonLock(THERE), second, THERE)
    assert f"pid {os.getpid()}" in error.message
    assert str(HERE) in error.message
    assert f"KIWI_SOCKET_DIR={HERE.parent}" in error.remedy
    reached = False  # the daemon leaves
    assert not await asked_by(second)
    assert second.daemon_path == ""
    assert other.try_take(), "another GPU is free"
    other.close()
    first.close()
    assert await asked_by(second)
    second.close()


def test_a_daemon_that_starts_elsewhere_gives_up_and_says_why(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    monkeypatch.setattr("kiwi_core.daemon.base.sockets.RUNS_AFTER_S", 0.2)
    asyncio.run(_elsewhere(gpu, tmp_path))


async def _elsewhere(gpu: str, tmp_path: Path) -> None:
    first = GpuClaim(gpu, HERE)
    assert first.try_take()
    first.serve(lambda: True)
    path = tmp_path / "GPU.sock"
    lock = OneDaemonLock(tmp_path / "GPU.lock")

    def start() -> bool:
        return asyncio.run(alone(GpuClaim(gpu, path), lock, path, asyncio.Event()))

    with pytest.raises(CallerError, match="already running") as caught:
        await asyncio.to_thread(start)
    assert str(HERE) in caught.value.message
    assert lock.try_acquire(), "and has not locked the directory, which the first may want"
    first.close()


def test_it_is_free_when_its_daemon_has_ended(gpu: str) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if GpuClaim(gpu, HERE).try_take() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    claim = GpuClaim(gpu, HERE)
    assert claim.try_take()
    claim.close()


def test_a_name_where_nobody_listens_is_no_daemons(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SILENT_ASKS", 3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(name(gpu))
        claim = GpuClaim(gpu, HERE)
        assert [claim.try_take() for _ in range(3)] == [False, False, True]


def test_a_name_where_nobody_answers_is_not_believed_for_ever(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a stranger keeps the queue of connections full."""
    monkeypatch.setattr(claims, "SILENT_ASKS", 3)
    monkeypatch.setattr(claims, "ASK_WITHIN_S", 0.1)
    with full_queue(gpu):
        claim = GpuClaim(gpu, HERE)
        assert [claim.try_take() for _ in range(3)] == [False, False, True]


def test_a_wait_for_an_answer_that_is_interrupted_is_no_answer(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes an interrupted ``connect`` for a success. Then the name had an owner without a
    user, and a second daemon took the GPU."""
    monkeypatch.setattr(claims, "SILENT_ASKS", 3)
    monkeypatch.setattr(claims, "ASK_WITHIN_S", PATIENCE_S)
    with full_queue(gpu), interrupted():
        claim = GpuClaim(gpu, HERE)
        assert [claim.try_take() for _ in range(3)] == [False, False, True]


@contextmanager
def full_queue(gpu: str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as queued:
        full.bind(name(gpu))
        full.listen(0)
        queued.connect(name(gpu))
        yield


@contextmanager
def interrupted() -> Iterator[None]:
    """Interrupt the system calls of this thread again and again."""
    over, thread = threading.Event(), threading.get_ident()

    def interrupt() -> None:
        while not over.wait(0.01):
            signal.pthread_kill(thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        yield
    finally:
        over.set()
        interrupter.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_full_queue_is_not_taken_at_once(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every local user can fill the queue, so the daemon does other work between two attempts."""
    monkeypatch.setattr(claims, "PAUSE_S", 3600.0)
    asyncio.run(_full_queue(gpu))


async def _full_queue(gpu: str) -> None:
    first = GpuClaim(gpu, HERE)
    assert first.try_take()
    answered = 0

    def asked() -> bool:
        nonlocal answered
        answered += 1
        return True

    with ExitStack() as crowd:
        for _ in range(claims.BACKLOG):
            crowd.enter_context(connected(gpu))
        first.serve(asked)
        for _ in range(3 * claims.BACKLOG):
            await asyncio.sleep(0)
        assert answered == claims.TAKEN_MAX
    first.close()


@contextmanager
def connected(gpu: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(30)
        one.connect(name(gpu))
        yield one


@pytest.mark.parametrize("blocking", [True, False])
def test_connecting_in_a_loop_does_not_delay_the_answer_to_a_daemon(
    gpu: str, *, blocking: bool
) -> None:
    first = GpuClaim(gpu, HERE)
    assert first.try_take()
    flooder = os.fork()
    if flooder == 0:
        _flood(gpu, blocking=blocking)
    try:
        asyncio.run(_asked_in_a_flood(first, gpu))
    finally:
        os.kill(flooder, signal.SIGKILL)
        os.waitpid(flooder, 0)


def _flood(gpu: str, *, blocking: bool) -> None:
    try:
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as one:
                one.setblocking(blocking)
                one.connect(name(gpu))
    finally:
        os._exit(1)


async def _asked_in_a_flood(first: GpuClaim, gpu: str) -> None:
    came = 0

    def asked() -> bool:
        nonlocal came
        came += 1
        return True

    first.serve(asked)
    while came < 10 * claims.BACKLOG:  # without a flood, the test's time limit ends this loop
        await asyncio.sleep(0.01)
    second = GpuClaim(gpu, THERE)
    while not second.daemon_path:
        assert not await asked_by(second), "a second daemon for the GPU"
    assert second.daemon_path == str(HERE)
    first.close()


def test_a_connection_without_a_free_descriptor_is_answered_later(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(_no_descriptor(gpu, monkeypatch))


async def _no_descriptor(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, errors, opened = asyncio.get_running_loop(), [], 0
    loop.set_exception_handler(lambda _loop, context: errors.append(context))
    first = GpuClaim(gpu, HERE)
    assert first.try_take()
    again = claims._Answers._open

    def count(answers: Any) -> None:
        nonlocal opened
        opened += 1
        again(answers)

    monkeypatch.setattr(claims._Answers, "_open", count)
    with connected(gpu) as waits:
        first.serve(lambda: True)
        with no_descriptors():
            while opened < 5:
                await asyncio.sleep(0.01)
        waits.settimeout(30)
        said = await asyncio.to_thread(waits.recv, 4096)
    assert said == os.fsencode(HERE) + b"\n"
    assert not errors
    first.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            socket.socket()
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the statuses with which the daemon's process would have ended. (A forked child of a
    process with threads may stand still: one of them may have held a lock of the log.)"""
    statuses: list[int] = []
    monkeypatch.setattr(process.os, "_exit", statuses.append)
    return statuses


@pytest.mark.parametrize(
    ("error", "statuses"),
    [(OSError(errno.EMFILE, "Too many open files"), []), (OSError(errno.EPIPE, "broken"), [70]),
     (ValueError("wrong"), [70])],
)  # fmt: skip
def test_only_an_error_that_says_something_of_the_daemon_ends_it(
    ends: list[int], error: Exception, statuses: list[int]
) -> None:
    async def fail() -> None:
        process._crash(asyncio.get_running_loop(), {"message": "failed", "exception": error})

    asyncio.run(fail())
    assert ends == statuses


def test_a_task_that_must_not_end_ends_the_daemon_whatever_the_cause(ends: list[int]) -> None:
    async def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def run(handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]) -> None:
        asyncio.get_running_loop().set_exception_handler(handler)
        task = endless(fail(), "observing")
        await asyncio.wait([task])
        await asyncio.sleep(0)

    said: list[str] = []
    asyncio.run(run(lambda _loop, context: said.append(context["message"])))
    assert said == ["a task of the daemon ended: observing"]
    asyncio.run(run(process._crash))
    assert ends == [70]
