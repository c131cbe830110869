"""Tests of the narrow functions on the emulated driver and NVML, each in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_processes import Worker, wait_until

import kiwi_emulator as emulator
from kiwi_core.units import GIB, MIB

CONTEXT = 2 * MIB


class Machine:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.libraries = emulator.build()
        emulator.create_state(path, [emulator.GpuSpec(64 * MIB), emulator.GpuSpec(GIB)])
        emulator.set_context_bytes(path, CONTEXT)
        self.uuids = [gpu.uuid for gpu in emulator.books(path).gpus]
        self.workers: list[Worker] = []

    def worker(self, setup: str) -> Worker:
        worker = Worker(emulator.environment(self.path, self.libraries))
        self.workers.append(worker)
        worker.do(setup)
        return worker

    def observer(self) -> Worker:
        return self.worker(
            "from kiwi_core.errors import GpuError\n"
            "from kiwi_core.gpu import driver as gd, nvml\n"
            "import dataclasses\n"
            "def code(call, *args):\n"
            "    try: call(*args)\n"
            "    except GpuError as error: return [error.code, error.driver_code, str(error)]\n"
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "gpus")
    yield machine
    emulator.Faults(machine.path).clear()
    for worker in machine.workers:
        worker.close()


def test_what_the_driver_can_do(machine: Machine) -> None:
    emulator.set_driver_version(machine.path, 13000)
    observer = machine.observer()
    info = observer.get("dataclasses.asdict(gd.capabilities())")
    assert info == {
        "version": [13, 0],
        "library": str(machine.libraries.libcuda),
        "checkpoint": True,
        "why_not": "",
    }


def test_a_driver_that_is_too_old(machine: Machine) -> None:
    emulator.set_driver_version(machine.path, 12040)
    target = machine.worker("init()")
    observer = machine.observer()
    assert observer.get("gd.capabilities().checkpoint") is False
    assert "570" in observer.get("gd.capabilities().why_not")
    code, number, text = observer.get(f"code(gd.lock, {target.pid}, 100)")
    assert (code, number) == ("driver-too-old", 500)
    assert "570" in text


def test_a_checkpoint_and_a_restore(machine: Machine) -> None:
    target = machine.worker("init()")
    observer = machine.observer()
    seen = []

    def state() -> None:
        seen.append(observer.get(f"gd.checkpoint_state({target.pid}).name"))

    for call in (f"lock({target.pid}, 5000)", *(f"{c}({target.pid})" for c in _REST)):
        state()
        observer.do(f"gd.{call}")
    state()
    assert seen == ["RUNNING", "LOCKED", "CHECKPOINTED", "LOCKED", "RUNNING"]


_REST = ("checkpoint", "restore", "unlock")


def test_errors_have_the_drivers_number(machine: Machine) -> None:
    target = machine.worker("init()")
    observer = machine.observer()
    faults = emulator.Faults(machine.path)

    def code(call: str) -> list[object]:
        return list(observer.get(f"code(gd.{call})")[:2])

    assert code(f"unlock, {target.pid}") == ["illegal-state", 401]
    faults.set("lock_timeout", pid=target.pid)
    assert code(f"lock, {target.pid}, 20") == ["lock-timeout", 600]
    observer.do(f"gd.lock({target.pid}, 5000); gd.checkpoint({target.pid})")
    faults.set("restore_oom", pid=target.pid)
    assert code(f"restore, {target.pid}") == ["no-gpu-memory", 2]
    assert code(f"restore, {target.pid}") == ["os-call-failed", 304]


def test_a_process_without_cuda(machine: Machine) -> None:
    plain = machine.worker("pass")
    observer = machine.observer()
    assert observer.get(f"gd.checkpoint_state({plain.pid}).name") == "NOT_A_CUDA_PROCESS"
    assert observer.get("gd.checkpoint_state(1).name") == "NOT_A_CUDA_PROCESS"


def test_the_gpus(machine: Machine) -> None:
    observer = machine.observer()
    gpus = observer.get("[dataclasses.asdict(gpu) for gpu in nvml.gpus()]")
    assert [gpu["uuid"] for gpu in gpus] == machine.uuids
    assert [gpu["index"] for gpu in gpus] == [0, 1]
    assert [gpu["total_bytes"] for gpu in gpus] == [64 * MIB, GIB]
    assert all("Emulated" in gpu["name"] for gpu in gpus)
    assert {(gpu["mig"], gpu["persistence"]) for gpu in gpus} == {(False, True)}
    assert "emulated" in gpus[0]["driver_version"]


def test_memory_and_who_uses_it(machine: Machine) -> None:
    first, second = machine.uuids
    target = machine.worker("init(); alloc(8 * MIB)")
    observer = machine.observer()
    used = 8 * MIB + CONTEXT
    assert observer.get(f"dataclasses.asdict(nvml.memory({first!r}))") == {
        "total_bytes": 64 * MIB,
        "free_bytes": 64 * MIB - used,
        "used_bytes": used,
    }
    pairs = "list(nvml.processes({!r}).items())"
    assert observer.get(pairs.format(first)) == [[target.pid, used]]
    assert observer.get(pairs.format(second)) == []
    observer.do(f"gd.lock({target.pid}, 5000); gd.checkpoint({target.pid})")
    assert observer.get(pairs.format(first)) == []


def test_how_hard_a_gpu_works(machine: Machine) -> None:
    observer = machine.observer()
    quiet = observer.get(f"dataclasses.asdict(nvml.gauges({machine.uuids[0]!r}))")
    assert quiet["utilisation_percent"] == 0
    assert quiet["temperature_c"] > 20
    assert 0 < quiet["power_w"] < quiet["power_limit_w"]


def test_gauges_that_a_gpu_does_not_have_are_unknown(machine: Machine) -> None:
    """Many laptops have none, nor has MIG."""
    observer = machine.observer()
    observer.do(
        "import pynvml\n"
        "def refused(*_args): raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)\n"
        "for name in ('PowerUsage', 'EnforcedPowerLimit', 'UtilizationRates'):\n"
        "    setattr(pynvml, 'nvmlDeviceGet' + name, refused)\n"
    )
    seen = observer.get(f"dataclasses.asdict(nvml.gauges({machine.uuids[0]!r}))")
    assert seen.pop("temperature_c") > 20
    assert set(seen.values()) == {None}


def test_a_gpu_that_is_not_there(machine: Machine) -> None:
    observer = machine.observer()
    code, number, text = observer.get("code(nvml.memory, 'GPU-00000000')")
    assert (code, number) == ("nvml-not-found", 6)
    assert "nvidia-smi -L" in text


def test_nvml_starts_again_after_somebody_shut_it_down(machine: Machine) -> None:
    observer = machine.observer()
    assert observer.get("len(nvml.gpus())") == 2
    observer.do("import pynvml; pynvml.nvmlShutdown()")
    assert observer.get("len(nvml.gpus())") == 2


def test_nvml_from_many_threads(machine: Machine) -> None:
    observer = machine.observer()
    observer.do("from concurrent.futures import ThreadPoolExecutor")
    code = "list(ThreadPoolExecutor(8).map(lambda _: len(nvml.gpus()), range(64)))"
    assert observer.get(code) == [2] * 64


def test_utilisation_samples_name_the_busy_process(machine: Machine) -> None:
    first = machine.uuids[0]
    busy = machine.worker("init()")
    machine.worker("init()")
    observer = machine.observer()
    read: Callable[[], list[list[int]]] = lambda: observer.get(  # noqa: E731
        f"[(s.pid, s.percent) for s in nvml.utilisation_samples({first!r}, 0) or ()]"
    )
    busy.do("launch('spin_ns', 200_000_000); sync()")
    wait_until(lambda: any(percent > 0 for _, percent in read()), "a sample of the work")
    assert all(percent <= 100 for _, percent in read())
    code = f"[s.time_us for s in nvml.utilisation_samples({first!r}, 0)]"
    newest = max(observer.get(code))
    later = f"[s.time_us for s in nvml.utilisation_samples({first!r}, {newest})]"
    assert all(time_us > newest for time_us in observer.get(later))
