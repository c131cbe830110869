"""Test of the configuration that keeps idle kernels with GPU memory, with a real Jupyter Server."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon import running_daemon, wait_until
from gpu_cells import PRELUDE
from lab import running_lab
from lab_kernels import run, start
from leftovers import nothing_left

RECIPE = Path(__file__).parents[2] / "packaging/jupyter_server/keep_gpu_memory.py"
SOON = """
c.MappingKernelManager.cull_idle_timeout = 10
c.MappingKernelManager.cull_interval = 1
"""


def test_an_idle_kernel_with_memory_outlives_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left(monkeypatch), running_daemon("1x256MiB") as daemon:
        config = RECIPE.read_text() + SOON
        with running_lab(daemon.env, app="server", config=config) as server:
            holder = start(server)
            run(server, holder, f"{PRELUDE}\nmemory = Memory(8, seed=1)")
            sessions = daemon.status().sessions
            session = next(one for one in sessions if one.kernel_id == holder)
            daemon.wait_state(session.pid, "idle")
            with daemon.client() as client:
                client.release(session.id)
            daemon.wait_state(session.pid, "paged-out")
            start(server)

            def kernels() -> list[str]:
                return [kernel["id"] for kernel in server.rest("GET", "api/kernels")]

            wait_until(lambda: kernels() == [holder], "the idle kernel without memory is ended")
            assert daemon.session(session.pid) is not None
            run(server, holder, "print(memory.intact())")
            run(server, holder, "check(cuda.cuMemFree(memory.address))\n"
                "check(cuda.cuDevicePrimaryCtxRelease(check(cuda.cuDeviceGet(0))))")  # fmt: skip
            wait_until(lambda: kernels() == [], "without memory it is ended, too")
