"""Tests that a paged-out child runs on when the process of its session is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
from daemon import running_daemon, wait_until

if TYPE_CHECKING:
    from kiwi_core.wire.messages import GpuStatus

HOLD_60_PERCENT = textwrap.dedent("""
    import pathlib, sys, time
    from cuda.bindings import driver as cuda

    def check(result):
        assert not result[0], result
        return result[1] if len(result) == 2 else result[1:]

    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    address, small = check(cuda.cuMemAlloc(150 << 20)), bytearray(64)
    while not pathlib.Path(sys.argv[2]).exists():
        check(cuda.cuMemcpyDtoH(small, address, 64))
        pathlib.Path(sys.argv[1]).write_text(str(time.monotonic()))
        time.sleep(0.01)
""")


def test_a_child_left_behind_comes_back_when_there_is_room(tmp_path):
    with running_daemon("1x256MiB", "--tq", "0.5") as daemon, ExitStack() as ends:

        def run(name: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, "-m", "kiwi_core.cli", "run", "--name", name, "--",
                 sys.executable, "-c", HOLD_60_PERCENT, str(tmp_path / name),
                 str(tmp_path / f"{name}-ends")],
                env={**os.environ, **daemon.env}, start_new_session=True,
            )  # fmt: skip
            ends.callback(_kill_tree, process.pid)
            return process

        first = run("first")
        wait_until((tmp_path / "first").exists, "the first computes")
        second = run("second")
        wait_until((tmp_path / "second").exists, "the second computes")

        def first_is_out(status: GpuStatus) -> bool:
            state = {one.pid: one.state.value for one in status.sessions}
            return (state[first.pid], state[second.pid]) == ("suspended", "running")

        daemon.in_a_long_turn(first_is_out, "the first is out, the second computes")
        (child,) = psutil.Process(first.pid).children()
        ends.callback(_kill_tree, child.pid)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        (tmp_path / "second-ends").touch()
        assert second.wait(60) == 0
        progress = (tmp_path / "first").read_text()
        wait_until(lambda: (tmp_path / "first").read_text() not in ("", progress), "it goes on")


def _kill_tree(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            one.kill()
    except psutil.NoSuchProcess:
        return
