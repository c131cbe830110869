"""Tests of kernels that find the emulated driver by its name, as they would find a real one: Kiwi
does not load it for them, and the program's own code is the first that does."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pagers
import pytest

import kiwi_emulator as emulator
from kiwi_core import compiled, preload
from kiwi_core.preload import ready
from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon import Daemon
    from notebooks import Notebook

pytestmark = pytest.mark.e2e

OWN_NAMES = Path(__file__).parents[2] / "native/tests/interposer/programs/own_names.c"
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


@pytest.mark.parametrize("watched", [False, True], ids=["plain", "profiler"])
def test_a_kernel_that_nobody_preloads_into_owns_if_it_asks(
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    monkeypatch: pytest.MonkeyPatch,
    watched: bool,
) -> None:
    """As VS Code, nbclient and papermill start it. With a profiler in it the daemon says no, and
    each surface says why."""
    monkeypatch.setattr(pagers, "into", lambda env: env)
    daemon = make_daemon()
    env = emulator.environment(daemon.state_path, emulator.build()) | pagers.IN_PROCESS.env
    if watched:
        env["NSYS_PROFILING_SESSION_ID"] = "1"
    ready.ensure()  # a kernel does not wait for a compiler
    notebook = make_notebook(daemon, "A", **env)
    notebook.take(32)
    wanted = MovedBy.CHECKPOINT if watched else MovedBy.INPROCESS
    daemon.wait_for(lambda _: notebook.session.pager is wanted, "the daemon knows who moves it")
    assert notebook.session.guarded
    for magic in ("%kiwi status", "%kiwi why"):
        said = notebook.check(magic)
        assert ("NSYS_PROFILING_SESSION_ID" in f"{said.text}{said.outputs}") is watched
