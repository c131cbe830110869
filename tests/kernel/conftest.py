"""Fixtures: real kernels beside a scripted daemon."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.client.scripted_daemon import ScriptedDaemon
from tests.support.kernels import Kernel, running_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

TRIPGPU = '''
"""Counts as a GPU library, because the configuration says so; writes down each use."""
uses = []
def use(what="use"):
    uses.append(what)
    return what
class Tensor:
    def __repr__(self):
        use("repr")
        return "Tensor()"
'''


GPU_LIBRARY = """
c.Kiwi.gpu_modules = ["tripgpu"]
c.Kiwi.turn_grace_s = 0.0
"""
"""Each cell is its own turn, so that the turns show which cells requested one. ``test_turns.py``
tests turns of several cells."""


@pytest.fixture
def sockets() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kiwi-sockets-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def daemon(sockets: Path) -> Iterator[ScriptedDaemon]:
    """A daemon that grants at once unless ``grants`` is false."""
    daemon = ScriptedDaemon(sockets / "GPU-1.sock")
    daemon.start()
    yield daemon
    daemon.stop()
    assert daemon.faults == []


@pytest.fixture
def library(sockets: Path) -> Path:
    """Return a directory that contains ``tripgpu.py``."""
    place = sockets / "library"
    place.mkdir()
    (place / "tripgpu.py").write_text(TRIPGPU)
    return place


@pytest.fixture
def make_kernel(sockets: Path, library: Path) -> Callable[..., AbstractContextManager[Kernel]]:
    @contextmanager
    def make(*, config: str = "", **env: str) -> Iterator[Kernel]:
        # tools/mutations.py names the Kiwi that the tests import here.
        path = os.pathsep.join(filter(None, (str(library), os.environ.get("PYTHONPATH"))))
        base = {"KIWI_SOCKET_DIR": str(sockets), "PYTHONPATH": path}
        with running_kernel(base | env, config=GPU_LIBRARY + config) as kernel:
            yield kernel

    return make


@pytest.fixture
def kernel(
    daemon: ScriptedDaemon, make_kernel: Callable[..., AbstractContextManager[Kernel]]
) -> Iterator[Kernel]:
    """A plain kernel in which Kiwi is active by itself, beside ``daemon``."""
    with make_kernel() as kernel:
        yield kernel
