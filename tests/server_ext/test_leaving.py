"""Tests that no host hangs when Jupyter kills a kernel whose memory was moved out and back."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from daemon import Daemon, running_daemon, wait_until
from gpu_cells import PRELUDE
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from leftovers import nothing_left

import kiwi_emulator as emulator
from kiwi_core import nvidia_module
from kiwi_core.client import Client
from kiwi_jupyter.server_ext import leaving
from kiwi_jupyter.server_ext.provisioner import install

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_client.asynchronous.client import AsyncKernelClient

OPEN_595 = nvidia_module.Module("595.71.05", 595, open=True)
TAKE = f"{PRELUDE}\nmemory = Memory(8, seed=1)"
# It does not catch the interrupt, which may come between two statements, outside any try.
STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    memory.work(steps=1)
    open({!r}, "w").close()
    time.sleep(0.01)
"""


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    for name in ("CUDA_VISIBLE_DEVICES", "KIWI_GPU", "KIWI_DISABLE", "KIWI_PAGER"):
        monkeypatch.delenv(name, raising=False)
    env = {"KIWI_EMULATOR_DRIVER": "595-open"}
    with nothing_left(monkeypatch), running_daemon("1x64MiB", env=env) as daemon:
        for name, value in daemon.env.items():
            monkeypatch.setenv(name, value)
        KernelProvisionerFactory.clear_instance()
        install(None, daemon.directory)
        yield daemon
        KernelProvisionerFactory.clear_instance()


async def started(daemon: Daemon) -> tuple[AsyncKernelManager, AsyncKernelClient]:
    """Start a kernel that holds GPU memory."""
    # A TCP port that Jupyter picks for a kernel can be taken when the kernel binds it.
    connection_file = str(daemon.directory / "kernel.json")
    manager = AsyncKernelManager(transport="ipc", connection_file=connection_file)
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    await client.execute_interactive(TAKE, timeout=60)
    return manager, client


async def restored(daemon: Daemon) -> AsyncKernelManager:
    """Return a kernel whose memory has been out and is in the GPU again."""
    manager, client = await started(daemon)
    assert manager.provisioner is not None
    assert await asyncio.to_thread(
        leaving.move_out, manager.provisioner.pid, daemon.directory, 30.0
    )
    await client.execute_interactive("memory.step()", timeout=60)
    client.stop_channels()
    return manager


@pytest.mark.parametrize(
    "affected", [True, pytest.param(False, marks=pytest.mark.host_goes_down)], ids=["moved", "not"]
)
def test_a_kernel_is_moved_out_before_it_is_killed(
    daemon: Daemon, affected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = OPEN_595 if affected else None
    monkeypatch.setattr(nvidia_module, "module_of", lambda: module)

    async def killed() -> None:
        manager = await restored(daemon)
        await manager.shutdown_kernel(now=True)

    asyncio.run(killed())
    wait_until(lambda: not daemon.status().sessions, "the kernel is gone")
    assert bool(emulator.host_down(daemon.state_path)) is not affected


def test_a_kernel_that_does_not_stop_is_killed_all_the_same(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvidia_module, "module_of", lambda: OPEN_595)
    monkeypatch.setattr(leaving, "WITHIN_S", 1.0)

    async def killed() -> None:
        manager, client = await started(daemon)
        at_work = daemon.directory / "at-work"
        client.execute(STUBBORN.format(str(at_work)))
        # "running" may still mean the cell before, and this one the interrupt would stop
        await asyncio.to_thread(wait_until, at_work.exists, "it works, and ignores the interrupt")
        client.stop_channels()
        await manager.shutdown_kernel(now=True)

    asyncio.run(killed())
    wait_until(lambda: not daemon.status().sessions, "the kernel is gone")
    assert "is killed with its memory in the GPU" in caplog.text


def test_a_kernel_that_waits_with_its_memory_out_is_killed_at_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not matter that the socket of another GPU leads nowhere."""
    monkeypatch.setattr(nvidia_module, "module_of", lambda: OPEN_595)

    async def killed() -> None:
        manager = await restored(daemon)
        assert manager.provisioner is not None
        pid = manager.provisioner.pid
        assert await asyncio.to_thread(leaving.move_out, pid, daemon.directory, 30.0)
        with Client(daemon.sockets()[0], name="busy") as busy:
            busy.connect()
            await asyncio.to_thread(busy.acquire, timeout_s=60)
            client = manager.client()
            client.start_channels()
            client.execute("memory.step()")
            await asyncio.to_thread(daemon.wait_state, pid, "waiting")
            client.stop_channels()
            with socket.socket(socket.AF_UNIX) as dead:
                # sorted before the real one; nobody listens
                dead.bind(str(daemon.directory / "GPU-0.sock"))
            assert not await asyncio.to_thread(leaving.move_out, pid, daemon.directory, 10.0)
            assert "with its memory in the GPU" not in caplog.text
            assert "GPU-0.sock cannot be asked" in caplog.text
            await manager.shutdown_kernel(now=True)
            (daemon.directory / "GPU-0.sock").unlink()
            busy.end_burst()

    asyncio.run(killed())
    assert not emulator.host_down(daemon.state_path)
