"""Tests of how the server loads the extension, and of what that must not cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from traitlets import TraitError

from kiwi_jupyter.server_ext.app import KiwiServerApp

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def test_an_install_alone_enables_it() -> None:
    """This holds for the wheel's file list and for the installation of this environment."""
    source = "packaging/jupyter/kiwi_jupyter.json"
    (target,) = re.findall(rf'^"{source}" = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    for path in (ROOT / source, Path(sys.prefix) / target):
        enabled = json.loads(path.read_text())["ServerApp"]["jpserver_extensions"]
        assert enabled == {"kiwi_jupyter": True}, path


def test_kernels_do_not_load_it() -> None:
    """Kernels import the package too, but must not load any part of a server."""
    code = (
        "import sys, kiwi_jupyter; before = set(sys.modules); import kiwi_jupyter.kernel\n"
        "print([m for m in sys.modules if 'server_ext' in m or m.split('.')[0] in"
        " ('jupyter_server', 'tornado', 'prometheus_client', 'msgspec') and m in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("stream_interval_s", -1.0), ("stream_interval_s", 60.0), ("history_s", -1.0),
        ("history_s", 1e6), ("may_change_settings", "ada"), ("autostart", "perhaps"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(name: str, bad: Any) -> None:
    with pytest.raises(TraitError):
        KiwiServerApp(**{name: bad})


def test_every_setting_is_explained() -> None:
    for name, trait in KiwiServerApp.class_own_traits(config=True).items():
        assert len(trait.help) > 40, name


class TestASocketDirectoryOfItsOwn:
    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> Path:
        return tmp_path / "elsewhere"

    @pytest.fixture
    def socket_dir(self, tmp_path: Path) -> Path:
        return tmp_path / "usual"

    @pytest.fixture
    def traits(self, elsewhere: Path) -> dict[str, Any]:
        return {"socket_dir": str(elsewhere), "autostart": False}

    async def test_it_holds_for_the_kernels_too(
        self, ask: Callable[..., Any], elsewhere: Path
    ) -> None:
        _, state = await ask("status")
        assert str(elsewhere) in state["server"]["problem"]["message"]
        assert os.environ["KIWI_SOCKET_DIR"] == str(elsewhere)
