"""The demo without a browser: real kernels, a running commentary, and a verdict."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, TextIO

from kiwi_core.cli.demo.notebook import Notebook
from kiwi_core.cli.demo.timeline import Timeline
from kiwi_core.cli.demo.verdict import verdict
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.cli.demo.stage import DemoStage

ENDS_WITHIN_S: Final = 600.0
"""The demo takes half a minute; on a very slow machine it takes minutes."""


class _Commentary:
    """Writes lines from several threads, each with the seconds since the beginning."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._start_ns = time.monotonic_ns()

    def now(self, text: str) -> None:
        self.at(time.monotonic_ns(), text)

    def at(self, at_ns: int, text: str) -> None:
        seconds = max(0, at_ns - self._start_ns) / NS_PER_S
        with self._lock:
            self._out.write(f"{seconds:6.1f} s  {text}\n")
            self._out.flush()


def play(stage: DemoStage, out: TextIO) -> int:
    """Run both notebooks side by side; return 0 if the verdict is good."""
    commentary = _Commentary(out)
    training, exploration = stage.notebooks
    first = Notebook(training, "A", stage.env, commentary.now)
    notebooks = [first, Notebook(exploration, "B", stage.env, commentary.now, after=first)]
    commentary.now("starting two kernels, A and B; each will hold 60 % of the GPU")
    cast: Cast | None = None
    timeline: Timeline | None = None
    try:
        for notebook in notebooks:
            notebook.open()
        cast = Cast(stage, notebooks)
        timeline = Timeline(stage.journal, cast.name, commentary.at)
        timeline.start()
        for notebook in notebooks:
            notebook.start()
        for notebook in notebooks:
            notebook.join(ENDS_WITHIN_S)
        timeline.stop()

        intact = {notebook.letter: notebook.intact for notebook in notebooks}
        good, lines = verdict(timeline.history(), timeline.suspensions, cast.letters, intact)
        failures = [f"  {n.letter} failed: {n.failure}" for n in notebooks if n.failure]
        if len(cast.letters) < len(notebooks):
            failures.append("  Kiwi is not active in the kernels (`kiwi doctor` says why)")
        failures += [f"  {n.letter} did not end in time" for n in notebooks if n.is_alive()]
        good = good and not failures
        where = "on an EMULATED GPU" if stage.emulated else "on a real GPU"
        out.write("\n" + "\n".join([*lines, *failures]) + "\n")
        out.write(f"\nVERDICT: {'GOOD' if good else 'NOT GOOD'} ({where})\n")
        out.flush()
        return 0 if good else 1
    finally:
        for notebook in notebooks:
            notebook.close()
        if cast is not None:
            cast.close()


class Cast:
    """Maps sessions to notebooks. A kernel joins at its first GPU cell, so its session is looked up
    when it first appears in the journal."""

    def __init__(self, stage: DemoStage, notebooks: list[Notebook]) -> None:
        self._client = stage.client()
        self._letters_by_pid = {notebook.pid: notebook.letter for notebook in notebooks}
        self.letters: dict[str, str] = {}

    def name(self, session: str) -> str:
        if session not in self.letters:
            for known in self._client.status().sessions:
                if known.pid in self._letters_by_pid:
                    self.letters[known.id] = self._letters_by_pid[known.pid]
        return self.letters.get(session, session)

    def close(self) -> None:
        self._client.close()
