"""Tests that notebooks which a tool executes have the same bytes as without Kiwi."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import nbformat
import pytest

from kiwi_core.wire.messages import Acquire, Granted
from tests.kernel.conftest import GPU_LIBRARY
from tests.kernel.executing_tool import INTERRUPT_ME
from tests.support.kernels import KERNEL_PYTHON, PATIENCE_S, clean_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.client.scripted_daemon import ScriptedDaemon

PROGRAM: Final = Path(__file__).with_name("executing_tool.py")
"""A separate process, because nbclient leaves sockets to the garbage collector."""

FIRST: Final = "import tripgpu\nx = tripgpu.use()"

WAITING: Final = (
    FIRST,
    "print('a')\ntripgpu.use()\nprint('b')\n1 + 1",
    "x = tripgpu.use()",
    "print('a')\ntripgpu.use()\nraise ValueError('on purpose')",
    "%%capture said\ntripgpu.use()\nprint('a')",
    "said.stdout, len(said.outputs), tripgpu.use()",
    "%%capture said\ntripgpu.use()\ndisplay(1)",
    "len(said.outputs), tripgpu.use()",
    "shown = display(tripgpu.use(), display_id='one')",
    "shown.update(tripgpu.use())",
    "from IPython.display import clear_output\nprint('a')\ntripgpu.use()\nclear_output()\nprint(1)",
    "import asyncio\nprint('a')\nawait asyncio.sleep(0)\ntripgpu.use()",
)


@contextmanager
def granting(daemon: ScriptedDaemon, seen: Path) -> Iterator[None]:
    """Grant each request once its cell has shown that it waits."""
    daemon.grants = False
    over = threading.Event()

    def grant() -> None:
        granted = 0
        while not over.wait(0.02):
            shown = int(seen.read_text() or 0) if seen.exists() else 0
            if shown > granted:
                asked = [m for m in daemon.peer.received if isinstance(m, Acquire)]
                granted = shown
                daemon.peer.say(Granted(burst=asked[-1].burst, quantum_s=1.0))

    granter = threading.Thread(target=grant)
    granter.start()
    try:
        yield
    finally:
        over.set()
        granter.join()


class Tool:
    """Execute notebooks in kernels with an empty home directory."""

    def __init__(self, directory: Path, sockets: Path, library: Path, name: str) -> None:
        self._name = name
        self._directory = directory
        self._env = clean_environment(directory) | {
            "KIWI_SOCKET_DIR": str(sockets), "PYTHONPATH": str(library)
        }  # fmt: skip
        profile = directory / "ipython" / "profile_default"
        profile.mkdir(parents=True)
        (profile / "ipython_kernel_config.py").write_text(GPU_LIBRARY)
        self.seen = directory / "seen"

    def execute(self, cells: tuple[str, ...], **env: str) -> tuple[bytes, Any]:
        """Return the file afterwards, and what the tool saw of waits (see ``executing_tool``)."""
        path = self._directory / "notebook.ipynb"
        made = [nbformat.v4.new_code_cell(cell, id=f"c{n}") for n, cell in enumerate(cells)]
        nbformat.write(nbformat.v4.new_notebook(cells=made), path)
        done = subprocess.run(
            [sys.executable, str(PROGRAM), self._name, KERNEL_PYTHON, str(path), str(self.seen)],
            env=self._env | env, capture_output=True, text=True, timeout=2 * PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return path.read_bytes(), json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def tool(tmp_path: Path, sockets: Path, library: Path, request: pytest.FixtureRequest) -> Tool:
    return Tool(tmp_path, sockets, library, request.param)


BOTH = pytest.mark.parametrize("tool", ["nbclient", "papermill"], indirect=True)


def outputs_of(notebook: str | bytes) -> list[list[Any]]:
    return [cell["outputs"] for cell in json.loads(notebook)["cells"]]


@BOTH
def test_a_file_is_as_without_kiwi(daemon: ScriptedDaemon, tool: Tool) -> None:
    without, (nothing, _) = tool.execute(WAITING, KIWI_DISABLE="1")
    assert nothing == []
    with granting(daemon, tool.seen):
        saved, (waits, meanwhile) = tool.execute(WAITING)
    assert len(waits) == len(WAITING), "each cell waits, and shows it"
    assert saved.decode() == without.decode()
    for moment in meanwhile:
        for early, final in zip(outputs_of(moment), outputs_of(without), strict=True):
            assert all(output["output_type"] == "stream" for output in early) or early == final


@BOTH
def test_an_interrupted_wait_leaves_its_error_only(daemon: ScriptedDaemon, tool: Tool) -> None:
    with granting(daemon, tool.seen):
        saved, (waits, _) = tool.execute((f"{INTERRUPT_ME}\n{FIRST}", "1 + 1"))
    assert len(waits) == 1
    interrupted, after = outputs_of(saved)
    assert [output.get("ename") for output in interrupted] == ["KeyboardInterrupt"]
    assert [output["data"] for output in after] == [{"text/plain": ["2"]}]
