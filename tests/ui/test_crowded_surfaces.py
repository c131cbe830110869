"""Tests of a crowded GPU in a real JupyterLab, with disturbances. Every surface is read at random
moments: sidebar, status bar, waiting line, ``kiwi status``, ``%kiwi status``, REST.

``KIWI_TRUTH_MINUTES=30`` (``make truth MINUTES=30``) sets the duration. The readings are in
``test-artifacts/ui/crowded-surfaces.txt``.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest
from cli_process import finish, start_kiwi
from daemon import wait_until
from lab_page import await_in
from sharing_stage import TAKE, USE, Stage
from surfaces import (
    QUIET_S,
    SLACK_S,
    Watch,
    agree,
    may_fall_s,
    seconds_of,
    unchanged,
    watching,
)

from kiwi_core.states import SessionState
from kiwi_core.terms import HELD_UP, NOBODY_CAN_TELL, OUTSIDE
from kiwi_core.units import ordinal
from kiwi_core.wire.words import turn_text, wait_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_page import LabPage, NotebookPane

    from kiwi_core.wire.status import GpuStatus, QueueEntry, SessionStatus

MINUTES: Final = float(os.environ.get("KIWI_TRUTH_MINUTES", "0"))
MOMENTS: Final = 4
"""The least number of moments."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600 + 90 * MINUTES)]

LONG: Final = ("long-a.ipynb", "long-b.ipynb", "long-c.ipynb")
SHORT: Final = "short.ipynb"
ONLOOKER: Final = "onlooker.ipynb"
CROWD: Final = (*LONG, SHORT)

STRANGE: Final = {
    r"side by side|in turns|in anybody's way": "the terms are in parallel, one at a time",
    r"mov(ing|ed) (out|in)\b|coming back": "the term is paging",
    r"take turns|turns? \d": "the terms are quantum and anti-thrash",
    r"\bfor 0(\.0)? s": "a figure without a meaning",
    r"\bk[0-9a-f]{10}\b": "people know notebooks by their names",
}
"""Patterns of texts that no surface shows, with the reason."""

BETWEEN: Final = 3
"""Moments between two disturbances."""

SAMPLE_MS: Final = 250
DRAWN_MS: Final = 1100

TAKEN_S: Final = 180.0
"""Within this time a restarted kernel gets its turn, with three others before it."""

_READ = """() => {
  const text = node => (node?.innerText ?? '').replace(/\\s+/g, ' ').trim();
  const panel = document.querySelector('[data-kiwi="panel"]');
  const mine = panel.querySelector('[data-kiwi="my-wait"]');
  const own = hook => text(mine?.querySelector(`[data-kiwi="${hook}"]`));
  // The row of the notebook in large says "this one": its figure stands in the card.
  const large = {
    'queue-entry': own('countdown') || text(mine?.querySelector('.jp-Kiwi-wait-large')),
    'holder': own('time-left')
  };
  const people = name => [...panel.querySelectorAll(`[data-kiwi="${name}"]`)].map(node => {
    const said = text(node.querySelector('.jp-Kiwi-amount'));
    const note = text(node.querySelector('[data-kiwi="queue-note"]'));
    const row = note ? `${said} (${note})` : said;
    return [node.dataset.session, said === 'this one' ? large[name] : row];
  });
  const lines = {};
  for (const widget of window.jupyterapp.shell.widgets('main')) {
    if (!widget.context?.path || !widget.sessionContext) continue;
    const all = [...widget.node.querySelectorAll('.jp-kiwiWaitLine [role="status"]')];
    lines[widget.context.path] = all.map(text).filter(said => said).join(' | ');
  }
  return {
    queue: people('queue-entry'), holders: people('holder'), lines,
    mine: text(mine), large: text(mine?.querySelector('.jp-Kiwi-wait-large')),
    status: text(document.querySelector('[data-kiwi="status-item"]')),
    panel: text(panel), why: text(panel.querySelector('[data-kiwi="why"]')),
  };
}"""

