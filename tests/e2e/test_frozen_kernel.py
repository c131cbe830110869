"""Tests of a kernel whose main thread keeps the interpreter's lock while the driver holds it.

Some libraries do this. The whole kernel is stopped then and can say nothing, so nothing may depend
on its answers.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from checks import unharmed
from notebooks import assert_books_agree

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from notebooks import Notebook

pytestmark = pytest.mark.e2e

MIB_EACH = 72
"""Two of these do not fit."""

FROZEN = """
import ctypes
library = ctypes.PyDLL("libcuda.so.1")
def frozen_loop(stop):
    '''Reads piece by piece, with the interpreter's lock held in each call; counts rounds.'''
    rounds, data = 0, ctypes.create_string_buffer(PIECE)
    while not os.path.exists(stop):
        number = rounds % len(memory.digests)
        source = ctypes.c_uint64(memory.address + number * PIECE)
        result = library.cuMemcpyDtoH_v2(data, source, ctypes.c_size_t(PIECE))
        if result or hashlib.sha1(data.raw).digest() != memory.digests[number]:
            raise AssertionError(f"round {rounds}: {result}")
        rounds += 1
    return rounds
"""
"""Plain ``ctypes``, because ``cuda.bindings`` releases the interpreter's lock in each call."""


@pytest.mark.usefixtures("pager")
def test_a_frozen_kernel_comes_back(
    make_daemon: Callable[..., Daemon], make_notebook: Callable[..., Notebook]
) -> None:
    daemon = make_daemon("1x128MiB", "--tq", "0.3")
    a = make_notebook(daemon, "A", mib=MIB_EACH)
    b = make_notebook(daemon, "B", mib=MIB_EACH)
    a.check(FROZEN)
    stop_a, stop_b = daemon.directory / "stop-a", daemon.directory / "stop-b"
    loop = f"print('rounds', frozen_loop({str(stop_a)!r}))"

    # The whole kernel is held while B works; its result is correct.
    a_cell = a.start("%%kiwi gpu\n" + loop)
    a.wait_state("running")
    b_cell = b.work(until=stop_b)
    wait_frozen(daemon, a, b)
    stands_still(a)
    stop_a.touch()
    stop_b.touch()
    b.finish(b_cell)
    assert a.finish(a_cell).text.startswith("rounds ")

    # An interrupt ends the call, and with it the cell, while B works on.
    stop_a.unlink()
    stop_b.unlink()
    a_cell = a.start("%%kiwi gpu\n" + loop)
    a.wait_state("running")
    b_cell = b.work(until=stop_b)
    wait_frozen(daemon, a, b)
    a.kernel.interrupt()
    assert a.kernel.finish(a_cell).error == "KeyboardInterrupt"
    assert not b.kernel.finished(b_cell)
    stop_b.touch()
    b.finish(b_cell)
    assert a.check("1 + 1").result == "2"
    a.assert_intact()

    # The daemon is killed meanwhile: the next one brings the kernel back.
    stop_b.unlink()
    a_cell = a.start("%%kiwi gpu\n" + loop)
    a.wait_state("running")
    b_cell = b.work(until=stop_b)
    wait_frozen(daemon, a, b)
    daemon.kill_all()
    stands_still(a)
    daemon.start()
    a.wait_state("running")
    stop_a.touch()
    stop_b.touch()
    assert a.finish(a_cell).text.startswith("rounds ")
    b.finish(b_cell)
    a.assert_intact()
    b.assert_intact()
    assert_books_agree(daemon)
    daemon.stop()
    unharmed(daemon)


def wait_frozen(daemon: Daemon, a: Notebook, b: Notebook) -> None:
    """Wait until A is out in mid-cell and stays out while B works."""
    daemon.in_a_long_turn(lambda _: (a.state, b.state) == ("suspended", "running"), "A is out")


def stands_still(a: Notebook) -> None:
    """Check that no thread of A runs: it uses no CPU time, and the memory that B needs is out. A
    library moves no more than that."""
    assert a.in_gpu_mib() < MIB_EACH
    before_s = cpu_s(a.pid)
    time.sleep(0.5)
    assert cpu_s(a.pid) - before_s < 0.05


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
