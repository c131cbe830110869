"""Tests of memory limits, with made-up /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shortages import no_descriptor_left

from kiwi_core.errors import GpuError
from kiwi_core.gpu import host
from kiwi_core.units import GIB, MIB

NO_LIMIT_V1 = 9223372036854771712
ROOT_V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
ROOT_V1 = "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


class Machine:
    """RAM of 64 GiB, 48 of them available."""

    def __init__(self, root: Path, mountinfo: str) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 * MIB} kB\nMemAvailable: {48 * MIB} kB\n")
        self.write("proc/self/mountinfo", mountinfo)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, group: str, **files: object) -> None:
        for name, value in files.items():
            self.write(f"sys/fs/cgroup/{group}/memory.{name}", f"{value}\n")

    def v1(self, group: str, limit: int, usage: int, reclaimable: int = 0) -> None:
        base = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{base}/memory.stat", f"cache 5\ntotal_inactive_file {reclaimable}\n")

    def process(self, who: str, cgroup: str) -> None:
        self.write(f"proc/{who}/cgroup", cgroup)

    def available(self, *pids: int) -> int:
        return host.available_host_bytes(pids, self.root)


@pytest.fixture
def v2(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path, ROOT_V2)
    machine.process("self", "0::/kiwi\n")
    return machine


@pytest.fixture
def v1(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path, ROOT_V1 + ROOT_V2)
    machine.process("self", "4:memory:/kiwi\n0::/\n")
    return machine


def test_without_limits_the_machine_says(v2: Machine) -> None:
    v2.v2("kiwi", max="max", high="max", current=7 * GIB)
    assert v2.available() == 48 * GIB
    assert host.host_memory(root=v2.root).total_bytes == 64 * GIB


@pytest.mark.parametrize("name", ["max", "high"])
def test_a_limit_less_what_is_used_and_not_reclaimable(v2: Machine, name: str) -> None:
    v2.v2("kiwi", **{name: 16 * GIB}, current=6 * GIB, stat=f"anon 1\ninactive_file {GIB}")
    assert v2.available() == 11 * GIB
    assert host.host_memory(root=v2.root).total_bytes == 16 * GIB


def test_the_strictest_parent_counts(v2: Machine) -> None:
    v2.process("self", "0::/user.slice/kiwi.service\n")
    v2.v2("user.slice/kiwi.service", max=32 * GIB, current=GIB)
    v2.v2("user.slice", max=20 * GIB, current=15 * GIB)
    assert v2.available() == 5 * GIB


def test_the_targets_group_counts_not_only_the_daemons(v2: Machine) -> None:
    v2.v2("kiwi", max="max", current=0)
    v2.process("77", "0::/notebook\n")
    v2.v2("notebook", max=8 * GIB, current=6 * GIB)
    assert v2.available() == 48 * GIB
    assert v2.available(77) == 2 * GIB
    assert v2.available(77, 78) == 2 * GIB, "a process that is gone has no limits"


def test_more_used_than_allowed_is_nothing_not_less(v2: Machine) -> None:
    v2.v2("kiwi", high=4 * GIB, current=5 * GIB)
    assert v2.available() == 0


def test_the_first_version_of_cgroups(v1: Machine) -> None:
    v1.v1("kiwi", 10 * GIB, 4 * GIB, GIB)
    v1.v1("", NO_LIMIT_V1, 30 * GIB)
    assert v1.available() == 7 * GIB


def test_no_limit_in_the_first_version_is_a_large_number(v1: Machine) -> None:
    v1.v1("kiwi", NO_LIMIT_V1, 4 * GIB)
    assert v1.available() == 48 * GIB


def test_in_a_container_the_mount_shows_only_its_own_part(tmp_path: Path) -> None:
    mount = "31 24 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    machine = Machine(tmp_path, mount)
    machine.process("self", "4:memory:/docker/abc\n")
    machine.process("5", "4:memory:/docker/abc/job\n")
    machine.v1("", 12 * GIB, 2 * GIB)
    machine.v1("job", 3 * GIB, GIB)
    assert machine.available() == 10 * GIB
    assert machine.available(5) == 2 * GIB


def test_groups_outside_of_our_view_are_left_out(v2: Machine) -> None:
    v2.v2("kiwi", max="max", current=0)
    v2.process("9", "0::/../other\n")
    v2.write("sys/fs/cgroup/other/memory.max", "1")
    assert v2.available(9) == 48 * GIB


def daemons_container(root: Path, tree_at: str) -> Machine:
    """Make a container with its own cgroup namespace, and the machine's whole tree. The container's
    own mount shows the group ``kubepods/pod-a/own``."""
    inside = "30 24 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"
    whole = f"40 24 0:26 {tree_at} /host/cgroup ro - cgroup2 cgroup2 rw\n"
    machine = Machine(root, inside + whole)
    for group, max_bytes in {
        "kubepods": 40 * GIB, "kubepods/pod-a/own": "max", "kubepods/pod-b/server": 8 * GIB,
    }.items():  # fmt: skip
        machine.write(f"host/cgroup/{group}/memory.max", f"{max_bytes}\n")
        machine.write(f"host/cgroup/{group}/memory.current", f"{GIB}\n")
    (root / "sys/fs").mkdir(parents=True)
    (root / "sys/fs/cgroup").symlink_to(root / "host/cgroup/kubepods/pod-a/own")
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("proc/7/cgroup", "0::/../../pod-b/server\n")
    return machine


def test_a_container_that_has_the_whole_tree_sees_the_groups_of_others(tmp_path: Path) -> None:
    machine = daemons_container(tmp_path, "/../../..")
    assert machine.available() == 39 * GIB, "what the kubelet leaves to all pods"
    assert machine.available(7) == 7 * GIB
    assert str(host.shortage([7], 9 * GIB, machine.root)) == (
        "its memory limit is 8 GiB, and 10 GiB are needed: "
        "ask for 10240 MiB (in Slurm: --mem=10240M)"
    )


def test_a_group_that_the_daemon_is_in_too_is_no_sessions_own(v2: Machine) -> None:
    v2.process("self", "0::/pods/daemon\n")
    v2.process("77", "0::/pods/77\n")
    v2.v2("pods", max=9 * GIB, current=8 * GIB)
    v2.v2("pods/77", max=8 * GIB, current=GIB)
    assert host.shortage([77], 2 * GIB, v2.root) == host.Shortage(9 * GIB, 10 * GIB)
    assert host.own_shortage([77], 2 * GIB, v2.root) is None
    assert host.own_shortage([77], 8 * GIB, v2.root) == host.Shortage(8 * GIB, 9 * GIB)


def test_a_tree_in_which_our_own_group_is_not_found_says_nothing(tmp_path: Path) -> None:
    assert daemons_container(tmp_path, "/../..").available(7) == 48 * GIB


def test_the_budget_counts_what_is_out_and_keeps_a_reserve(v2: Machine) -> None:
    budget = host.host_budget_bytes(2 * GIB, 10 * GIB, root=v2.root)
    assert budget == 10 * GIB + 48 * GIB - 2 * GIB
    v2.v2("kiwi", max=4 * GIB, current=0)
    assert host.host_budget_bytes(2 * GIB, root=v2.root) == 3 * GIB, "at most a quarter is reserve"
    v2.v2("kiwi", max=4 * GIB, current=4 * GIB)
    assert host.host_budget_bytes(2 * GIB, root=v2.root) == 0


@pytest.mark.parametrize("text", ["", "MemTotal:\n", "nonsense\n"])
def test_what_cannot_be_read_is_nothing(tmp_path: Path, text: str) -> None:
    machine = Machine(tmp_path, "short line\n")
    machine.write("proc/meminfo", text)
    assert machine.available() == 0


def test_host_memory_of_this_machine() -> None:
    memory = host.host_memory([os.getpid(), os.getppid()])
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_what_cannot_be_read_for_want_of_descriptors_is_not_taken_for_nothing() -> None:
    """Neither "no limit" nor "no memory" would be right."""
    with no_descriptor_left(), pytest.raises(GpuError, match="Too many open files"):
        host.host_memory()


def test_the_group_that_lacks_most_is_named_with_what_it_needs(v2: Machine) -> None:
    v2.v2("kiwi", max=GIB, current=GIB)
    v2.process("77", "0::/jobs/77\n")
    v2.v2("jobs/77", max=8 * GIB, current=6 * GIB, stat=f"inactive_file {GIB}")
    v2.v2("jobs", max=9 * GIB, current=5 * GIB)
    assert host.shortage([77], 3 * GIB, v2.root) is None, "the daemon's own group does not count"
    assert host.own_shortage([77], 3 * GIB, v2.root) is None
    lacking = host.shortage([77], 6 * GIB, v2.root)
    assert host.own_shortage([77], 6 * GIB, v2.root) == lacking
    assert lacking == host.Shortage(limit_bytes=8 * GIB, needs_bytes=11 * GIB)
    assert str(lacking) == (
        "its memory limit is 8 GiB, and 11 GiB are needed: "
        "ask for 11264 MiB (in Slurm: --mem=11264M)"
    )
    assert "--mem=11265M" in str(host.Shortage(8 * GIB, 11 * GIB + 1)), "rounded up"