_READ_FRESH = f"""async () => {{
  // The page draws its figures each second: one that has stood still does so before this ends.
  await new Promise(resolve => setTimeout(resolve, {DRAWN_MS}));
  return ({_READ})();
}}"""

_SAMPLE = f"""() => {{
  const read = {_READ};
  window.kiwiSamples = [];
  setInterval(() => {{
    try {{
      const {{ queue, holders }} = read();
      window.kiwiSamples.push([performance.now() / 1000, holders.map(each => each[0]), queue]);
    }} catch {{ /* the sidebar is not there */ }}
  }}, {SAMPLE_MS});
}}"""

_TAKE_SAMPLES = "() => window.kiwiSamples.splice(0)"

_ASK = """async ([path, code]) => {
  let text = '';
  for (const widget of window.jupyterapp.shell.widgets('main')) {
    if (widget.context?.path !== path || !widget.sessionContext) continue;
    const future = widget.sessionContext.session.kernel.requestExecute(
      { code, store_history: false });
    future.onIOPub = ({ content }) => { text += content.data?.['text/plain'] ?? ''; };
    await future.done;
  }
  return text;
}"""


@dataclass
class Moment:
    """What all surfaces say while nothing changes but the time."""

    status: GpuStatus
    rest: dict[str, Any]
    text: str
    magic: str
    page: dict[str, Any]
    front: str
    took_s: float
    """The time between the first question and the last."""

    @property
    def slack_s(self) -> float:
        return max(SLACK_S, self.took_s)

    def contradictions(self) -> list[str]:
        found: list[str] = self._strange_words()
        for check in (self._order, self._waits, self._turns, self._in_front, self._sharing):
            try:
                check()
            except AssertionError as error:
                found.append(str(error))
        return found

    def _name(self, id_: str) -> str:
        return next(s.name for s in self.status.sessions if s.id == id_)

    def _order(self) -> None:
        queue = [entry.session for entry in self.status.queue]
        said = {
            "REST": ([e["session"] for e in self.rest["queue"]], self.rest["holders"]),
            "sidebar": ([id_ for id_, _ in self.page["queue"]],
                        [id_ for id_, _ in self.page["holders"]]),
            "kiwi status": ([self._id(name) for name in re.findall(
                r"\d\. (\S+) \(\w+\):", self.text)], self.status.holders),
            "%kiwi status": ([self._id(name) for name in re.findall(
                r"^\d\w\w +([^ ,\n]+)", self.magic, re.M)], self.status.holders),
        }  # fmt: skip
        for surface, order in said.items():
            assert order == (queue, self.status.holders), (surface, order, queue)
        held = [self._name(id_) for id_ in self.status.holders]
        assert re.search(rf"^Has the GPU +{', '.join(held) or 'nobody'}$", self.magic, re.M), held
        assert self.status.queue or "nobody waits" in self.text

    def _id(self, name: str) -> str:
        return next((s.id for s in self.status.sessions if s.name == name), name)

    def _waits(self) -> None:
        sidebar = dict(self.page["queue"])
        for entry, shown in zip(self.status.queue, self.rest["queue"], strict=True):
            told, name = wait_text(entry), self._name(entry.session)
            assert shown["blocked"] == entry.blocked, (shown, entry)
            texts = {
                "sidebar": _same_words(sidebar[entry.session]),
                "kiwi status": self._one(
                    rf"{entry.position}\. {name} \(\w+\): (.+) \(has", self.text
                ),
                "%kiwi status": self._one(
                    rf"^{ordinal(entry.position)} +{name}(?:, (.+))?$", self.magic
                ),
                "cell": self.page["lines"][name],
            }  # fmt: skip
            for surface, text in texts.items():
                assert agree(text, told, self.slack_s), (surface, text, told, entry)
            self._line(entry, texts["cell"])

    def _line(self, entry: QueueEntry, line: str) -> None:
        state = next(s.state for s in self.status.sessions if s.id == entry.session)
        suspended = line.startswith("Suspended in mid-cell")
        assert suspended == (state is SessionState.SUSPENDED), (line, state)
        if not entry.blocked:
            assert f"{ordinal(entry.position)} in line" in line, (line, entry)
            holders = [self._name(id_) for id_ in self.status.holders]
            assert all(holder in line for holder in holders), (line, holders)

    def _turns(self) -> None:
        sidebar = dict(self.page["holders"])
        for session in self.status.sessions:
            if session.id not in self.status.holders:
                continue
            told = turn_text(self.status, session)
            texts = {
                "sidebar": sidebar[session.id],
                "kiwi status": self._one(rf"{session.name} \(\w+\)(?:, (.+))?$", self.text),
            }
            for surface, text in texts.items():
                assert agree(text, told, self.slack_s), (surface, text, told, session)
            assert self.page["lines"][session.name] == "", "a holder's cell says no wait"

    def _in_front(self) -> None:
        """The status bar and the large card show the notebook in front."""
        session = next((s for s in self.status.sessions if s.name == self.front), None)
        if session is None:
            return
        status, mine, large = self.page["status"], self.page["mine"], self.page["large"]
        entry = next((e for e in self.status.queue if e.session == session.id), None)
        assert self.front in mine, (mine, self.front)
        if entry is not None:
            told = wait_text(entry)
            assert entry.blocked or status.startswith(f"Emulated GPU: {ordinal(entry.position)}"), (
                status
            )
            assert agree(status, told, self.slack_s), (status, told)
            assert entry.blocked or agree(large, told, self.slack_s), (large, told)
            place = f"{ordinal(entry.position)} of {len(self.status.queue)}"
            assert place in mine, (mine, place)
        elif session.id in self.status.holders:
            assert status == "Emulated GPU: yours", status
            assert large.startswith("Has the GPU"), large
            told = turn_text(self.status, session)
            assert agree(large, told, self.slack_s), (large, session)
        else:
            assert "in line" not in mine, (mine, session)
            assert not large.startswith("Has the GPU"), (large, session)

    def _sharing(self) -> None:
        """All say how the GPU is shared in the same words, and why others wait all the same."""
        sharing = self.status.scheduler.sharing
        assert sharing in self.text, (sharing, self.text)
        assert sharing in self.magic, (sharing, self.magic)
        if self.status.queue:
            assert self.page["why"] == f"{sharing[0].upper()}{sharing[1:]}.", sharing
        if self.status.queue and not self.status.scheduler.serialised:
            assert "who waits" in sharing, sharing

    def _strange_words(self) -> list[str]:
        """Return what no surface may say at any moment."""
        texts = {
            "sidebar": self.page["panel"],
            "status bar": self.page["status"],
            "cells": " ".join(self.page["lines"].values()),
            "kiwi status": self.text,
            "%kiwi status": self.magic,
        }
        found = [
            f"{surface} says {match[0]!r}: {why}"
            for surface, text in texts.items()
            for pattern, why in STRANGE.items()
            if (match := re.search(pattern, text, re.IGNORECASE))
        ]
        if "`" in texts["sidebar"] + texts["status bar"] + texts["cells"]:
            found.append(f"backticks where there is code to show it: {texts}")
        if not self.status.outside:
            found += [f"{s} knows programs outside Kiwi" for s, t in texts.items() if OUTSIDE in t]
        return found

    def _one(self, pattern: str, text: str) -> str:
        found = re.search(pattern, text, re.M)
        assert found, (pattern, text)
        return found[1] or ""


