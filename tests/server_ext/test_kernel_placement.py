"""Tests of the GPU that a real Jupyter Server gives to a kernel, with two emulated GPUs."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import pytest
from daemon import PATIENCE_S, Daemon, running_daemon, wait_until
from gpu_cells import PRELUDE
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from lab import Lab, running_lab
from lab_kernels import run, start
from leftovers import nothing_left

from kiwi_core.client import Client, gpu_placement
from kiwi_core.gpu import nvml
from kiwi_jupyter.server_ext.placer import Placer, is_chosen
from kiwi_jupyter.server_ext.provisioner import NAME, KiwiProvisioner, install

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def add_spec(server: Lab, argv: Sequence[str], **env: str) -> None:
    """Add the kernelspec "mine" for programs ``argv``."""
    folder = server.directory / "data/kernels/mine"
    folder.mkdir(parents=True)
    spec = {"argv": argv, "display_name": "mine", "language": "python", "env": env}
    (folder / "kernel.json").write_text(json.dumps(spec))


def expected(daemon: Daemon) -> list[int]:
    return [daemon.status(index).expected for index in (0, 1)]


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
    plain = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    add_spec(server, plain, CUDA_VISIBLE_DEVICES=first)
    with somebody_computes(daemon, 0):
        kernel = start(server, "mine")
        assert run(server, kernel, SEEN) == first
        server.rest("POST", f"api/kernels/{kernel}/restart")
        assert run(server, kernel, SEEN) == first


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/program"])
def test_a_kernel_that_dies_at_its_start_is_not_expected(
    daemon: Daemon, server: Lab, program: str
) -> None:
    add_spec(server, [program, "{connection_file}"])
    for _ in range(2):
        with suppress(HTTPError):  # the server may notice it before it answers
            start(server, "mine")
    wait_until(lambda: not server.rest("GET", "api/kernels"), "the server gives the kernels up")
    wait_until(lambda: expected(daemon) == [0, 0], "nobody is expected")


USES_THE_GPU = f"{PRELUDE}\nmemory = Memory(8, seed=1)\ntime.sleep(1000)"
"""A kernel of an environment without Kiwi, after a cell that used the GPU."""


@pytest.mark.parametrize(
    "before",
    [
        [],
        pytest.param(
            ["env", "-u", "LD_PRELOAD"],
            marks=pytest.mark.skipif(
                not nvml.names_processes(), reason="NVML names processes of the host only"
            ),
        ),
    ],
    ids=["gate", "no gate"],
)
def test_a_kernel_of_an_environment_without_kiwi_counts_once_under_its_name(
    daemon: Daemon, server: Lab, before: list[str]
) -> None:
    add_spec(server, [*before, sys.executable, "-c", USES_THE_GPU], **daemon.cuda_env)
    server.write_notebook("theirs.ipynb", [])
    notebook = {
        "path": "theirs.ipynb", "name": "theirs.ipynb", "type": "notebook",
        "kernel": {"name": "mine"},
    }  # fmt: skip
    server.rest("POST", "api/sessions", notebook)

    def programs() -> list[str]:
        gpus = [daemon.status(index) for index in (0, 1)]
        return [one.name for gpu in gpus for one in (*gpu.sessions, *gpu.outside)]

    wait_until(lambda: programs() == ["theirs.ipynb"], "the kernel uses the GPU")
    assert expected(daemon) == [0, 0]
    index = next(i for i in (0, 1) if daemon.status(i).sessions or daemon.status(i).outside)
    chosen = gpu_placement.place(daemon.sockets(), "next", within_s=PATIENCE_S)
    assert chosen is not None
    assert chosen.index == 1 - index, "it counts where programs are placed"


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


def test_a_start_that_is_cancelled_leaves_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that asks the daemons cannot be cancelled: it may get its answer afterwards."""
    asked, go_on = threading.Event(), threading.Event()
    place_really = gpu_placement.place

    def slow(*args: Any, **kwargs: Any) -> Any:
        asked.set()
        assert go_on.wait(PATIENCE_S)
        return place_really(*args, **kwargs)

    monkeypatch.setattr(gpu_placement, "place", slow)

    async def cancelled() -> None:
        placer = Placer(daemon.directory, PATIENCE_S)
        start = asyncio.create_task(placer.place("k", {}))
        await asyncio.to_thread(asked.wait)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        ended = asyncio.create_task(placer.ended("k"))
        go_on.set()
        await ended

    asyncio.run(cancelled())  # its end waits for the threads
    assert expected(daemon) == [0, 0]


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
