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
from kiwi_core.config import AUTO, CHECKPOINT, ENV_PAGER, INPROCESS
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


@pytest.mark.parametrize(
    ("pager", "wanted"),
    [({}, MovedBy.INPROCESS), ({ENV_PAGER: CHECKPOINT}, MovedBy.CHECKPOINT)],
    ids=["nothing said", "checkpoint"],
)
def test_any_other_kernel_gets_what_the_machine_has_proven(
    daemon: Daemon, pager: dict[str, str], wanted: MovedBy
) -> None:
    preloading.ready.ensure()
    env = {name: value for name, value in daemon.env.items() if name != ENV_PAGER}
    with running_lab(env | pager) as server:
        kernel = start(server)
        assert run(server, kernel, LOADED) == "True"
        assert run(server, kernel, USE).endswith("True")

        def moved_by() -> MovedBy:
            (session,) = daemon.status().sessions
            assert session.guarded, session.unguarded_text
            return session.pager

        wait_until(lambda: moved_by() is wanted, "it is moved as it should be")


def test_no_kernel_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(preloading.ready, "find", lambda: None)
    monkeypatch.setattr(preloading.ready, "ensure", lambda: begun.append("compiling"))
    monkeypatch.setattr(preloading, "_compiling", None)
    env = {"PATH": "/usr/bin"}
    assert not asyncio.run(preloading.add(env, AUTO))
    assert not asyncio.run(preloading.add(env, AUTO))
    assert env == {"PATH": "/usr/bin", ENV_PAGER: AUTO}
    wait_until(lambda: begun == ["compiling"], "it is compiled beside, once")


def test_who_switched_kiwi_off_gets_no_gate() -> None:
    env = {"KIWI_DISABLE": "1"}
    assert not asyncio.run(preloading.add(env, INPROCESS))
    assert env == {"KIWI_DISABLE": "1"}


@pytest.mark.parametrize(
    ("env", "default", "own"),
    [
        ({}, AUTO, "auto"),
        ({}, CHECKPOINT, "0"),
        ({}, INPROCESS, "1"),
        ({ENV_PAGER: INPROCESS}, CHECKPOINT, "1"),
        ({ENV_PAGER: CHECKPOINT}, INPROCESS, "0"),
        ({ENV_PAGER: AUTO}, CHECKPOINT, "auto"),
        ({ENV_PAGER: "nonsense"}, CHECKPOINT, "0"),
    ],
)
def test_what_kernels_ask_for(env: dict[str, str], default: str, own: str) -> None:
    assert asyncio.run(preloading.add(env, default))
    assert env[preload.ENV_OWN] == own
    assert preload.OWN_BY_PAGER[env[ENV_PAGER]] == own, "what it starts gets the same"


def test_others_stay_preloaded() -> None:
    env = {"LD_PRELOAD": "/usr/lib/libjemalloc.so"}
    assert asyncio.run(preloading.add(env, INPROCESS))
    ours, others = env["LD_PRELOAD"].split(":", 1)
    assert ours.endswith(preload.NAME)
    assert others == "/usr/lib/libjemalloc.so"


def test_a_kernel_starts_without_a_library_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> Path:
        raise preload.Unavailable("There is no C compiler here.", "Install gcc.")

    monkeypatch.setattr(preloading.ready, "find", lambda: None)
    monkeypatch.setattr(preloading.ready, "ensure", none)
    env = {"PATH": "/usr/bin"}
    with caplog.at_level(logging.WARNING):
        assert not asyncio.run(preloading.add(env, INPROCESS))
        assert not asyncio.run(preloading.add(env, INPROCESS))
    assert env == {"PATH": "/usr/bin", ENV_PAGER: INPROCESS}
    (record,) = caplog.records
    assert "no C compiler" in record.getMessage()