def _same_words(said: str) -> str:
    """Return the text of a waiting notebook's row or card in the form of the other surfaces."""
    said = said.replace(NOBODY_CAN_TELL, "")
    return {"Waiting": "", "Held up": HELD_UP}.get(said, said)


@dataclass
class Samples:
    """What the sidebar shows, four times a second; each sample is compared with the previous
    one."""

    count: int = 0
    found: list[str] = field(default_factory=list)
    _last: tuple[float, list[str], list[list[str]]] | None = None

    def forget(self) -> None:
        """Do not compare the next sample, because the test has changed something."""
        self._last = None

    def take(self, samples: list[tuple[float, list[str], list[list[str]]]]) -> None:
        for sample in samples:
            self.count += 1
            if self._last is not None:
                self._compare(self._last, sample)
            self._last = sample
            twice = set(sample[1]) & {id_ for id_, _ in sample[2]}
            if twice:
                self.found.append(f"the sidebar shows {twice} as holder and as waiting")

    def _compare(self, then: Any, now: Any) -> None:
        was = {id_: (place, text) for place, (id_, text) in enumerate(then[2])}
        for place, (id_, text) in enumerate(now[2]):
            if id_ not in was:
                continue
            then_place, then_text = was[id_]
            before_s, after_s = seconds_of(then_text), seconds_of(text)
            if before_s is None or after_s is None:
                continue
            told = f"the sidebar says {text!r} {now[0] - then[0]:.2f} s after {then_text!r}"
            coarse = "\N{EN DASH}" in text or "up to" in text  # from 20 s on in steps of 5 s
            if after_s > before_s + (3 if coarse else 1) and "(" not in text:
                self.found.append(f"{told}: it rises without a reason")
            same = place == then_place and then[1] == now[1]
            steps_s = 30 if "min" in then_text else 5  # rounded figures fall by a step
            if same and before_s - after_s > may_fall_s(before_s, now[0] - then[0]) + steps_s:
                self.found.append(f"{told}: it falls at once")


