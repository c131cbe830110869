"""Directories, locks and sockets of a daemon."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kiwi_core.daemon.places import (
    SOCKET_PATH_MAX,
    OneDaemonLock,
    answers,
    listen,
    prepare_directory,
)
from kiwi_core.errors import CallerError


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    prepare_directory(place)
    assert place.stat().st_mode & 0o777 == 0o700
    prepare_directory(place)  # and may be used again


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_one_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
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
    assert second.holder() == str(os.getpid())


def test_a_lock_that_cannot_be_is_an_error_with_words(tmp_path: Path) -> None:
    (tmp_path / "l").mkdir()
    with pytest.raises(CallerError, match="Cannot lock"):
        OneDaemonLock(tmp_path / "l").try_acquire()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CallerError, match="Cannot lock"):
        OneDaemonLock(tmp_path / "link").try_acquire()
    assert not (tmp_path / "elsewhere").exists(), "links are not followed"


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
