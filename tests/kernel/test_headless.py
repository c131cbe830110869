"""Notebooks run without a front end: nothing of a wait stays in them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from kiwi_core.wire.messages import Acquire, Granted
from tests.support.kernels import KERNEL_PYTHON, PATIENCE_S, clean_environment

if TYPE_CHECKING:
    from pathlib import Path

    from tests.client.scripted_daemon import ScriptedDaemon

PROGRAM = """
import json, sys, nbclient, nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
cell = nbformat.v4.new_code_cell(sys.argv[2])
manager = AsyncKernelManager()
argv = [sys.argv[1], "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager._kernel_spec = KernelSpec(argv=argv, display_name="test", language="python")
nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[cell]), km=manager, timeout=60).execute()
print(json.dumps(cell.outputs))
"""
"""In another process: nbclient leaves sockets to the garbage collector."""


def test_nbclient(daemon: ScriptedDaemon, sockets: Path, tmp_path: Path) -> None:
    daemon.grants = False

    def grant_when_asked() -> None:
        asked = daemon.await_heard(Acquire)
        threading.Event().wait(1.0)  # long enough for the line to appear
        daemon.peer.say(Granted(burst=asked[0].burst, quantum_s=1.0))

    granter = threading.Thread(target=grant_when_asked)
    granter.start()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, KERNEL_PYTHON, "%%kiwi gpu\nprint('a')\n1 + 1"],
            env=clean_environment(tmp_path) | {"KIWI_SOCKET_DIR": str(sockets)},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
    finally:
        granter.join()
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])
    emptied = {"output_type": "display_data", "data": {"text/plain": ""}, "metadata": {}}
    assert emptied in outputs  # the line was there, and is nothing but an empty text now
    kinds = [output["output_type"] for output in outputs if output != emptied]
    assert kinds == ["stream", "execute_result"]