class Run:
    """The crowd, and everything that the test asks of it."""

    def __init__(self, stage: Stage, page: LabPage, enough: Path, seed: int) -> None:
        self.stage, self.page, self.enough = stage, page, enough
        self.rng = random.Random(seed)
        self.panes: dict[str, NotebookPane] = {}
        self.front = ONLOOKER
        self.samples = Samples()
        self.seen: list[Moment] = []
        self.found: list[str] = []
        self.tries = 0
        self.disturbed: list[str] = []

    def begin(self) -> None:
        take = "from gpu_work import Memory\nmemory = Memory(60, {})"
        for number, path in enumerate(CROWD):
            use = f"memory.work(until='{self.enough}')" if path in LONG else "memory.work(1.0)"
            self.stage.lab.write_notebook(path, [take.format(number), use])
        self.stage.lab.write_notebook(ONLOOKER, ["1"])
        self.page.panel()
        for path in (*CROWD, ONLOOKER):
            self.panes[path] = self.page.open_notebook(path)
        for path in CROWD:
            self.run_all(path)
        takes = [self.panes[path] for path in CROWD]
        wait_until(lambda: not any(t.running(TAKE) for t in takes), "all have memory", TAKEN_S)
        self.page.page.evaluate(_SAMPLE)

    def run_all(self, path: str) -> None:
        self.panes[path].start(TAKE)
        self.panes[path].start(USE)
        self.front = path

    def quiet(self, seconds: float) -> None:
        """Wait while the page continues."""
        self.page.page.wait_for_timeout(1000 * seconds)
        self.samples.take(self.page.page.evaluate(_TAKE_SAMPLES))

    def moment(self) -> None:
        """Read all surfaces once more, if nothing changes meanwhile."""
        self.tries += 1
        self.quiet(self.rng.uniform(0, 1.0))
        if not self.panes[SHORT].running(USE) and self.rng.random() < 0.7:
            self.panes[SHORT].start(USE)
            self.front = SHORT
        if self.rng.random() < 0.7:
            self.front = self.rng.choice((*CROWD, ONLOOKER))
            self.panes[self.front].to_front()
        first = self.stage.daemon.status()
        self.quiet(QUIET_S)
        before, began_s = self.stage.daemon.status(), time.monotonic()
        page = await_in(self.page.page, _READ_FRESH)
        rest = self.stage.lab.rest("GET", "kiwi/api/status?history_s=0")["gpus"][0]
        magic = await_in(self.page.page, _ASK, [ONLOOKER, "%kiwi status"])
        text = finish(start_kiwi("status", **self.stage.daemon.env)).out
        after = self.stage.daemon.status()
        if not unchanged(first, before, after):
            return
        took_s = time.monotonic() - began_s
        moment = Moment(before, rest, text, magic, page, self.front, took_s)
        self.seen.append(moment)
        for said in moment.contradictions():
            self.found.append(f"{said}\n    in {json.dumps(page)}\n{text}\n{magic}")

    def states(self) -> set[SessionState]:
        return {session.state for moment in self.seen for session in moment.status.sessions}

    # --- what is done to them -------------------------------------------------------------------

    def disturb(self) -> None:
        every = [self.settings, self.policy, self.restart_kernel, self.kill_daemon]
        how = every[len(self.disturbed) % len(every)]
        self.disturbed.append(how.__name__)
        self.quiet(0.0)
        how()
        self.page.page.wait_for_timeout(1000 * QUIET_S)
        self.page.page.evaluate(_TAKE_SAMPLES)
        self.samples.forget()

    def settings(self) -> None:
        self.stage.set(tq_s=self.rng.choice((6.0, 9.0, 12.0)))

    def policy(self) -> None:
        now = self.stage.daemon.status().scheduler.policy
        self.stage.set(policy="round-robin" if now == "interactive" else "interactive")

    def restart_kernel(self) -> None:
        path = self.rng.choice(LONG)
        kernel = self.stage.lab.kernel_id(path)
        self.stage.lab.rest("POST", f"api/kernels/{kernel}/restart")
        wait_until(lambda: not self._session_of(kernel), f"the session of {path} ends")
        self.page.shown(path)
        self.run_all(path)
        # The kernel needs its memory before the next disturbance: a newcomer that waits while there
        # is no daemon continues without Kiwi, and finds no room.
        take = self.panes[path]
        wait_until(lambda: self._session_of(kernel) and not take.running(TAKE), path, TAKEN_S)

    def kill_daemon(self) -> None:
        pid = self.stage.daemon.kill_child()
        self.stage.daemon.wait_for(
            lambda s: s.daemon_pid != pid and len(s.sessions) >= len(LONG), "another daemon"
        )

    def _session_of(self, kernel: str) -> SessionStatus | None:
        sessions = self.stage.daemon.status().sessions
        return next((s for s in sessions if s.kernel_id == kernel), None)


