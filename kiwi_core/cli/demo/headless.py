"""The demo without a browser: real kernels, a running commentary, and a verdict."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, TextIO

from kiwi_core.cli.demo.notebook import Notebook
from kiwi_core.cli.demo.timeline import Timeline
from kiwi_core.cli.demo.verdict import verdict
from kiwi_core.errors import CallerError
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from kiwi_core.cli.demo.stage import Stage

HEAD_START_S: Final = 1.5
"""B begins so much later, so that A has the GPU by then."""

ENDS_WITHIN_S: Final = 600.0
"""It takes half a minute; on a very slow machine some."""


class _Commentary:
    """Lines from several threads, each with the seconds since the beginning."""

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


def play(stage: Stage, out: TextIO) -> int:
    """Runs both notebooks side by side; 0 if the verdict is good."""
    commentary = _Commentary(out)
    letters: dict[str, str] = {}
    notebooks = [
        Notebook(path, letter, stage.env, delay_s, commentary.now)
        for path, letter, delay_s in zip(
            stage.notebooks, ("A", "B"), (0.0, HEAD_START_S), strict=True
        )
    ]
    timeline = Timeline(stage.journal, letters, commentary.at)
    commentary.now("starting two kernels, A and B; each will hold 60 % of the GPU")
    try:
        for notebook in notebooks:
            notebook.open()
        letters.update(_sessions(stage, notebooks))
        timeline.start()
        for notebook in notebooks:
            notebook.start()
        for notebook in notebooks:
            notebook.join(ENDS_WITHIN_S)
    finally:
        for notebook in notebooks:
            notebook.close()
        if timeline.ident is not None:
            timeline.stop()
    return _conclude(stage, notebooks, timeline, letters, out)


def _sessions(stage: Stage, notebooks: list[Notebook]) -> dict[str, str]:
    """Which session is which notebook's, as soon as both kernels have joined."""
    by_pid = {notebook.pid: notebook.letter for notebook in notebooks}
    client = stage.client()
    ends_at = time.monotonic() + 60
    try:
        while time.monotonic() < ends_at:
            found = {s.id: by_pid[s.pid] for s in client.status().sessions if s.pid in by_pid}
            if len(found) == len(notebooks):
                return found
            time.sleep(0.1)
    finally:
        client.close()
    raise CallerError(
        "not-active", "The kernels did not join the daemon: Kiwi is not active in them.",
        "`kiwi doctor` says why.",
    )  # fmt: skip


def _conclude(
    stage: Stage, notebooks: list[Notebook], timeline: Timeline, letters: dict[str, str],
    out: TextIO,
) -> int:  # fmt: skip
    intact = {notebook.letter: notebook.intact for notebook in notebooks}
    good, lines = verdict(timeline.entries, letters, intact)
    failures = [f"  {n.letter} failed: {n.failure}" for n in notebooks if n.failure]
    failures += [f"  {n.letter} did not end in time" for n in notebooks if n.is_alive()]
    good = good and not failures
    where = "on an EMULATED GPU" if stage.emulated else "on a real GPU"
    out.write("\n" + "\n".join([*lines, *failures]) + "\n")
    out.write(f"\nVERDICT: {'GOOD' if good else 'NOT GOOD'} ({where})\n")
    out.flush()
    return 0 if good else 1
