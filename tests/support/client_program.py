"""A user's program under ``kiwi run``: it reads lines of questions and answers with lines of
JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
from patience import die_with_the_test

if TYPE_CHECKING:
    from daemon import Daemon

    from kiwi_core.wire.messages import SessionStatus
    from kiwi_emulator import ProcessBooks

ENDS_WITHIN_S = 60.0


class ClientProgram:
    """``options`` are those of ``kiwi run``."""

    def __init__(self, daemon: Daemon, name: str, command: list[str], *options: str) -> None:
        self.daemon, self.name = daemon, name
        run = [sys.executable, "-m", "kiwi_core.cli", "run", "--require", "--name", name, *options]
        self._run = subprocess.Popen(
            [*run, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **daemon.env},
            preexec_fn=die_with_the_test,
        )
        self.pid = 0

    def __enter__(self) -> ClientProgram:
        return self

    def __exit__(self, *_: object) -> None:
        """Also kill the program: after a failed test it may be held in a driver call."""
        with self._run:
            family = (
                [] if self._run.poll() is not None else psutil.Process(self._run.pid).children()
            )
            for process in (*family, self._run):
                process.kill()

    def introduction(self) -> Any:
        """Return the first line of the program's output, which says its pid."""
        said = self.answer()
        self.pid = said["pid"]
        return said

    def ask(self, question: str) -> None:
        """Send a question without waiting for the answer, which ``answer()`` returns."""
        assert self._run.stdin is not None
        self._run.stdin.write(question + "\n")
        self._run.stdin.flush()

    def answer(self) -> Any:
        assert self._run.stdout is not None
        line = self._run.stdout.readline()
        assert line, f"{self.name} ended with {self._run.wait(ENDS_WITHIN_S)}; its error is above"
        return json.loads(line)

    def get(self, question: str) -> Any:
        self.ask(question)
        return self.answer()

    def kill_kiwi_run(self) -> None:
        """Kill ``kiwi run``, but not the program."""
        self._run.kill()

    def end(self) -> int:
        """End the program's input and return the exit code of ``kiwi run``."""
        self._run.communicate(timeout=ENDS_WITHIN_S)
        return self._run.returncode

    @property
    def session(self) -> SessionStatus | None:
        sessions = self.daemon.status().sessions
        return next((one for one in sessions if one.name == self.name), None)

    @property
    def books(self) -> ProcessBooks:
        """Return the driver's own books of the program's process."""
        return next(p for p in self.daemon.books().processes if p.pid == self.pid)
