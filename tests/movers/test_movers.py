"""Tests of workers that make driver calls: they hang, are killed, fail to start, and end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from blocking import Loop
from cuda_processes import wait_until
from cuda_program import CudaProgram

import kiwi_emulator as emulator
from kiwi_core.errors import GpuError
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.movers.driver_calls import RemoteDriver, RemoteGpu, gpus
from kiwi_core.movers.errors import Busy, Hung
from kiwi_core.movers.pool import MoverPool
from kiwi_core.units import MIB

HANGS_S = 1.0
"""Limit for a call that will hang; others get ``LONG_S``."""
LONG_S = 60.0


class World:
    """An emulated GPU, programs that use it, and pools of workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        libraries = emulator.build()
        emulator.create_state(path, emulator.parse_gpus("1x64MiB"))
        self.environment = emulator.environment(path, libraries)
        self.gpu = emulator.books(path).gpus[0]
        self.faults = emulator.Faults(path)
        self.loop = Loop()
        self._closing: list[Callable[[], Any]] = []

    def movers(self, least: int = 2, most: int = 8, **environment: str) -> MoverPool:
        made = MoverPool(least, most, self.environment | environment)
        self.loop.loop.call_soon_threadsafe(made.start)
        self._closing.append(lambda: self._close_movers(made))
        return made

    def _close_movers(self, movers: MoverPool) -> None:
        self.loop.run(movers.close())
        # The pool leaves those to the system that take longer to end, as on a busy machine.
        wait_until(lambda: all(one.exited for one in movers._movers), "all workers have ended")

    def program(self) -> CudaProgram:
        one = CudaProgram(self.environment, MIB)
        self._closing.append(one.close)
        return one

    def state(self, movers: MoverPool, pid: int) -> CheckpointState:
        return self.loop.run(RemoteDriver(movers).checkpoint_state(pid))

    def close(self) -> None:
        self.faults.clear()
        for close in reversed(self._closing):
            close()
        self.loop.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "gpus")
    yield world
    world.close()


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_process_goes_out_and_comes_back(world: World) -> None:
    movers, program = world.movers(), world.program()
    driver, before = RemoteDriver(movers), program.digest()
    gpu = RemoteGpu(movers, world.gpu.uuid, 64 * MIB)
    free_bytes = world.loop.run(gpu.free_bytes())
    for call, then in (
        (driver.lock(program.pid, 5000), CheckpointState.LOCKED),
        (gpu.measured_checkpoint(program.pid, LONG_S), CheckpointState.CHECKPOINTED),
        (driver.restore(program.pid, LONG_S), CheckpointState.LOCKED),
        (driver.unlock(program.pid), CheckpointState.RUNNING),
    ):
        measured = world.loop.run(call)
        assert world.state(movers, program.pid) is then
        if then is CheckpointState.CHECKPOINTED:
            assert measured[0] == free_bytes < measured[1]
    assert program.digest() == before


def test_nvml_is_read_through_a_mover(world: World) -> None:
    movers, program = world.movers(), world.program()
    (gpu,) = world.loop.run(gpus(movers))
    assert (gpu.uuid, gpu.total_bytes) == (world.gpu.uuid, 64 * MIB)
    remote = RemoteGpu(movers, gpu.uuid, gpu.total_bytes)
    used = world.loop.run(remote.bytes_by_pid())
    assert used[program.pid] >= MIB
    hidden_bytes = 64 * MIB - sum(used.values()) - world.loop.run(remote.free_bytes())
    assert 0 <= hidden_bytes <= 6 * MIB, "NVML leaves out a part of the context"
    seen = world.loop.run(remote.look([program.pid, os.getpid()]))
    assert seen.bytes_by_pid == used
    assert seen.free_bytes == world.loop.run(remote.free_bytes())
    assert world.loop.run(remote.users_elsewhere()) == {}
    assert seen.states == {
        program.pid: CheckpointState.RUNNING,
        os.getpid(): CheckpointState.NOT_A_CUDA_PROCESS,
    }
    gauges = world.loop.run(remote.gauges())
    assert gauges.power_w is not None
    assert gauges.power_limit_w is not None
    assert gauges.power_w < gauges.power_limit_w
    samples = world.loop.run(remote.samples(0))
    assert samples is None or all(sample.pid for sample in samples)


