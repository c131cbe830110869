"""Fixtures: users' programs on the emulated driver, in an environment without Kiwi
(.venvs/clients)."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import leftovers
import pytest
from client_program import ClientProgram
from daemon import Daemon, running_daemon
from pagers import BOTH, PagerUnderTest

import kiwi_emulator as emulator
from kiwi_core import preload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venvs" / "clients" / "bin" / "python"


@pytest.fixture(scope="session")
def client_python() -> str:
    """Return the Python that imports numba-cuda; the one that runs the tests has no numba."""
    if not CLIENTS.exists():
        pytest.fail(f"There is no {CLIENTS.relative_to(ROOT)}: make setup makes it.", pytrace=False)
    return str(CLIENTS)


@pytest.fixture(scope="session", autouse=True)
def libraries() -> emulator.Libraries:
    """Build both libraries first, so that no test waits for a compiler."""
    preload.library()
    return emulator.build()


private_tmp, stack = leftovers.private_tmp, leftovers.stack


@pytest.fixture
def emulated_gpu(private_tmp: Path, libraries: emulator.Libraries) -> Iterator[dict[str, str]]:
    """Return the environment of a program that has an emulated GPU of 512 MiB alone, without
    Kiwi."""
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory) / "gpu"
        emulator.create_state(state, emulator.parse_gpus("1x512MiB"))
        yield {**os.environ, **emulator.environment(state, libraries)}


@pytest.fixture(params=BOTH, ids=str)
def pager(request: pytest.FixtureRequest) -> PagerUnderTest:
    """Run a test twice: the driver's checkpoint moves memory, then the library does."""
    found: PagerUnderTest = request.param
    return found


@pytest.fixture
def make_daemon(stack: ExitStack, pager: PagerUnderTest) -> Callable[..., Daemon]:
    """``make_daemon("1x256MiB", "--tq", "1")`` returns a running ``kiwi daemon``."""

    def make(sizes: str, *args: str) -> Daemon:
        return stack.enter_context(running_daemon(sizes, *args, pager=pager))

    return make


@pytest.fixture
def start(stack: ExitStack, client_python: str) -> Callable[..., ClientProgram]:
    """``start(daemon, "first", "numba_program.py", 60, 1)`` runs ``kiwi run -- python …``."""

    def start(daemon: Daemon, name: str, script: str, *args: object) -> ClientProgram:
        path = Path(__file__).with_name(script)
        command = [client_python, str(path), *map(str, args)]
        return stack.enter_context(ClientProgram(daemon, name, command))

    return start
