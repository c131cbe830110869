"""Fixtures: the emulated driver and, with ``-m gpu``, a real GPU, each also with the pager
preloaded.

The tests state what a driver does, and use nothing that only the emulator has: a difference is a
bug of the emulator. On a real GPU the processes see the first device. Sizes stay modest, no managed
memory is used, and the GPU is never reset.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cuda_processes import Worker, end_on_a_gpu, wait_until

import kiwi_emulator as emulator
from kiwi_core import preload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

MIB = 1 << 20


class Platform:
    """The driver and the environment that the test's programs run with."""

    def __init__(self, environment: dict[str, str], preloaded: bool) -> None:
        self.preloaded = preloaded
        self.environment = environment
        self._workers: list[Worker] = []
        self._shared: dict[str, Worker] = {}

    def shared(self, setup: str) -> Worker:
        """Return a program that many tests use, made by ``setup``. A new program replaces one that
        has ended or still owes an answer: a crash or a hang costs one test, not all."""
        worker = self._shared.get(setup)
        if worker is None or not worker.usable:
            worker = self._shared[setup] = self.worker("init()")
            worker.do(setup)
        return worker

    def worker(self, setup: str = "init()") -> Worker:
        worker = Worker(self.environment)
        self._workers.append(worker)
        if setup:
            worker.do(setup)
        return worker

    def close(self) -> None:
        """End all programs, without killing one that runs on the GPU."""
        if self._workers:
            end_on_a_gpu(self._workers, self.environment)


KINDS = [
    "emulated",
    "emulated-preloaded",
    pytest.param("gpu", marks=pytest.mark.gpu),
    pytest.param("gpu-preloaded", marks=pytest.mark.gpu),
]


@contextlib.contextmanager
def _running(kind: str, directory: Path, driver: str | None = None) -> Iterator[Platform]:
    environment: dict[str, str] = {}
    emulated = kind.startswith("emulated")
    if emulated:
        state = directory / "gpus"
        emulator.create_state(state, emulator.parse_gpus("1x512MiB"), driver)
        environment = emulator.environment(state, emulator.build())
    preloaded = kind.endswith("preloaded")
    if preloaded:
        environment |= preload.environment(preload.library(), before=os.environ)
        environment["KIWI_SOCKET_DIR"] = str(directory / "no-daemon")
    platform = Platform(environment, preloaded)
    yield platform
    platform.close()
    if emulated:
        wait_until(lambda: not emulator.books(state).processes, "the books balance")


@pytest.fixture
def running() -> Callable[..., AbstractContextManager[Platform]]:
    """Return a function that makes a platform from a kind, a directory, and the name of an emulated
    driver."""
    return _running


@pytest.fixture(params=KINDS)
def platform(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Platform]:
    with _running(request.param, tmp_path) as platform:
        yield platform


@pytest.fixture(scope="module", params=KINDS)
def shared_platform(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """Make a platform for a file of tests that leave nothing behind: on a real GPU the start of a
    process takes seconds."""
    with _running(request.param, tmp_path_factory.mktemp("shared")) as platform:
        yield platform


@pytest.fixture
def worker(platform: Platform) -> Worker:
    return platform.worker()
