"""Tests of whole notebooks in real kernels, beside a real daemon on the emulated driver."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from kiwi_core.preload import ready
from tests.kernel.sets import data_science, idioms, tricky
from tests.support.daemon import Daemon, running_daemon
from tests.support.kernels import Cell, Kernel, running_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    ready.ensure()
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def kernel(daemon: Daemon) -> Iterator[Kernel]:
    with running_kernel(daemon.env) as kernel:
        yield kernel


def run(kernel: Kernel, code: str) -> Cell:
    cell = kernel.send(code, allow_stdin=True)
    if "input(" in code:
        kernel.until(lambda: cell.of_type("input_request"), "the question")
        kernel.client.input("Ada")
    kernel.finish(cell)
    assert cell.status == "ok", f"{code!r}\n{cell.traceback}"
    return cell


def flagged(kernel: Kernel, cells: list[str]) -> list[str]:
    """Run ``cells``, and return those that take a turn before they run, each with the reason."""
    found = []
    for code in cells:
        run(kernel, code)
        why = kernel.check("%kiwi why").text
        if "takes its turn before" in why.splitlines()[0]:
            found.append(f"{code}\n{why}")
    return found


def leases(daemon: Daemon, kernel: Kernel) -> float:
    """Return how long the kernel has held the GPU and waited for it, as the daemon counts."""
    session = daemon.session(kernel.pid)
    return 0.0 if session is None else session.held_s + session.waited_s


def test_the_sets_are_as_large_as_they_are_said_to_be() -> None:
    assert len(data_science.CELLS) == 25
    assert len(idioms.IDIOMS) == 60
    assert len(tricky.WAYS) == 46


def test_data_science_without_cuda_never_takes_a_turn(daemon: Daemon, kernel: Kernel) -> None:
    for _ in range(2):
        assert flagged(kernel, data_science.CELLS) == []
    assert leases(daemon, kernel) == 0.0


def test_idioms_without_cuda_never_take_a_turn(daemon: Daemon, kernel: Kernel) -> None:
    kernel.check(idioms.SETUP)
    assert flagged(kernel, idioms.IDIOMS) == []
    assert leases(daemon, kernel) == 0.0


def test_data_science_beside_cuda(kernel: Kernel) -> None:
    kernel.check(tricky.CUDA)
    for _ in range(2):
        assert flagged(kernel, data_science.CELLS) == []


def test_idioms_beside_cuda(kernel: Kernel) -> None:
    kernel.check(idioms.SETUP)
    kernel.check(tricky.CUDA)
    assert flagged(kernel, idioms.IDIOMS) == []


def test_no_tricky_way_lets_a_cell_loose_on_the_gpu(daemon: Daemon, kernel: Kernel) -> None:
    """What is not foreseen takes the lease at its first call: the gate holds it."""
    kernel.check(tricky.SETUP)
    loose, foreseen = [], 0
    for before, code in tricky.WAYS:
        if before:
            kernel.check(before)
        kernel.check("%%kiwi cpu\ntouched = 0")
        held_before = leases(daemon, kernel)
        kernel.run(code)
        why = kernel.check("%kiwi why").text
        foreseen += "takes its turn before" in why.splitlines()[0]
        reached = kernel.check("%%kiwi cpu\nprint(touched)").text
        assert reached != "0\n", f"{code!r} does not reach the GPU"
        if leases(daemon, kernel) <= held_before:
            loose.append(f"{code}\n{why}")
    assert loose == []
    assert foreseen, "it foresees some"
