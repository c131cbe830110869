"""Tests that no two surfaces of a crowded GPU contradict each other at random moments.

``KIWI_TRUTH_MOMENTS=200`` reads more moments; ``-m 'slow or not slow'`` adds the other policy.
``tests/support/surface_words.json`` tests what the sidebar shows of the server's answer.
"""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
from daemon import wait_until
from lab import running_lab
from notebooks import Notebook, finish_all
from surfaces import QUIET_S, SLACK_S, agree, unchanged, watching

from kiwi_core.states import SessionState
from kiwi_core.units import ordinal
from kiwi_core.wire.words import turn_text, wait_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from cli_process import Result
    from daemon import Daemon
    from kernels import Cell
    from lab import Lab

    from kiwi_core.wire.status import GpuStatus, QueueEntry

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MOMENTS: Final = int(os.environ.get("KIWI_TRUTH_MOMENTS", "3"))


@dataclass
class Moment:
    """What all surfaces say while nothing changes but the time."""

    status: GpuStatus
    text: str
    rest: dict[str, Any]
    lines: dict[str, str]
    """The lines below the cells, by notebook."""
    took_s: float
    """The time between the first question and the last."""

    @property
    def slack_s(self) -> float:
        return max(SLACK_S, self.took_s)

    def check(self, notebooks: dict[str, Notebook]) -> None:
        status = self.status
        ids = {name: notebook.id for name, notebook in notebooks.items()}
        names = {id_: name for name, id_ in ids.items()}
        assert self.rest["holders"] == status.holders
        assert [e["session"] for e in self.rest["queue"]] == [e.session for e in status.queue]
        for entry, shown in zip(status.queue, self.rest["queue"], strict=True):
            self._check_waiter(entry, shown, names[entry.session])
        for session in status.sessions:
            if session.id in status.holders:
                assert session.state in (SessionState.RUNNING, SessionState.PAGING_OUT)
                said = re.search(rf"{session.name} \(\w+\)(?:, (.+))?$", self._fact("holder"), re.M)
                assert said, self.text
                told = turn_text(status, session)
                assert agree(said[1] or "", told, self.slack_s), (said[1], session)
                assert self.lines[names[session.id]] == "", "a holder's cell says no wait"
        if not status.queue:
            assert "nobody waits" in self._fact("queue")
        self._check_bound()

    def _check_waiter(self, entry: QueueEntry, shown: dict[str, Any], name: str) -> None:
        told = wait_text(entry)
        assert (shown["position"], shown["blocked"]) == (entry.position, entry.blocked)
        if entry.expected_high_s is not None:
            assert abs(shown["expected_high_s"] - entry.expected_high_s) <= self.slack_s
        queued = re.search(rf"{entry.position}\. {name}.ipynb \(\w+\): (.+) \(has", self.text)
        assert queued, self.text
        assert agree(queued[1], told, self.slack_s), (queued[1], told)
        line = self.lines[name]
        assert agree(line, told, self.slack_s), (line, told)
        state = next(s.state for s in self.status.sessions if s.id == entry.session)
        suspended = line.startswith("Suspended in mid-cell")
        assert suspended == (state is SessionState.SUSPENDED), (line, state)
        if not entry.blocked:
            assert f"{ordinal(entry.position)} in line" in line, (line, entry)
            holders = [s.name for s in self.status.sessions if s.id in self.status.holders]
            assert all(holder in line for holder in holders), (line, holders)

    def _check_bound(self) -> None:
        """The first in line is told no longer wait than the turn and the swap may last."""
        left_s = [s.time_left_s for s in self.status.sessions if s.id in self.status.holders]
        for entry in self.status.queue[:1]:
            if entry.expected_low_s is None or not left_s or None in left_s:
                continue
            swap_s = self.status.scheduler.swap_round_trip_s or 0.0
            assert entry.expected_low_s <= max(map(float, left_s)) + 2 * swap_s + self.slack_s  # type: ignore[arg-type]

    def _fact(self, name: str) -> str:
        """Return the lines of ``kiwi status`` that begin with ``name``."""
        found = re.search(rf"^  {name} .*(?:\n {{12}}.*)*", self.text, re.M)
        assert found, self.text
        return found[0]


