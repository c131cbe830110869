"""One daemon per GPU and user, whatever their socket directories are."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from pathlib import Path

import pytest

from kiwi_core.daemon import claim as claims
from kiwi_core.daemon.claim import Claim
from kiwi_core.daemon.places import OneDaemonLock, alone, already_running
from kiwi_core.errors import CallerError

HERE, THERE = Path("/run/user/1/kiwi/GPU.sock"), Path("/tmp/kiwi-1/GPU.sock")


@pytest.fixture
def gpu() -> str:
    """A GPU that no other test has: names are the whole machine's."""
    return f"GPU-{uuid.uuid4()}"


def name(gpu: str) -> str:
    return Claim(gpu, HERE)._name


async def asked(second: Claim) -> bool:
    return await asyncio.to_thread(second.try_take)


def test_the_first_has_it_and_says_where_it_is(gpu: str) -> None:
    asyncio.run(_first_and_second(gpu))


async def _first_and_second(gpu: str) -> None:
    first, second, other = Claim(gpu, HERE), Claim(gpu, THERE), Claim(f"{gpu}0", THERE)
    assert first.try_take()
    assert first.try_take()
    reached = True
    await first.serve(lambda: reached)
    assert not await asked(second)
    assert (second.holder_pid, second.holder_path) == (os.getpid(), str(HERE))
    error = already_running(OneDaemonLock(THERE), second, THERE)
    assert f"pid {os.getpid()}" in error.message
    assert str(HERE) in error.message
    assert f"KIWI_SOCKET_DIR={HERE.parent}" in error.remedy
    reached = False  # it leaves
    assert not await asked(second)
    assert second.holder_path == ""
    assert other.try_take(), "another GPU is free"
    other.close()
    first.close()
    assert await asked(second)
    second.close()


def test_a_daemon_that_starts_elsewhere_gives_up_and_says_why(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_core.daemon.places.RUNS_AFTER_S", 0.2)
    asyncio.run(_elsewhere(gpu, tmp_path))


async def _elsewhere(gpu: str, tmp_path: Path) -> None:
    first = Claim(gpu, HERE)
    assert first.try_take()
    await first.serve(lambda: True)
    path = tmp_path / "GPU.sock"
    lock = OneDaemonLock(tmp_path / "GPU.lock")

    def start() -> bool:
        return asyncio.run(alone(Claim(gpu, path), lock, path, asyncio.Event()))

    with pytest.raises(CallerError, match="already running") as caught:
        await asyncio.to_thread(start)
    assert str(HERE) in caught.value.message
    assert lock.try_acquire(), "and has not locked the directory, which the first may want"
    first.close()


def test_it_is_free_when_its_daemon_has_ended(gpu: str) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if Claim(gpu, HERE).try_take() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    claim = Claim(gpu, HERE)
    assert claim.try_take()
    claim.close()


def test_a_name_where_nobody_listens_is_no_daemons(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SILENT_ASKS", 3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(name(gpu))
        claim = Claim(gpu, HERE)
        assert [claim.try_take() for _ in range(3)] == [False, False, True]


def test_a_name_where_nobody_answers_is_not_believed_for_ever(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose queue of connections a stranger keeps full."""
    monkeypatch.setattr(claims, "SILENT_ASKS", 3)
    monkeypatch.setattr(claims, "ASK_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as queued:
        full.bind(name(gpu))
        full.listen(0)
        queued.connect(name(gpu))
        claim = Claim(gpu, HERE)
        assert [claim.try_take() for _ in range(3)] == [False, False, True]
