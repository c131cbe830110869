"""Tests of which of a machine's GPUs belong to this process, on made-up trees."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kiwi_core.client import own_gpus
from kiwi_core.client.own_gpus import MachineGpu, machine_gpus, no_daemon, own_sockets, visible_gpus
from tests.client.scripted_daemon import ScriptedDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST, SECOND, THIRD = "GPU-ffff1111-0000", "GPU-aaaa2222-0000", "GPU-bbbb3333-0000"
MIG = "MIG-cccc4444-0000"
MACHINE = [MachineGpu(FIRST, False), MachineGpu(SECOND, True), MachineGpu(THIRD, True)]

INFORMATION = """\
Model: \t\t NVIDIA A100-SXM4-80GB
IRQ:   \t\t 16
GPU UUID: \t {uuid}
Video BIOS: \t 92.00.45.00.03
Bus Type: \t PCIe
Bus Location: \t 0000:{bus:02x}:00.0
Device Minor: \t {minor}
GPU Excluded:\t No
"""


class Machine:
    """A tree with ``proc`` and ``dev``, which ``own_gpus`` reads as the machine's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, uuid: str, *, bus: int, minor: int, device: bool = True) -> None:
        place = self.root / f"proc/driver/nvidia/gpus/0000:{bus:02x}:00.0"
        place.mkdir(parents=True)
        (place / "information").write_text(INFORMATION.format(uuid=uuid, bus=bus, minor=minor))
        (self.root / "dev").mkdir(exist_ok=True)
        if device:
            (self.root / f"dev/nvidia{minor}").touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(own_gpus, "ROOT", tmp_path / "root")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(tmp_path / "root")


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Path]:
    """Daemons of two GPUs, whose names sort in the reverse order of their indices."""
    directory = tmp_path / "sockets"
    directory.mkdir()
    made = [
        ScriptedDaemon(directory / f"{uuid}.sock", index=index)
        for index, uuid in enumerate((FIRST, SECOND))
    ]
    for daemon in made:
        daemon.start()
    yield directory
    for daemon in made:
        daemon.stop()


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def test_the_machines_gpus_come_in_the_order_of_their_addresses(machine: Machine) -> None:
    machine.add(SECOND, bus=0x41, minor=0, device=False)
    machine.add(FIRST, bus=0x01, minor=1)
    assert machine_gpus() == [MachineGpu(FIRST, True), MachineGpu(SECOND, False)]


def test_a_machine_without_nvidias_module_has_none(machine: Machine) -> None:
    assert machine_gpus() == []


def test_a_uuid_that_the_module_does_not_know_yet_makes_all_unknown(machine: Machine) -> None:
    machine.add(FIRST, bus=1, minor=0)
    machine.add("GPU-????????-????-????-????-????????????", bus=2, minor=1)
    assert machine_gpus() == []


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [SECOND, THIRD]),
        ("", [SECOND, THIRD]),
        ("0", [SECOND]),
        ("1, 0", [THIRD, SECOND]),
        ("0,7,1", [SECOND]),
        ("2", []),
        (FIRST, [FIRST]),
        (MIG, [MIG]),
    ],
)
def test_an_index_counts_only_what_this_process_may_open(
    visible: str | None, seen: list[str]
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(env, MACHINE) == seen


def test_on_a_machine_that_says_nothing_an_index_stays_an_index() -> None:
    assert visible_gpus({}) is None
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,GPU-5"}) == ["1", "GPU-5"]


def test_a_job_on_the_second_gpu_joins_that_one(machine: Machine, daemons: Path) -> None:
    machine.add(FIRST, bus=1, minor=0, device=False)
    machine.add(SECOND, bus=2, minor=1)
    assert names(own_sockets(daemons, {})) == [SECOND]
    assert names(own_sockets(daemons, {"CUDA_VISIBLE_DEVICES": "0"})) == [SECOND]


def test_a_container_that_lists_its_own_gpu_only(machine: Machine, daemons: Path) -> None:
    machine.add(SECOND, bus=2, minor=1)
    assert names(own_sockets(daemons, {})) == [SECOND]


def test_where_all_are_open_cudas_first_comes_first(machine: Machine, daemons: Path) -> None:
    machine.add(FIRST, bus=1, minor=0)
    machine.add(SECOND, bus=2, minor=1)
    assert names(own_sockets(daemons, {})) == [FIRST, SECOND]
    assert names(own_sockets(daemons, {"CUDA_VISIBLE_DEVICES": "1,0"})) == [SECOND, FIRST]


def test_emulated_gpus_on_a_machine_with_real_ones_have_their_own_numbers(
    machine: Machine, daemons: Path
) -> None:
    machine.add(THIRD, bus=1, minor=0)
    assert names(own_sockets(daemons, {})) == [SECOND, FIRST]
    assert names(own_sockets(daemons, {"CUDA_VISIBLE_DEVICES": "1"})) == [SECOND]


def test_a_mig_instance_is_called_what_it_is(machine: Machine, daemons: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": MIG}
    assert own_sockets(daemons, env) == []
    error = no_daemon(daemons, env=env)
    assert error.code == own_gpus.NOT_SHARED
    assert f"{MIG} is a MIG instance" in error.message


def test_a_job_without_a_gpu_is_told_so(machine: Machine, daemons: Path) -> None:
    machine.add(FIRST, bus=1, minor=0, device=False)
    assert own_sockets(daemons, {}) == []
    error = no_daemon(daemons, env={})
    assert error.code == own_gpus.NOT_SHARED
    assert "may open none" in error.message
    assert "--gres=shard:1" in error.remedy


def test_without_daemons_the_error_names_the_gpu(machine: Machine, tmp_path: Path) -> None:
    shutil.rmtree(machine.root, ignore_errors=True)
    assert no_daemon(tmp_path, "1").message.startswith("No Kiwi daemon for GPU 1 is running")
    env = {"CUDA_VISIBLE_DEVICES": "3"}
    assert no_daemon(tmp_path, env=env).message.startswith("No Kiwi daemon for GPU 3 is running")
    assert no_daemon(tmp_path, env={}).message.startswith("No Kiwi daemon is running")