@dataclass
class Crowd:
    daemon: Daemon
    lab: Lab
    kiwi: Callable[..., Result]
    notebooks: dict[str, Notebook]
    cells: dict[str, Cell]

    def moment(self) -> Moment | None:
        """Read all surfaces; return ``None`` if something changed meanwhile."""
        first = self.daemon.status()
        self._pump_for(QUIET_S)
        before, began_s = self.daemon.status(), time.monotonic()
        rest = self.lab.rest("GET", "kiwi/api/status?history_s=0")["gpus"]
        text = self.kiwi(self.daemon, "status").out
        self._pump_until_drawn(before)
        after = self.daemon.status()
        if not unchanged(first, before, after):
            return None
        lines = {name: (["", *cell.displays()])[-1] for name, cell in self.cells.items()}
        return Moment(before, text, rest[0], lines, time.monotonic() - began_s)

    def _pump_until_drawn(self, status: GpuStatus) -> None:
        """Wait until every waiting notebook has drawn its line twice more, as it does each second,
        and every holder has removed it: a kernel that stood still shows what was. Return as well
        once something has changed."""
        queued = {entry.session for entry in status.queue}
        ids = {name: notebook.id for name, notebook in self.notebooks.items()}
        drawn = {name: len(cell.displays()) for name, cell in self.cells.items()}

        def is_drawn(name: str) -> bool:
            shown = self.cells[name].displays()
            if ids[name] in status.holders:
                return not any(shown[-1:])
            return ids[name] not in queued or len(shown) >= drawn[name] + 2

        def is_over() -> bool:
            self._pump_for(0.0)
            return all(map(is_drawn, self.cells)) or not unchanged(status, self.daemon.status())

        wait_until(is_over, "the lines are drawn again")

    def _pump_for(self, seconds: float) -> None:
        ends_at_s = time.monotonic() + seconds
        while True:
            for notebook in self.notebooks.values():
                notebook.kernel.pump(0.01)
            if time.monotonic() >= ends_at_s:
                return


def _states(moments: list[Moment]) -> set[SessionState]:
    return {session.state for moment in moments for session in moment.status.sessions}


@pytest.mark.parametrize(
    "policy", ["interactive", pytest.param("round-robin", marks=pytest.mark.slow)]
)
def test_all_surfaces_say_the_same_of_a_crowded_gpu(
    policy: str,
    make_daemon: Callable[..., Daemon],
    make_notebook: Callable[..., Notebook],
    kiwi: Callable[..., Result],
) -> None:
    daemon = make_daemon("1x128MiB", "--tq", "6", "--policy", policy)
    enough = daemon.directory / "enough"
    notebooks = {name: make_notebook(daemon, name, mib=60) for name in "ABCD"}
    rng = random.Random(policy)
    with running_lab(daemon.env, app="server") as lab, watching(daemon) as watch:
        cells = {name: one.work(until=enough) for name, one in notebooks.items()}
        crowd = Crowd(daemon, lab, kiwi, notebooks, cells)
        seen: list[Moment] = []
        tries = 0
        # However long the first turns last, one moment has a notebook that is suspended.
        while len(seen) < MOMENTS or SessionState.SUSPENDED not in _states(seen):
            tries += 1
            assert tries < 20 * MOMENTS, "the GPU is hardly ever quiet"
            time.sleep(rng.uniform(0, 0.5))
            if (moment := crowd.moment()) is not None:
                moment.check(notebooks)
                seen.append(moment)
        enough.touch()
        finish_all({notebook: cells[name] for name, notebook in notebooks.items()}, 120.0)
        for name, cell in cells.items():
            notebooks[name].kernel.until(
                lambda cell=cell: not any(cell.displays()[-1:]),  # type: ignore[misc]
                "no line outlives its cell",
            )
    assert watch.words > MOMENTS
    assert not watch.contradictions()
