"""Tests of Jupyter's culling of idle kernels beside Kiwi, as docs/jupyterhub.md describes it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from session_program import SessionProgram
    from traitlets.config import Config

TAKE = """
from cuda.bindings import driver
def ck(result):
    assert not result[0], result[0]
    return result[-1]
ck(driver.cuInit(0))
ck(driver.cuCtxSetCurrent(ck(driver.cuDevicePrimaryCtxRetain(ck(driver.cuDeviceGet(0))))))
p = ck(driver.cuMemAlloc({size_mib} << 20))
"""


@pytest.fixture
def jp_server_config(jp_server_config: Config) -> Config:
    jp_server_config.MappingKernelManager.cull_idle_timeout = 2
    jp_server_config.MappingKernelManager.cull_interval = 1
    jp_server_config.MappingKernelManager.cull_connected = True
    return jp_server_config


async def until(condition: Callable[[], Any], what: str) -> None:
    for _ in range(int(PATIENCE_S / 0.1)):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not within {PATIENCE_S:.0f} s: {what}")


async def test_an_idle_kernel_whose_memory_is_out_is_culled_and_one_that_waits_is_not(
    daemon: Daemon, program: Callable[..., SessionProgram], jp_serverapp: Any, kiwi: Any
) -> None:
    kernels = jp_serverapp.kernel_manager
    idle = await kernels.start_kernel()
    client = kernels.get_kernel(idle).client()
    client.start_channels()
    await client.wait_for_ready(PATIENCE_S)
    await client._async_execute_interactive(TAKE.format(size_mib=100), timeout=PATIENCE_S)
    client.stop_channels()
    runner = program(daemon, 200, name="runner")  # the notebook's memory goes out for it
    runner.start_burst()
    waits = await kernels.start_kernel()
    client = kernels.get_kernel(waits).client()
    client.start_channels()
    await client.wait_for_ready(PATIENCE_S)
    client.execute(TAKE.format(size_mib=200))
    daemon.set_tq(600.0)
    await until(lambda: idle not in kernels, "the idle kernel is culled")
    assert waits in kernels, "a cell that waits counts as busy"
    await until(lambda: len(daemon.status().sessions) == 2, "and so is its memory")
    runner.stop_burst()
    await until(lambda: waits not in kernels, "once its cell has run it is idle, too")
    client.stop_channels()
