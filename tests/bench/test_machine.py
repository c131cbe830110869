"""Tests of what ``/sys`` says of the GPU's place, with files like those of real machines."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kiwi_core.bench import machine
from kiwi_core.bench.machine import Numa, PcieLink

BUS = "0000:3b:00.0"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def gpu(**files: str) -> dict[str, str]:
    return {f"sys/bus/pci/devices/{BUS}/{name}": text for name, text in files.items()}


def test_a_gen5_link(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        gpu(
            current_link_speed="32.0 GT/s PCIe", current_link_width="16",
            max_link_speed="32.0 GT/s PCIe", max_link_width="16",
        ),
    )  # fmt: skip
    link = machine.link(BUS, root)
    assert link == PcieLink(32.0, 16, 32.0, 16)
    assert link.gb_per_s == pytest.approx(63.0, abs=0.1)


def test_an_old_link_carries_less_of_its_bits() -> None:
    assert PcieLink(5.0, 16, 5.0, 16).gb_per_s == pytest.approx(8.0)


@pytest.mark.parametrize("speed", ["Unknown", "", "none"])
def test_a_link_that_says_nothing(tmp_path: Path, speed: str) -> None:
    root = write(
        tmp_path,
        gpu(
            current_link_speed=speed, current_link_width="16",
            max_link_speed="16.0 GT/s PCIe", max_link_width="16",
        ),
    )  # fmt: skip
    assert machine.link(BUS, root) is None
    assert machine.link("0000:00:00.0", root) is None


def two_nodes(tmp_path: Path, node: str) -> Path:
    """Make a tree in which this process's processors are at node 0, others at node 1."""
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return write(
        tmp_path,
        gpu(numa_node=node)
        | {
            "sys/devices/system/node/node0/cpulist": mine,
            "sys/devices/system/node/node1/cpulist": "900-903",
            "sys/devices/system/node/possible": "0-1",
        },
    )


def test_the_numa_node_of_the_gpu_is_near_or_far(tmp_path: Path) -> None:
    mine = tuple(sorted(os.sched_getaffinity(0)))
    near = machine.numa(BUS, two_nodes(tmp_path, "0"))
    assert near == Numa(0, (0,), mine)
    assert not near.far
    far = machine.numa(BUS, two_nodes(tmp_path, "1"))
    assert far == Numa(1, (0,), ())
    assert far.far


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    assert machine.numa(BUS, two_nodes(tmp_path, "-1")).gpu_node is None
    assert machine.numa(BUS, tmp_path / "nothing") == Numa(None, ())


def test_sets_of_processors() -> None:
    assert machine.cpus_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert machine.cpus_of("\n") == set()


def test_nothing_personal_is_told() -> None:
    told = str(machine.describe())
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", told)
