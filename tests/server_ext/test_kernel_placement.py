"""Tests of the GPU that a real Jupyter Server gives to a kernel, with two emulated GPUs."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon import PATIENCE_S, Daemon, running_daemon, wait_until
from gpu_cells import PRELUDE
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from lab import Lab, running_lab
from lab_kernels import run, start
from leftovers import nothing_left

from kiwi_core.client import Client
from kiwi_jupyter.server_ext.placer import Placer, is_chosen
from kiwi_jupyter.server_ext.provisioner import NAME, KiwiProvisioner, install

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEN = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
USE = f"{PRELUDE}\nmemory = Memory(8, seed=1)\nprint(memory.intact())"


@pytest.fixture(autouse=True)
def private_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("CUDA_VISIBLE_DEVICES", "KIWI_GPU", "KIWI_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    with nothing_left(monkeypatch) as directory:
        yield directory


@pytest.fixture
def daemon(private_tmp: Path) -> Iterator[Daemon]:
    with running_daemon("2x256MiB") as daemon:
        yield daemon


def uuids(daemon: Daemon) -> list[str]:
    return [daemon.status(index).uuid for index in (0, 1)]


# --- with a real server -------------------------------------------------------------------------


PATIENT = f"""
from kiwi_core.client import gpu_placement
from kiwi_jupyter.server_ext.placer import Placer
gpu_placement.WITHIN_S = {PATIENCE_S}
Placer.__init__.__defaults__ = (None, {PATIENCE_S})
"""
"""A kernel is not placed if a daemon, on a busy machine, does not answer within two seconds."""


@pytest.fixture
def server(daemon: Daemon) -> Iterator[Lab]:
    with running_lab(daemon.env, config=PATIENT) as server:
        yield server


@contextmanager
def somebody_computes(daemon: Daemon, index: int) -> Iterator[None]:
    """Let a session hold GPU ``index``."""
    uuid = uuids(daemon)[index]
    with Client(daemon.directory / f"{uuid}.sock", name="busy") as client:
        client.connect()
        client.acquire(timeout_s=PATIENCE_S)
        yield
        client.end_burst()


def memory_of(kernel_id: str, daemon: Daemon, index: int) -> int:
    """Return the bytes of the kernel that the daemon of GPU ``index`` sees."""
    sessions = daemon.status(index).sessions
    mine = [one for one in sessions if one.kernel_id == kernel_id]
    return sum(one.resident_bytes + one.paged_out_bytes for one in mine)


def test_kernels_started_at_once_spread_over_the_gpus(daemon: Daemon, server: Lab) -> None:
    with ThreadPoolExecutor(4) as pool:
        kernels = list(pool.map(lambda _: start(server), range(4)))
    seen = {kernel: run(server, kernel, SEEN) for kernel in kernels}
    assert sorted(seen.values()) == sorted(uuids(daemon) * 2)
    for kernel in kernels[:2]:
        assert run(server, kernel, USE).endswith("True")
        index = uuids(daemon).index(seen[kernel])
        wait_until(
            lambda: memory_of(kernel, daemon, index) >= 8 << 20,  # noqa: B023 - called at once
            "the kernel's memory on the GPU that it leases",
        )


def test_a_busy_gpu_is_avoided_and_left_by_a_restart(daemon: Daemon, server: Lab) -> None:
    first, second = uuids(daemon)
    with somebody_computes(daemon, 0):
        kernel = start(server)
        assert run(server, kernel, SEEN) == second
    with somebody_computes(daemon, 1):
        server.rest("POST", f"api/kernels/{kernel}/restart")
        assert run(server, kernel, SEEN) == first


def test_the_users_choice_is_kept_over_restarts(daemon: Daemon, server: Lab) -> None:
    first, _ = uuids(daemon)
    folder = server.directory / "data/kernels/mine"
    folder.mkdir(parents=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "mine",
        "language": "python",
        "env": {"CUDA_VISIBLE_DEVICES": first},
    }
    (folder / "kernel.json").write_text(json.dumps(spec))
    with somebody_computes(daemon, 0):
        kernel = start(server, "mine")
        assert run(server, kernel, SEEN) == first
        server.rest("POST", f"api/kernels/{kernel}/restart")
        assert run(server, kernel, SEEN) == first


# --- without one --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "chosen"),
    [
        ({}, False),
        ({"KIWI_GPU": "", "KIWI_DISABLE": "0"}, False),
        ({"KIWI_GPU": "1"}, True),
        ({"KIWI_DISABLE": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, True),
        ({"CUDA_VISIBLE_DEVICES": ""}, True),
    ],
    ids=str,
)
def test_who_has_chosen_is_left_alone(env: dict[str, str], chosen: bool) -> None:
    assert is_chosen(env) is chosen


def place(placer: Placer, kernel: str = "k", **env: str) -> str | None:
    return asyncio.run(placer.place(kernel, env))


def test_kernels_that_ended_no_longer_count(daemon: Daemon) -> None:
    first, second = uuids(daemon)
    placer = Placer(daemon.directory, PATIENCE_S)
    assert [place(placer, kernel) for kernel in "abc"] == [first, second, first]
    for kernel in "ac":
        asyncio.run(placer.ended(kernel))
    assert place(placer, "d") == first
    assert place(placer, "e", CUDA_VISIBLE_DEVICES="1") is None


def test_one_gpu_is_no_choice() -> None:
    with running_daemon("1x64MiB") as daemon:
        assert place(Placer(daemon.directory, PATIENCE_S)) is None


# --- becoming the default -----------------------------------------------------------------------


@pytest.fixture
def factory() -> Iterator[KernelProvisionerFactory]:
    KernelProvisionerFactory.clear_instance()
    yield KernelProvisionerFactory.instance()
    KernelProvisionerFactory.clear_instance()


def test_it_becomes_the_default_and_can_be_loaded(factory: KernelProvisionerFactory) -> None:
    assert install(None)
    assert factory.default_provisioner_name == NAME
    assert factory.provisioners[NAME].load() is KiwiProvisioner
    assert install(None)


def test_another_default_is_left_alone(factory: KernelProvisionerFactory) -> None:
    factory.default_provisioner_name = "somebody-elses"
    assert not install(None)
    assert factory.default_provisioner_name == "somebody-elses"


def test_without_its_entry_point_kernels_must_still_start(
    factory: KernelProvisionerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_jupyter.server_ext.provisioner.entry_points", lambda **_: [])
    assert not install(None)
    assert factory.default_provisioner_name == "local-provisioner"
