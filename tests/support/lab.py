"""A real Jupyter server (JupyterLab or Notebook) for browser tests, beside a daemon.

The server's home, notebooks and logs are in a directory of its own; its kernels end with it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from gpu_cells import PRELUDE
from kernels import clean_environment
from patience import die_with_the_test, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START_WITHIN_S = 120.0
STOP_WITHIN_S = 60.0
TOKEN = "a-token-of-the-tests"

MODULE = "gpu_work"
"""Module beside the notebooks that their cells import, so that a page shows short cells."""

_SETTINGS = {
    # Tests read cells that are scrolled out of sight, so these must stay in the page.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension:notification": {
        "checkForUpdates": False,
        "fetchNews": "false",
    },
}
LABEXTENSION = Path(sys.prefix) / "share/jupyter/labextensions/kiwi-jupyter"
"""Directory of the installed extension, where JupyterLab finds it."""

_MODULE = {"lab": "jupyterlab", "notebook": "notebook", "server": "jupyter_server"}
_APP_CLASS = {"lab": "LabApp", "notebook": "JupyterNotebookApp"}
"""Class of each application that has pages."""
_PAGE_CONFIG = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}


@dataclass
class Lab:
    """A Jupyter server, made by ``running_lab``. ``app`` is ``lab``, ``notebook``, or ``server``
    (without pages)."""

    directory: Path
    env: dict[str, str]
    app: str = "lab"
    prefix: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    url: str = ""

    @property
    def notebooks(self) -> Path:
        return self.directory / "notebooks"

    @property
    def log_path(self) -> Path:
        return self.directory / "server.log"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # --- life

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [
            *self.prefix, sys.executable, "-m", _MODULE[self.app],
            "--no-browser", "--allow-root", f"--IdentityProvider.token={TOKEN}",
            f"--ServerApp.root_dir={self.notebooks}", "--ServerApp.ip=127.0.0.1",
            # A TCP port that Jupyter picks for a kernel can be taken when the kernel binds it.
            "--KernelManager.transport=ipc",
            *self._for_pages(), *self.options,
        ]  # fmt: skip
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.notebooks, env=self.env, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_the_test,
            )  # fmt: skip
        wait_until(self._answers, "an answer of the Jupyter server", START_WITHIN_S)

    def _for_pages(self) -> list[str]:
        app_class = _APP_CLASS.get(self.app)
        return [f"--{app_class}.expose_app_in_browser=True"] if app_class else []

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        """Return whether the server answers; its port is in the runtime file that it writes."""
        assert self.process is not None
        assert self.process.poll() is None, f"the Jupyter server ended:\n{self.log()}"
        runtime = Path(self.env["JUPYTER_RUNTIME_DIR"])
        for path in runtime.glob("jpserver-*.json"):
            try:
                self.url = str(json.loads(path.read_text())["url"]).rstrip("/")
                self.rest("GET", "api/status")
            except (OSError, ValueError):
                continue  # half written, or not up yet
            return True
        return False

    # --- REST, as another client of this server

    def rest(self, method: str, path: str, body: Any = None) -> Any:
        """Make a request. Raise ``urllib.error.HTTPError`` (an ``OSError``) if the answer is an
        error."""
        request = urllib.request.Request(
            f"{self.url}/{path}", method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {TOKEN}", "Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def end_kernels(self) -> None:
        """End all kernels as "Shut down all" does, between tests that share this server."""
        for session in self.rest("GET", "api/sessions"):
            self.rest("DELETE", f"api/sessions/{session['id']}")

    def kernel_id(self, path: str) -> str:
        """Return the kernel's id of the notebook ``path``, which must have a kernel."""
        sessions = {s["path"]: s["kernel"]["id"] for s in self.rest("GET", "api/sessions")}
        return str(sessions[path])

    # --- files

    def write_notebook(self, path: str, cells: Sequence[str]) -> Path:
        made = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={
                "kernelspec": {
                    "name": "python3", "display_name": "Python 3", "language": "python",
                }
            },
        )  # fmt: skip
        target = self.notebooks / path
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(made, target)
        return target


@contextmanager
def running_lab(
    env: Mapping[str, str],
    *,
    app: str = "lab",
    uid: int | None = None,
    options: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    config: str = "",
) -> Iterator[Lab]:
    """Run a Jupyter server. ``env`` leads its kernels and its extension to a daemon; ``options``
    are for the command line; ``settings`` are a user's browser settings by plugin id, added to
    those that all tests need. ``config`` is the text of the user's ``jupyter_server_config.py``.
    ``uid``: the server runs as that user (needs root)."""
    directory = Path(tempfile.mkdtemp(prefix="kw-lab-"))
    (directory / "notebooks").mkdir()
    (directory / "notebooks" / f"{MODULE}.py").write_text(PRELUDE)
    assert app == "server" or LABEXTENSION.is_dir(), (
        f"there is no {LABEXTENSION}: `make lab` builds and installs it"
    )
    (directory / "tmp").mkdir()
    environment = clean_environment(directory) | {"TMPDIR": str(directory / "tmp")} | dict(env)
    _write_settings(directory, {**_SETTINGS, **(settings or {})})
    (directory / "config" / "jupyter_server_config.py").write_text(config)
    prefix = _as_user(directory, uid) if uid is not None else ()
    lab = Lab(directory, environment, app, prefix, tuple(options))
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _write_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    config = directory / "config"
    (config / "labconfig").mkdir(parents=True)
    (config / "labconfig" / "page_config.json").write_text(json.dumps(_PAGE_CONFIG))
    for plugin, values in settings.items():
        package, _, name = plugin.partition(":")
        place = config / "lab" / "user-settings" / package
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.jupyterlab-settings").write_text(json.dumps(values))


def _as_user(directory: Path, uid: int) -> tuple[str, ...]:
    """Return the prefix of a command that runs as ``uid``. The user owns the home directory, and
    may read this Python and this checkout anywhere. A change of user resets ``die_with_the_test``,
    so the prefix sets it again."""
    for path in (directory, *directory.rglob("*")):
        shutil.chown(path, uid, uid)
    return (
        "setpriv", "--pdeathsig=KILL", f"--reuid={uid}", f"--regid={uid}", "--clear-groups",
        "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
    )  # fmt: skip
