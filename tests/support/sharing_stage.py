"""The stage of browser tests: a daemon, a Jupyter server, two notebooks that do not fit
together."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli_process import finish, start_kiwi
from playwright.sync_api import expect
from unix_peers import connected

if TYPE_CHECKING:
    from pathlib import Path

    from daemon import Daemon
    from lab import Lab
    from lab_page import LabPage, NotebookPane

    from kiwi_core.wire.messages import SessionStatus

_numbers = itertools.count()

MIB = 76
"""Memory of each notebook, of 128 MiB: each fills 60 % of the GPU."""

A, B = "training.ipynb", "exploration.ipynb"

TAKE, USE, CPU = 0, 1, 2
"""Numbers of the cells of both notebooks."""


@dataclass(frozen=True)
class Stage:
    """A Jupyter server and the daemon that its kernels and its extension find."""

    daemon: Daemon
    lab: Lab

    def session(self, path: str) -> SessionStatus:
        """Return the session of the notebook's kernel, which the daemon must know."""
        kernel = self.lab.kernel_id(path)
        return next(s for s in self.daemon.status().sessions if s.kernel_id == kernel)

    def wait_state(self, path: str, *states: str) -> None:
        """Wait until the daemon has the notebook's kernel in one of ``states``."""
        kernel = self.lab.kernel_id(path)
        self.daemon.wait_for(
            lambda s: any(e.kernel_id == kernel and e.state.value in states for e in s.sessions),
            f"{path} in {states}",
        )

    def set(self, **settings: Any) -> None:
        with self.daemon.client() as client:
            client.connect()
            client.set(**settings)

    def enough_path(self) -> Path:
        """Return the path of a new file that ends A's loop when it appears."""
        return self.daemon.directory / f"enough-{next(_numbers)}"

    def status_json(self) -> Any:
        """Return the first GPU of ``kiwi status --json``."""
        result = finish(start_kiwi("status", "--json", **self.daemon.env))
        assert result.code == 0, result.err
        return json.loads(result.out)["gpus"][0]

    def connections(self) -> int:
        """Return the number of connections that the Jupyter server has to the daemon."""
        assert self.lab.process is not None
        (path,) = self.daemon.sockets()
        return connected(path)[self.lab.process.pid]


@dataclass(frozen=True)
class Pair:
    """Two notebooks: A computes in its cell ``USE`` until ``enough()``; B takes one step in it."""

    stage: Stage
    page: LabPage
    a: NotebookPane
    b: NotebookPane
    enough_path: Path

    def session(self, pane: NotebookPane) -> str:
        """Return the id of the notebook's session, which is kept to the end of its kernel."""
        return str(self.stage.session(pane.path).id)

    def a_computes(self) -> None:
        self.a.start(USE)
        self.stage.wait_state(self.a.path, "running")

    def b_waits(self) -> None:
        """Let B wait while A computes; return when B's cell shows it. B is in front."""
        self.a_computes()
        self.b.start(USE)
        expect(self.b.waiting_line(USE)).to_be_visible()
        self.stage.daemon.wait_for(lambda s: s.holders and s.queue, "A holds, B waits")

    def enough(self) -> None:
        self.enough_path.touch()
        self.a.wait_end(USE)


def write_pair(stage: Stage, enough: Path) -> None:
    for path, seed, use in (
        (A, 1, f"memory.work(until='{enough}')"),
        (B, 2, "memory.step()\nprint('stepped')"),
    ):
        take = f"from gpu_work import Memory\nmemory = Memory({MIB}, {seed})"
        stage.lab.write_notebook(path, [take, use, "print(sum(range(100)))"])
