"""Tests of kernels that find the emulated driver by its name, as they would find a real one: Kiwi
does not load it for them, and the program's own code is the first that does."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kiwi_core import compiled, emulator, preload
from kiwi_core.preload import ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from notebooks import Notebook

pytestmark = pytest.mark.e2e

OWN_NAMES = Path(__file__).parents[1] / "preload" / "interposer" / "programs" / "own_names.c"
MAPPED = """%%kiwi cpu
with open("/proc/self/maps") as maps:
    print([line.split()[-1] for line in maps if {driver!r} in line])
"""


@pytest.mark.parametrize("kind", ["FUNCTIONS", "VARIABLES"])
@pytest.mark.parametrize("preloaded", [True, False], ids=["preloaded", "by-soname"])
def test_a_library_with_names_of_the_driver_of_its_own(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    tmp_path: Path,
    kind: str,
    preloaded: bool,
) -> None:
    """TensorFlow's, for example; it opens the driver at its first call."""
    own = tmp_path / "libown.so"
    flags = (f"-D{kind}", "-shared", "-fPIC", "-o", str(own), str(OWN_NAMES), "-ldl")
    subprocess.run([*compiled.find_compiler(), *flags], check=True)
    daemon, libraries = make_daemon(), emulator.build()
    env = emulator.environment(daemon.state_path, libraries)
    if preloaded:
        env |= preload.environment(ready.ensure(), before=env) | {preload.ENV_OWN: "0"}
    notebook = make_notebook(daemon, "A", **env)
    notebook.check(f"import ctypes\nown = ctypes.CDLL({str(own)!r})")
    notebook.check("%%kiwi gpu\n1")  # it has its session, and knows of the emulation
    mapped = notebook.check(MAPPED.format(driver=str(libraries.libcuda)))
    assert mapped.stream("stdout") == "[]\n"
    assert notebook.check("%%kiwi gpu\nown.own_gpus()").result == "1"
    guarded = notebook.check("%%kiwi cpu\nfrom kiwi_core import preload\npreload.guarded()")
    assert guarded.result == "True"
    notebook.take(32)