def test_what_the_driver_refuses_is_raised_as_it_said_it(world: World) -> None:
    movers, program = world.movers(), world.program()
    with pytest.raises(GpuError) as refused:
        world.loop.run(RemoteDriver(movers).restore(program.pid, LONG_S))
    assert not isinstance(refused.value, (Hung, Busy))
    assert (refused.value.code, refused.value.driver_code) == ("illegal-state", 401)
    workers = set(movers.pids)
    assert world.state(movers, program.pid) is CheckpointState.RUNNING
    assert workers <= set(movers.pids), "a worker whose call failed goes on"


def test_a_call_that_hangs_is_given_up_and_another_worker_asks(world: World) -> None:
    movers, stuck, other = world.movers(), world.program(), world.program()
    driver = RemoteDriver(movers)
    world.loop.run(driver.lock(stuck.pid, 5000))
    workers = list(movers.pids)
    world.faults.set("hang", pid=stuck.pid, operation="checkpoint")
    call = movers.call("measured_checkpoint", stuck.pid, "", deadline_s=HANGS_S)
    hanging = world.loop.begin(call)
    wait_until(lambda: world.faults.hanging() == 1, "it hangs")
    assert world.state(movers, other.pid) is CheckpointState.RUNNING, "others go on meanwhile"
    with pytest.raises(Hung, match="did not answer"):
        hanging.result(LONG_S)
    wait_until(lambda: set(workers) - set(movers.pids) != set(), "its worker is ended")
    world.faults.clear()
    wait_until(
        lambda: world.state(movers, stuck.pid) is CheckpointState.CHECKPOINTED,
        "the driver finishes what it had begun",
    )
    assert len(movers.pids) >= 2


def test_a_worker_that_is_killed_in_mid_call(world: World) -> None:
    movers, program = world.movers(), world.program()
    world.faults.set("hang", pid=program.pid, operation="lock")
    call = world.loop.begin(RemoteDriver(movers).lock(program.pid, 30_000))
    wait_until(lambda: world.faults.hanging() == 1, "it hangs")
    killed = set(movers.pids)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(Hung, match="ended in mid-call"):
        call.result(LONG_S)
    wait_until(lambda: not killed & set(movers.pids), "their ends are noticed")
    world.faults.clear()
    wait_until(lambda: world.state(movers, program.pid) is CheckpointState.LOCKED, "it is done")


def test_workers_that_are_killed_while_they_wait_are_replaced(world: World) -> None:
    movers, program = world.movers(), world.program()
    assert world.state(movers, program.pid) is CheckpointState.RUNNING
    before = list(movers.pids)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(movers.pids) >= 2 and not set(before) & set(movers.pids), "new ones")
    assert world.state(movers, program.pid) is CheckpointState.RUNNING


def test_calls_run_side_by_side_up_to_the_most(world: World) -> None:
    movers, programs = world.movers(most=3), [world.program() for _ in range(4)]
    for program in programs:
        world.faults.set("hang", pid=program.pid, operation="lock")
    calls = [
        world.loop.begin(RemoteDriver(movers).lock(program.pid, 30_000)) for program in programs[:3]
    ]
    wait_until(lambda: world.faults.hanging() == 3, "three at a time")
    with pytest.raises(Busy):
        world.loop.run(movers.call("lock", programs[3].pid, 5000, deadline_s=HANGS_S))
    assert len(movers.pids) == 3
    last = world.loop.begin(RemoteDriver(movers).lock(programs[3].pid, 30_000))
    world.faults.clear()
    for call in [*calls, last]:
        call.result(LONG_S)
    states = {world.state(movers, program.pid) for program in programs}
    assert states == {CheckpointState.LOCKED}


def test_a_flood_of_calls_is_answered(world: World) -> None:
    movers, program = world.movers(), world.program()

    async def flood() -> set[CheckpointState]:
        driver = RemoteDriver(movers)
        asked = (driver.checkpoint_state(program.pid) for _ in range(300))
        return set(await asyncio.gather(*asked))

    assert world.loop.run(flood()) == {CheckpointState.RUNNING}
    assert len(movers.pids) <= 8


