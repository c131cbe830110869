"""Tests of a daemon's directories, locks and sockets."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from pathlib import Path

import pytest

from kiwi_core.daemon.base.address import Address
from kiwi_core.daemon.base.admission import Admission, Door
from kiwi_core.daemon.base.directories import prepare_directory
from kiwi_core.daemon.base.message_turns import MessageTurns
from kiwi_core.daemon.base.shares import Shares
from kiwi_core.daemon.base.sockets import SOCKET_PATH_MAX, OneDaemonLock, answers, listen
from kiwi_core.errors import CallerError


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    prepare_directory(place)
    assert place.stat().st_mode & 0o777 == 0o700
    prepare_directory(place)  # and it may be used again


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "d"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(CallerError, match="can be written by others") as caught:
        prepare_directory(place)
    assert "chmod go-w" in caught.value.remedy


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CallerError, match="a link is not followed"):
        prepare_directory(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(CallerError, match="is not a directory"):
        prepare_directory(tmp_path / "file")
    with pytest.raises(CallerError, match="Cannot create"):
        prepare_directory(tmp_path / "file" / "below")


def test_one_daemon_at_a_time(tmp_path: Path) -> None:
    first, second = OneDaemonLock(tmp_path / "l"), OneDaemonLock(tmp_path / "l")
    assert first.try_acquire()
    assert not second.try_acquire()
    assert second.daemon_pid() == str(os.getpid())


def test_a_lock_that_cannot_be_is_an_error_with_words(tmp_path: Path) -> None:
    (tmp_path / "l").mkdir()
    with pytest.raises(CallerError, match="Cannot lock"):
        OneDaemonLock(tmp_path / "l").try_acquire()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CallerError, match="Cannot lock"):
        OneDaemonLock(tmp_path / "link").try_acquire()
    assert not (tmp_path / "elsewhere").exists(), "links are not followed"


def test_a_lock_that_is_closed_is_free(tmp_path: Path) -> None:
    first, second = OneDaemonLock(tmp_path / "l"), OneDaemonLock(tmp_path / "l")
    assert first.try_acquire()
    first.close()
    assert not first.is_in_place()
    assert second.try_acquire()
    second.close()
    second.close()


def test_an_address_that_is_made_again_keeps_no_descriptor_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "s.lock"
    lock = OneDaemonLock(path)
    assert lock.try_acquire()
    address = Address(
        tmp_path / "s.sock", lock, pytest.fail,
        complete=pytest.fail, restored=pytest.fail, taken=pytest.fail,
    )  # fmt: skip
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        path.unlink()
        assert address._lock_again()
        other = OneDaemonLock(path)
        assert not other.try_acquire(), "the new one is held"
        other.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("turns", range(5))
def test_an_address_that_is_closed_is_not_made_again(tmp_path: Path, turns: int) -> None:
    """A wait that ends because another caller has just asked does not react to a cancellation."""
    asyncio.run(_asked_for_and_closed(tmp_path / "s.sock", turns))


async def _asked_for_and_closed(path: Path, turns: int) -> None:
    lock = OneDaemonLock(path.with_suffix(".lock"))
    assert lock.try_acquire()
    shares = Shares.of_this_process(os.getuid())
    admission = Admission(shares, MessageTurns(shares))
    address = Address(
        path, lock, lambda sock: Door(sock, admission, pytest.fail),
        complete=lambda: True, restored=lambda: None, taken=pytest.fail,
    )  # fmt: skip
    address.open()
    keeping = asyncio.create_task(address.keep())
    await turn(5)
    assert address.is_found()
    await turn(turns)
    keeping.cancel()
    address.close()
    await turn(10)
    assert not path.exists()
    assert keeping.cancelled() or not keeping.done()
    lock.close()


async def turn(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def test_a_stale_socket_gives_way_and_a_live_one_answers() -> None:
    import shutil
    import tempfile

    short = Path(tempfile.mkdtemp(prefix="kw-"))
    try:
        path = short / "s"
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        assert not answers(path)
        with listen(path):
            assert answers(path)
            assert path.stat().st_mode & 0o777 == (0o666 if os.getuid() == 0 else 0o600)
        assert not answers(path)
        assert not answers(short / "absent")
    finally:
        shutil.rmtree(short)


def test_a_path_that_no_socket_takes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * SOCKET_PATH_MAX)
    with pytest.raises(CallerError, match="longer than") as caught:
        listen(path)
    assert "--socket-dir" in caught.value.remedy


def test_no_descriptor_for_a_socket_is_an_error_that_can_be_waited_out(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(
            CallerError, match=r"Cannot listen at .*: Too many open files"
        ) as caught:
            listen(tmp_path / "s")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.code == "no-socket"
