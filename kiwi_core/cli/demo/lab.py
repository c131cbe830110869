"""The demo in JupyterLab, which opens with the two notebooks until the user ends it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from typing import TYPE_CHECKING, Final

from kiwi_core import interpreter
from kiwi_core.cli.demo.workspace import write_settings, write_workspace
from kiwi_core.client.private_daemon import Guard
from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from kiwi_core.cli.demo.stage import DemoStage


ENDS_WITHIN_S: Final = 60.0
"""Time for JupyterLab to end: a kernel that is paged out gets its turn before it can end."""


def open_lab(stage: DemoStage, *, browser: bool, port: int) -> int:
    """Run JupyterLab until it ends (Ctrl-C in the terminal, or File → Shut Down)."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise CallerError(
            "no-jupyterlab",
            "JupyterLab is not installed here.",
            "Run `pip install jupyterlab`, or try `kiwi demo --headless`.",
        )
    first, second = (path.name for path in stage.notebooks)
    print(
        f"{first} and {second} open side by side, and Kiwi's sidebar on the right.\n"
        "Choose Run → Run All Cells in one, then in the other: its cells wait, and say so. The\n"
        "sidebar shows who has the GPU, who waits and for how long, and draws each swap.\n"
        "End the demo with Ctrl-C.",
        flush=True,
    )
    workspaces = stage.directory / "workspaces"
    write_workspace(workspaces, (first, second))
    settings = write_settings(stage.directory / "settings", stage.env)
    command = [
        *interpreter.module("jupyterlab"), f"--ServerApp.root_dir={stage.notebooks[0].parent}",
        f"--port={port}", f"--LabApp.workspaces_dir={workspaces}",
    ]  # fmt: skip
    if os.getuid() == 0:
        command.append("--allow-root")  # containers: it listens on localhost, behind a token
    if not browser:
        command.append("--no-browser")
    # A session of its own: Ctrl-C and the terminal's end reach this process, which then ends the
    # server and its kernels in order. So JupyterLab does not ask whether the user means it.
    server = subprocess.Popen(
        command, env=stage.env | settings, cwd=interpreter.DIRECTORY, start_new_session=True
    )
    guard = Guard(server.pid)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        guard.end()
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server, which ends its kernels first; the demo ends any that are left."""
    server.terminate()
    try:
        server.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