def test_a_caller_that_is_cancelled_frees_its_place(world: World) -> None:
    movers, program = world.movers(most=2), world.program()
    world.faults.set("hang", pid=program.pid, operation="lock", count=2)
    calls = [world.loop.begin(RemoteDriver(movers).lock(program.pid, 30_000)) for _ in range(2)]
    wait_until(lambda: world.faults.hanging() >= 1, "they hang")
    for call in calls:
        call.cancel()
    gpu = RemoteGpu(movers, world.gpu.uuid, 64 * MIB)
    wait_until(lambda: world.loop.run(gpu.free_bytes()) > 0, "another call is made")


def test_a_reading_of_nvml_that_hangs(world: World) -> None:
    movers = world.movers(KIWI_EMULATOR_HANG="nvmlDeviceGetMemoryInfo")
    program = world.program()
    assert world.state(movers, program.pid) is CheckpointState.RUNNING, "a worker has started"
    with pytest.raises(Hung):
        world.loop.run(movers.call("free_bytes", world.gpu.uuid, deadline_s=HANGS_S))
    assert world.state(movers, program.pid) is CheckpointState.RUNNING


def test_a_driver_that_cannot_be_initialised_says_why_at_each_call(world: World) -> None:
    movers = world.movers(KIWI_EMULATOR_STATE=str(world.path.with_name("missing")))
    for _ in range(3):
        with pytest.raises(GpuError) as failed:
            world.loop.run(movers.call("checkpoint_state", os.getpid(), deadline_s=LONG_S))
        assert not isinstance(failed.value, (Hung, Busy)), failed.value


def test_workers_that_cannot_start_leave_no_call_waiting(world: World) -> None:
    movers = world.movers(PYTHONHOME="/nowhere")
    with pytest.raises(Busy):
        world.loop.run(movers.call("checkpoint_state", os.getpid(), deadline_s=HANGS_S))
    assert len(movers.pids) <= 2, "no storm of attempts"


DAEMON = """
    import asyncio, sys
    from kiwi_core.movers.pool import MoverPool

    async def main():
        movers = MoverPool()
        movers.start()
        await movers.call("checkpoint_state", 1, deadline_s=60)
        print("workers", *movers.pids, flush=True)
        await movers.call("lock", int(sys.argv[1]), 600_000, deadline_s=600)

    asyncio.run(main())
"""


def test_no_worker_outlives_its_daemon(world: World) -> None:
    """This includes a worker in the middle of a call that hangs."""
    program = world.program()
    world.faults.set("hang", pid=program.pid, operation="lock")
    daemon = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), str(program.pid)],
        stdout=subprocess.PIPE, text=True, env=os.environ | world.environment,
    )  # fmt: skip
    with daemon:
        assert daemon.stdout is not None
        said = next(line for line in daemon.stdout if line.startswith("workers"))
        workers = [int(word) for word in said.split()[1:]]
        assert len(workers) >= 2
        wait_until(lambda: world.faults.hanging() == 1, "a call hangs")
        children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
        daemon.kill()
    wait_until(lambda: gone([*workers, *map(int, children)]), "all have ended")


def test_a_worker_inherits_no_descriptor_but_its_own(world: World) -> None:
    """This includes a descriptor that other programs of the test process would inherit."""
    mine = os.open(world.path, os.O_RDWR)
    os.set_inheritable(mine, True)
    place = socket.socket(socket.AF_UNIX)
    place.set_inheritable(True)
    movers = world.movers()
    world.loop.run(gpus(movers))
    name = os.readlink(f"/proc/self/fd/{place.fileno()}")
    for pid in movers.pids:
        names = {}
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile: its worker is busy
                names[link.name] = os.readlink(link)
        assert str(mine) not in names or names[str(mine)] != str(world.path)
        assert name not in names.values()
    place.close()
    os.close(mine)


def test_closing_ends_all(world: World) -> None:
    movers = world.movers()
    world.loop.run(gpus(movers))
    workers = list(movers.pids)
    world.loop.run(movers.close())
    wait_until(lambda: gone(workers), "all have ended")


def test_after_closing_no_call_waits_for_a_worker(world: World) -> None:
    movers = world.movers()
    world.loop.run(gpus(movers))
    world.loop.run(movers.close())
    with pytest.raises(Busy):
        world.loop.run(movers.call("gpus", deadline_s=LONG_S), within_s=LONG_S / 4)
