"""Tests of the command ``kiwi device-plugin``: its options, and the packages that it needs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cli_process import finish, start_kiwi

from kiwi_core.cli import device_plugin, main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python takes a name in ``sys.modules`` without a module for a missing module."""
    for name in ("grpc", "yaml"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["device-plugin"]) == 1
    assert capsys.readouterr().err == (
        "kiwi: kiwi device-plugin needs grpcio, PyYAML: pip install 'kiwi-jupyter[kubernetes]'\n"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--replicas", "0"), ("--replicas", "1001"), ("--replicas", "many"),
        ("--resource", "gpu"), ("--resource", "/gpu"), ("--resource", "kubernetes.io/gpu"),
        ("--resource", "x.kubernetes.io/gpu"), ("--resource", "Kiwi/gpu"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_explained(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["device-plugin", option, value]) == 2
    assert re.search(
        f"{value!r} is not? .*(; write for example| from 1 to 1000)", capsys.readouterr().err
    )


def test_a_directory_with_too_long_a_name_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    done = finish(
        start_kiwi("device-plugin", "--kubelet-dir", str(long), "--cdi-dir", str(tmp_path))
    )
    assert done.code == 1
    assert "is too long for a socket: 107 bytes at most." in done.err


def test_the_tests_have_what_the_extra_has() -> None:
    """Dependency groups cannot include an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["kubernetes"]
    group = project["dependency-groups"]["test"]
    assert set(extra) <= {one for one in group if isinstance(one, str)}
    assert {re.split("[<>=]", one)[0] for one in extra} == {
        package.lower() for package in device_plugin.PACKAGES.values()
    }