def _report(run: Run, watch: Watch, found: list[str], minutes: float) -> str:
    words = f"{len(run.seen)} moments compared in {minutes:.1f} min ({run.tries} tries), "
    words += f"{run.samples.count} looks at the sidebar, {watch.words} words of the daemon, "
    words += f"disturbed {len(run.disturbed)} times; {len(found)} contradictions"
    return "\n\n".join([words, *found])


def test_no_two_surfaces_contradict_each_other(
    make_stage: Callable[..., Stage], open_lab: Callable[..., LabPage], artifacts: Path
) -> None:
    stage = make_stage("1x128MiB", "--tq", "9")
    run = Run(stage, open_lab(stage, height=1200), stage.enough_path(), seed=7)
    began_s = time.monotonic()

    def report() -> list[str]:
        found = [*run.found, *run.samples.found, *watch.contradictions()]
        text = _report(run, watch, found, (time.monotonic() - began_s) / 60)
        (artifacts / "crowded-surfaces.txt").write_text(text)
        return found

    with watching(stage.daemon) as watch:
        run.begin()
        # However long the turns last, one moment has a notebook that is suspended.
        while (
            len(run.seen) < MOMENTS
            or SessionState.SUSPENDED not in run.states()
            or time.monotonic() - began_s < 60 * MINUTES
        ):
            assert run.tries < 20 * (len(run.seen) + MOMENTS), "the GPU is hardly ever quiet"
            seen = len(run.seen)
            run.moment()
            if len(run.seen) > seen and (len(run.seen) % BETWEEN == 0 or not MINUTES):
                report()
                run.disturb()
        run.enough.touch()
        for path in CROWD:
            run.panes[path].wait_end(USE)
    found = report()
    assert not found, found
