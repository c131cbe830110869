"""Tests that kernels of environments without Kiwi are found, and that their users are told."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kiwi_core.environments import CONFIG_NAME, EXTENSION, loads_kiwi
from kiwi_jupyter.server_ext.bare_kernels import BareKernels

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the Python of an environment with ipykernel and without Kiwi."""
    monkeypatch.setenv("HOME", str(tmp_path))
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    return python


def install(python: Path, *, package: bool = True, config: str = EXTENSION) -> None:
    prefix = python.parent.parent
    if package:
        (prefix / "lib/python3.12/site-packages/kiwi_jupyter-1.0.dist-info").mkdir(parents=True)
    place = prefix / "etc/ipython"
    place.mkdir(parents=True)
    (place / CONFIG_NAME).write_text(config)


def test_an_environment_is_judged_by_its_files(elsewhere: Path) -> None:
    assert loads_kiwi(sys.executable) is True
    assert loads_kiwi(str(elsewhere)) is False
    install(elsewhere)
    assert loads_kiwi(str(elsewhere)) is True


@pytest.mark.parametrize("lacks", [{"package": False}, {"config": "c = get_config()"}])
def test_half_an_installation_loads_nothing(elsewhere: Path, lacks: dict[str, Any]) -> None:
    install(elsewhere, **lacks)
    assert loads_kiwi(str(elsewhere)) is False


def test_what_cannot_be_told_is_not_claimed(tmp_path: Path) -> None:
    assert loads_kiwi("python3") is None
    assert loads_kiwi(str(tmp_path / "gone/bin/python")) is None


@pytest.mark.parametrize("manager", [SimpleNamespace(provisioner=None), SimpleNamespace()])
def test_kernels_of_other_machines_are_not_judged(manager: Any) -> None:
    """A gateway's kernel manager has no provisioner, and its kernelspecs are elsewhere."""
    kernels = SimpleNamespace(list_kernel_ids=lambda: ["k"], get_kernel=lambda _id: manager)
    bare = BareKernels(kernels)
    assert not bare.refresh()
    assert bare.found == {}


async def test_the_user_of_such_a_kernel_is_told(
    elsewhere: Path, jp_serverapp: Any, jp_fetch: Any, ask: Any, read: Any
) -> None:
    spec = {
        "argv": [str(elsewhere), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Old",
        "language": "python",
        "env": {"PYTHONPATH": sysconfig.get_path("purelib")},
    }
    folder = elsewhere.parent.parent / "share/jupyter/kernels/bare"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    specs = jp_serverapp.kernel_manager.kernel_spec_manager
    specs.kernel_dirs = [*specs.kernel_dirs, str(folder.parent)]

    stream = await read()
    made = {}
    try:
        for name in ("python3", "bare"):
            body = json.dumps({"name": name})
            made[name] = json.loads((await jp_fetch("api/kernels", method="POST", body=body)).body)
        await stream.until(lambda s: s["server"]["bare_kernels"])
        _, state = await ask("status")
        ((kernel, said),) = state["server"]["bare_kernels"].items()
        assert kernel == made["bare"]["id"]
        assert said["takes_part"], "the server starts it with Kiwi's gate"
        assert "no Kiwi" in said["text"]
        assert str(elsewhere) in said["text"]
    finally:
        for one in made.values():
            await jp_fetch("api/kernels", one["id"], method="DELETE")
    await stream.until(lambda s: not s["server"]["bare_kernels"])
