"""Tests on a real GPU (``-m gpu``): how they find Kiwi, their time limits, and their order.

The GPU machine may be lent for minutes and have only its own packages. So these tests run from a
checkout, and a test that hangs or crashes must not cost the others.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests/support"))

import hosts  # noqa: E402
import thorough  # noqa: E402

from kiwi_core import interpreter  # noqa: E402
from kiwi_core.gpu import proofs  # noqa: E402

THOROUGH = thorough.pattern(*thorough.lines())

TEARDOWN_S = 150.0
"""Time limit for the fixtures of a failed test: they end programs, at most 20 s each."""


def pytest_configure() -> None:
    """Let the programs that tests start find Kiwi if it is not installed. (For pytest's own process
    ``pythonpath`` in pyproject.toml does that.)"""
    try:
        metadata.distribution("kiwi-jupyter")
    except metadata.PackageNotFoundError:
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = dict.fromkeys([str(ROOT), str(ROOT / "emulator"), *filter(None, before)])
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # A program's first context waits a quarter of a second for the daemon's word on who owns its
    # memory. On a machine that runs tests that is chance.
    os.environ.setdefault("KIWI_PRELOAD_FIRST_MS", "10000")
    _heed_signals()
    hosts.record()


def _heed_signals() -> None:
    """Restore SIGINT and SIGHUP if the shell has them ignored (``nohup``, ``&`` in a script).
    Programs inherit that, and would not react to a test's interrupt."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def base_temp(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the directory of all ``tmp_path`` now: later, a fixture may have set another directory
    for temporary files, which it deletes."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session", autouse=True)
def proven_machine(request: pytest.FixtureRequest) -> None:
    """Let the emulated GPU prove itself before the first daemon starts: what users have after a
    few seconds. On a real GPU only the test of the proof does."""
    if request.config.option.markexpr == "gpu":
        return
    if proofs.load(*proofs.EMULATED) is None:
        asked = interpreter.module("kiwi_core.cli", "doctor", "--prove", "--emulate", "1x512MiB")
        subprocess.run(asked, check=True, timeout=300)


@pytest.fixture(autouse=True)
def hosts_stay_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that killed a program whose kill takes a real host down
    (``kill_takes_host_down``)."""
    yield
    down = hosts.fallen()
    if down and request.node.get_closest_marker("host_goes_down") is None:
        pytest.fail(
            f"This would have taken the host down: {down} were restored, lived, and were killed. "
            "Suspend such a program first, or let it end by itself.",
            pytrace=False,
        )


def pytest_itemcollected(item: pytest.Item) -> None:
    if THOROUGH.fullmatch(item.nodeid):
        item.add_marker("thorough")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run those GPU tests last that kill a program which uses the GPU, because that has hung hosts
    (NVIDIA/cuda-checkpoint#53)."""
    for item in filter(_on_a_gpu, items):
        limit_s = _limit_s(item, item.get_closest_marker("timeout"))
        item.add_marker(pytest.mark.timeout(limit_s), append=False)
    items.sort(key=lambda item: _on_a_gpu(item) and item.get_closest_marker("kills") is not None)


def _limit_s(item: pytest.Item, marked: pytest.Mark | None) -> float:
    """Return the marker's limit, at most ``--timeout`` if given: otherwise one test that hangs
    takes all the time of a borrowed machine."""
    asked = item.config.getoption("timeout", None)
    default = asked if asked is not None else float(item.config.getini("timeout"))
    own = (*marked.args, marked.kwargs.get("timeout"))[0] if marked else None
    limits = [float(limit) for limit in (own, asked) if limit]
    return min(limits, default=float(default))


def _on_a_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a GPU test at once, with a reason, if there is no GPU."""
    if _on_a_gpu(item) and (why_not := _why_no_gpu()):
        pytest.fail(
            f"This test needs an NVIDIA GPU, and none can be seen: {why_not}", pytrace=False
        )


@functools.cache
def _why_no_gpu() -> str:
    """Return why there is no GPU, or "" if there is one."""
    from kiwi_core.errors import KiwiError
    from kiwi_core.gpu import nvml

    try:
        return "" if nvml.gpus() else "NVML lists no GPU."
    except KiwiError as error:
        return str(error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the teardown of a GPU test that has failed, since pytest-timeout ends its timer
    then."""
    if not _on_a_gpu(item) or signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        return (yield)
    signal.signal(signal.SIGALRM, _late_teardown)
    signal.setitimer(signal.ITIMER_REAL, TEARDOWN_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _late_teardown(_number: int, _frame: object) -> None:
    pytest.fail(f"The fixtures of this test did not end within {TEARDOWN_S:g} s.")
