"""Fixtures: real kernels beside a real daemon on an emulated GPU; nothing is left afterwards."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import leftovers
import pytest
from cli_process import Result, finish, start_kiwi
from daemon import Daemon, running_daemon
from kernels import running_kernel
from notebooks import Notebook
from pagers import BOTH, CHECKPOINT

from kiwi_core.preload import ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pagers import PagerUnderTest


@pytest.fixture(scope="session", autouse=True)
def library() -> Path:
    """Build the library first, where kernels find it: they start without a gate otherwise. A daemon
    that a test kills must not be compiling, either: nobody would remove the temporary files."""
    return ready.ensure()


private_tmp, stack = leftovers.private_tmp, leftovers.stack


@pytest.fixture(scope="module", params=BOTH, ids=str)
def pager(request: pytest.FixtureRequest) -> PagerUnderTest:
    """Run a test twice: the driver's checkpoint moves all memory, then the preloaded library does.

    Tests use it if memory moves, the GPU is requested, or a process dies. They do not use it for
    what users are told when the driver fails or hangs (this concerns the driver), for policies and
    the length of waits (the scheduler), or for kernels that other tools start (nothing is preloaded
    there).
    """
    found: PagerUnderTest = request.param
    return found


@pytest.fixture
def make_daemon(stack: ExitStack, request: pytest.FixtureRequest) -> Callable[..., Daemon]:
    """``make_daemon("1x256MiB", "--tq", "1")`` returns a running ``kiwi daemon``."""
    asked = "pager" in request.fixturenames
    pager = request.getfixturevalue("pager") if asked else CHECKPOINT

    def make(sizes: str = "1x256MiB", *args: str, **env: str) -> Daemon:
        return stack.enter_context(running_daemon(sizes, *args, env=env, pager=pager))

    return make


@pytest.fixture
def kiwi() -> Callable[..., Result]:
    """``kiwi(daemon, "status", "--json")`` runs a command beside that daemon to its end."""

    def run(daemon: Daemon, *args: str) -> Result:
        return finish(start_kiwi(*args, **daemon.env))

    return run


@pytest.fixture
def make_notebook(stack: ExitStack) -> Callable[..., Notebook]:
    """``make_notebook(daemon, "A", mib=150)`` starts a plain kernel, as Jupyter does for A.ipynb.
    With ``mib`` it has already filled that much of the GPU."""

    def make(daemon: Daemon, name: str, mib: int = 0, *, config: str = "", **env: str) -> Notebook:
        environment = daemon.env | {"JPY_SESSION_NAME": f"/home/somebody/{name}.ipynb"} | env
        kernel = stack.enter_context(running_kernel(environment, config=config))
        notebook = Notebook(kernel, daemon, name)
        if mib:
            notebook.take(mib, seed=sum(name.encode()))
        return notebook

    return make
