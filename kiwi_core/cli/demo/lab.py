"""The demo in JupyterLab: opens it with the two notebooks, until the user ends it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from kiwi_core.cli.demo.stage import Stage


def open_lab(stage: Stage, *, browser: bool, port: int) -> int:
    """Blocks until JupyterLab ends (Ctrl-C in the terminal, or File → Shut Down)."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise CallerError(
            "no-jupyterlab",
            "JupyterLab is not installed here.",
            "Run `pip install jupyterlab`, or try `kiwi demo --headless`.",
        )
    first, second = (path.name for path in stage.notebooks)
    print(
        f"Open {first} and {second} side by side, then choose Run → Run All Cells in both.\n"
        "Cells of B wait for A, and say so; `%kiwi status` in either shows who has the GPU.\n"
        "End the demo with Ctrl-C.",
        flush=True,
    )
    command = [
        sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={stage.notebooks[0].parent}",
        f"--port={port}", f"--LabApp.default_url=/lab/tree/{first}",
    ]  # fmt: skip
    if os.getuid() == 0:
        command.append("--allow-root")  # containers: it listens on localhost, behind a token
    if not browser:
        command.append("--no-browser")
    try:
        return subprocess.call(command, env=stage.env)
    except KeyboardInterrupt:
        return 0
