"""Check that a test leaves no process and no file behind; else the test fails."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "KIWI_E2E_TEST"
"""Variable in the environment of every process that a test starts, directly or not."""

GONE_WITHIN_S = 30.0


@contextmanager
def nothing_left(patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put all temporary files of the block into one directory with a short path, which must be
    empty at the end; no process that was started in the block may outlive it."""
    directory = Path(tempfile.mkdtemp(prefix="kw", dir="/tmp"))
    mark = uuid.uuid4().hex
    patch.setenv(MARK, mark)
    patch.setenv("TMPDIR", str(directory))
    patch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    left = _processes_left(mark)
    files = sorted(path.name for path in directory.iterdir())
    shutil.rmtree(directory, ignore_errors=True)
    assert not left, f"processes left behind: {left}"
    assert not files, f"files left behind: {files}"


@pytest.fixture(autouse=True)
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put the test's temporary files here, and check that it leaves neither files nor processes."""
    with nothing_left(monkeypatch) as directory:
        yield directory


@pytest.fixture(scope="module", autouse=True)
def module_tmp() -> Iterator[Path]:
    """Do so once for a module whose tests share programs; it takes the place of ``private_tmp``."""
    with pytest.MonkeyPatch.context() as patch, nothing_left(patch) as directory:
        yield directory


@pytest.fixture
def stack(private_tmp: Path) -> Iterator[ExitStack]:
    """End what a test started, the latest first, before ``private_tmp`` looks for leftovers."""
    with ExitStack() as stack:
        yield stack


def _processes_left(mark: str) -> list[str]:
    """End and describe the processes that do not end by themselves soon."""
    ends_at = time.monotonic() + GONE_WITHIN_S
    while (left := _marked(mark)) and time.monotonic() < ends_at:
        time.sleep(0.05)
    described = []
    for process in left:
        try:
            described.append(f"{process.pid} {' '.join(process.cmdline())}")
            process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
    return described


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
