"""Real kernels beside a real daemon on an emulated GPU; whatever a test does, nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from daemon import Daemon, running_daemon
from kernels import running_kernel
from notebooks import Notebook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MARK = "KIWI_E2E_TEST"
"""In the environment of every process that a test starts, however indirectly."""

GONE_WITHIN_S = 10.0


@pytest.fixture(autouse=True)
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """All temporary files of a test in one (short) place that must be empty at its end; and no
    process that it started may outlive it."""
    directory = Path(tempfile.mkdtemp(prefix="kw", dir="/tmp"))
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    left = _processes_left(mark)
    files = sorted(path.name for path in directory.iterdir())
    shutil.rmtree(directory, ignore_errors=True)
    assert not left, f"processes left behind: {left}"
    assert not files, f"files left behind: {files}"


def _processes_left(mark: str) -> list[str]:
    """Those that do not end by themselves soon; they are ended."""
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


@pytest.fixture
def stack(private_tmp: Path) -> Iterator[ExitStack]:
    """Ends what a test started, the latest first, before ``private_tmp`` looks for leftovers."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_daemon(stack: ExitStack) -> Callable[..., Daemon]:
    """``make_daemon("1x256MiB", "--tq", "1")``: a running ``kiwi daemon``."""

    def make(sizes: str = "1x256MiB", *args: str, **env: str) -> Daemon:
        return stack.enter_context(running_daemon(sizes, *args, env=env))

    return make


@pytest.fixture
def make_notebook(stack: ExitStack) -> Callable[..., Notebook]:
    """``make_notebook(daemon, "A", mib=150)``: a plain kernel, as Jupyter starts it for A.ipynb;
    with ``mib`` it has filled so much of the GPU already."""

    def make(daemon: Daemon, name: str, mib: int = 0, *, config: str = "", **env: str) -> Notebook:
        environment = daemon.env | {"JPY_SESSION_NAME": f"/home/somebody/{name}.ipynb"} | env
        kernel = stack.enter_context(running_kernel(environment, config=config))
        notebook = Notebook(kernel, daemon, name)
        if mib:
            notebook.take(mib, seed=sum(name.encode()))
        return notebook

    return make
