"""Tests of what ``tests/conftest.py`` does for tests on a real GPU, on an emulated one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from kernels import running_kernel

import kiwi_emulator as emulator

ROOT = Path(__file__).resolve().parents[2]

# The name of the marker is not written in full: see tests/tooling/test_gpu_script.py.
TESTS = """
import time
import pytest

pytestmark = getattr(pytest.mark, "gpu")

@pytest.fixture
def never_ends():
    yield
    time.sleep(600)

@pytest.mark.kills
def test_kills():
    pass

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(600)

@pytest.mark.timeout(1)
def test_hangs_twice(never_ends):
    time.sleep(600)

def test_goes_on():
    pass
"""


def run(
    folder: Path, *words: str, python: str = sys.executable, module: str = "pytest", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the tests in ``folder``, which is not the checkout."""
    options = ["-p", "no:cacheprovider", "-v", *words] if module == "pytest" else []
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-m", module, *options], cwd=folder, env=env | more,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    conftest = (ROOT / "conftest.py").read_text()
    assert "TEARDOWN_S = 150.0" in conftest
    quick = conftest.replace("TEARDOWN_S = 150.0", "TEARDOWN_S = 1.0")
    (tmp_path / "conftest.py").write_text(quick)
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def options(suite: Path) -> list[str]:
    return ["-c", str(ROOT / "pyproject.toml"), "-m", "gpu", f"--confcutdir={suite}", str(suite)]


def test_a_test_that_times_out_fails_alone_and_killers_come_last(suite: Path) -> None:
    state = suite / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x64MiB"))
    done = run(suite, *options(suite), **emulator.environment(state, emulator.build()))
    said = [line.split("::")[1].split()[:2] for line in done.stdout.splitlines() if "%]" in line]
    assert said == [
        ["test_hangs", "FAILED"],
        ["test_hangs_twice", "FAILED"],
        ["test_hangs_twice", "ERROR"],
        ["test_goes_on", "PASSED"],
        ["test_kills", "PASSED"],
    ], done.stdout + done.stderr
    assert "2 failed, 2 passed, 1 error" in done.stdout


def test_without_a_gpu_each_fails_at_once_with_words(suite: Path) -> None:
    done = run(suite, *options(suite), NVIDIA_VISIBLE_DEVICES="void", CUDA_VISIBLE_DEVICES="")
    assert "4 errors" in done.stdout
    assert done.stdout.count("This test needs an NVIDIA GPU, and none can be seen: ") >= 4


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """Return a folder with all packages of this Python except Kiwi."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("kiwi_", "_editable_impl_kiwi")):
            (packages / path.name).symlink_to(path)
    return packages


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """Return a Python without any packages."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


@pytest.fixture
def python_without_kiwi(bare_python: Path, carried: Path) -> Path:
    (site,) = (bare_python.parents[1] / "lib").glob("python3*/site-packages")
    (site / "packages.pth").write_text(str(carried))
    return bare_python


def test_a_checkout_is_enough(python_without_kiwi: Path, tmp_path: Path) -> None:
    """Kiwi is neither installed nor on ``PYTHONPATH``; the programs of tests find it, too."""
    python = str(python_without_kiwi)
    assert run(tmp_path, python=python, module="kiwi_core.units").returncode == 1
    conformance = ["-c", str(ROOT / "pyproject.toml"), str(ROOT / "emulator/conformance")]
    found = run(tmp_path, *conformance, "-m", "gpu", "--collect-only", "-q", python=python)
    assert "[gpu-preloaded]" in found.stdout, found.stdout + found.stderr
    assert found.returncode == 0
    words = ("-m", "not gpu", "-k", "test_errors_have_codes and emulated")
    done = run(tmp_path, *conformance, *words, python=python)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_kernels_have_kiwi_where_it_is_carried_along(
    bare_python: Path, carried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``PYTHONPATH`` has ipykernel and its dependencies; Kiwi is not installed anywhere."""
    monkeypatch.setenv("PYTHONPATH", str(carried))
    with running_kernel(python=str(bare_python)) as kernel:
        kernel.check("import kiwi_jupyter; loaded = get_ipython().extension_manager.loaded")
        assert kernel.check("'kiwi_jupyter.kernel' in loaded").result == "True"
        assert kernel.check("kiwi_jupyter.__file__").result == repr(
            str(ROOT / "kiwi_jupyter" / "__init__.py")
        )
        assert "Kiwi" in kernel.check("%kiwi help").text
