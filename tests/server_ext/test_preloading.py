"""Tests of kernels that a real Jupyter Server starts with Kiwi's own pager in them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest
from daemon import Daemon, running_daemon, wait_until
from gpu_cells import PRELUDE
from lab import Lab, running_lab
from lab_kernels import run, start
from leftovers import nothing_left

from kiwi_core import preload
from kiwi_core.config import CHECKPOINT, ENV_PAGER, INPROCESS
from kiwi_core.states import MovedBy
from kiwi_jupyter.server_ext import preloading

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOADED = "import ctypes; print(hasattr(ctypes.CDLL(None), 'kiwi_preload_version'))"
USE = f"{PRELUDE}\nmemory = Memory(8, seed=1)\nprint(memory.intact())"


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    for name in ("CUDA_VISIBLE_DEVICES", "KIWI_GPU", "KIWI_DISABLE", ENV_PAGER):
        monkeypatch.delenv(name, raising=False)
    with nothing_left(monkeypatch), running_daemon("1x256MiB") as daemon:
        yield daemon


@pytest.fixture
def server(daemon: Daemon) -> Iterator[Lab]:
    with running_lab(daemon.env | {ENV_PAGER: INPROCESS}) as server:
        yield server


def test_a_kernel_brings_its_pager_along(daemon: Daemon, server: Lab) -> None:
    kernel = start(server)
    assert run(server, kernel, LOADED) == "True"
    assert run(server, kernel, USE).endswith("True")

    def moved_by() -> MovedBy | None:
        mine = (one for one in daemon.status().sessions if one.kernel_id == kernel)
        return next((one.pager for one in mine), None)

    wait_until(lambda: moved_by() is MovedBy.INPROCESS, "the daemon knows of the pager")


def test_any_other_kernel_gets_the_gate(daemon: Daemon) -> None:
    preloading.ready.ensure()
    with running_lab(daemon.env) as server:
        kernel = start(server)
        assert run(server, kernel, LOADED) == "True"
        assert run(server, kernel, USE).endswith("True")
        (session,) = daemon.status().sessions
        assert session.guarded, session.unguarded_text
        assert session.pager is MovedBy.CHECKPOINT, "its memory is the driver's"


def test_no_kernel_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(preloading.ready, "find", lambda: None)
    monkeypatch.setattr(preloading.ready, "ensure", lambda: begun.append("compiling"))
    monkeypatch.setattr(preloading, "_compiling", None)
    env = {"PATH": "/usr/bin"}
    assert not preloading.add_gate(env)
    assert not preloading.add_gate(env)
    assert env == {"PATH": "/usr/bin"}
    wait_until(lambda: begun == ["compiling"], "it is compiled beside, once")


@pytest.mark.parametrize("env", [{"KIWI_DISABLE": "1"}])
def test_who_switched_kiwi_off_gets_no_gate(env: dict[str, str]) -> None:
    assert not preloading.add_gate(env)


@pytest.mark.parametrize(
    ("env", "default", "wanted"),
    [
        ({}, CHECKPOINT, False),
        ({}, INPROCESS, True),
        ({ENV_PAGER: INPROCESS}, CHECKPOINT, True),
        ({ENV_PAGER: CHECKPOINT}, INPROCESS, False),
        ({ENV_PAGER: "nonsense"}, INPROCESS, False),
        ({"KIWI_DISABLE": "1"}, INPROCESS, False),
    ],
)
def test_kernels_that_get_the_gate(env: dict[str, str], default: str, wanted: bool) -> None:
    assert preloading.wanted(env, default) is wanted


def test_others_stay_preloaded() -> None:
    env = {"LD_PRELOAD": "/usr/lib/libjemalloc.so"}
    assert asyncio.run(preloading.add(env))
    ours, others = env["LD_PRELOAD"].split(":", 1)
    assert ours.endswith(preload.NAME)
    assert others == "/usr/lib/libjemalloc.so"


def test_a_kernel_starts_without_a_library_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> Path:
        raise preload.Unavailable("There is no C compiler here.", "Install gcc.")

    monkeypatch.setattr(preloading.ready, "ensure", none)
    env = {"PATH": "/usr/bin"}
    with caplog.at_level(logging.WARNING):
        assert not asyncio.run(preloading.add(env))
        assert not asyncio.run(preloading.add(env))
    assert env == {"PATH": "/usr/bin"}
    (record,) = caplog.records
    assert "no C compiler" in record.getMessage()
