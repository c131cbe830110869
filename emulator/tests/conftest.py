"""Fixtures: an emulated machine for each test, with programs that run on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cuda_processes import Worker, end_on_a_gpu, may_be_killed, wait_until

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20


class Machine:
    """An emulated machine: its state file, its processes and its books."""

    def __init__(
        self, state: Path, libraries: emulator.Libraries, gpus: str, driver: str | None
    ) -> None:
        self.state = state
        self.libraries = libraries
        self._workers: list[Worker] = []
        emulator.create_state(state, emulator.parse_gpus(gpus), driver)
        emulator.set_context_bytes(state, 2 * MIB)

    @property
    def faults(self) -> emulator.Faults:
        return emulator.Faults(self.state)

    @property
    def environment(self) -> dict[str, str]:
        return emulator.environment(self.state, self.libraries)

    def worker(self, setup: str = "init()", *prefix: str, **more: str) -> Worker:
        worker = Worker(self.environment | more, *prefix)
        self._workers.append(worker)
        if setup:
            worker.do(setup)
        return worker

    @property
    def missing(self) -> str:
        """Return the error of calls about a process that does not exist."""
        real = emulator.has_quirk(self.state, "missing_is_os_error")
        return "CUDA_ERROR_OPERATING_SYSTEM" if real else "CUDA_ERROR_INVALID_VALUE"

    def used(self, gpu: int = 0) -> int:
        return emulator.books(self.state).gpus[gpu].used_bytes

    def books(self, worker: Worker) -> emulator.ProcessBooks:
        found = emulator.books(self.state).process(worker.pid)
        assert found is not None, f"{worker.pid} is not in the books"
        return found

    def device_bytes(self, worker: Worker, gpu: int = 0) -> int:
        return self.books(worker).device_bytes.get(gpu, 0)

    def close(self) -> None:
        self.faults.clear()
        if may_be_killed(self.environment):
            for worker in self._workers:
                worker.close()
        else:
            end_on_a_gpu(self._workers, self.environment)
        wait_until(lambda: not emulator.books(self.state).processes, "all processes off the books")
        assert [gpu.used_bytes for gpu in emulator.books(self.state).gpus] == [0] * len(
            emulator.books(self.state).gpus
        )


@pytest.fixture(scope="session")
def libraries() -> emulator.Libraries:
    return emulator.build()


@pytest.fixture
def boot(tmp_path: Path, libraries: emulator.Libraries) -> Iterator[Callable[..., Machine]]:
    """Make machines; end their processes and check their books afterwards."""
    machines: list[Machine] = []

    def make(gpus: str, driver: str | None = None) -> Machine:
        machines.append(Machine(tmp_path / f"gpus-{len(machines)}", libraries, gpus, driver))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


@pytest.fixture
def machine(boot: Callable[..., Machine]) -> Machine:
    return boot("1x64MiB")
