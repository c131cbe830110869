"""The time from an event at the daemon to the sidebar of a real JupyterLab.

The benchmark uses a real headless Chromium with the sidebar open, a real Jupyter server and a real
daemon on an emulated GPU. One session holds the GPU; another one asks for it and leaves again, at
random moments. The clock starts when the request is sent to the daemon, and stops after the frame
was painted in which the sidebar shows that session in the queue (or no longer shows it). Four times
separate the stages: when an observer of the daemon gets the event; the server's clock in its delta;
when the browser gets the delta; when the page has changed. All clocks are of one machine; the
browser's clock is first compared with this process's.

"Quiet": those two sessions only. "Crowd": beside 50 sessions that take the GPU three times a
second, so that deltas wait for their turn at the stream's rate, and the page has more to draw.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from common import Samples, arguments, machine, report, table, target
from lab_load import crowd, running_browser, running_stage
from lab_page import LabPage
from session_program import SessionProgram
from talker import Talker

if TYPE_CHECKING:
    import argparse

    from playwright.sync_api import Page
    from sharing_stage import Stage

LIMIT_MS = 500.0

STAGES = ("daemon", "server", "browser", "page", "frame")

_NOW = "const now = () => performance.timeOrigin + performance.now();"

LISTEN = (
    "(() => {"
    + _NOW
    + """
  const Real = window.WebSocket;
  window.kiwiHeard = [];
  window.WebSocket = class extends Real {
    constructor(url, protocols) {
      super(url, protocols);
      if (String(url).includes('kiwi/api/events'))  // before the page's own listener
        this.addEventListener('message', event => window.kiwiHeard.push([now(), event.data]));
    }
  };
})()"""
)

ARM = (
    "([session, wanted]) => {"
    + _NOW
    + """
  const panel = document.querySelector('[data-kiwi="panel"]');
  const entry = `[data-kiwi="queue-entry"][data-session="${session}"]`;
  window.kiwiHeard.length = 0;
  window.kiwiDrawn = new Promise(resolve => {
    const observer = new MutationObserver(() => {
      if ((panel.querySelector(entry) !== null) !== wanted) return;
      observer.disconnect();
      const changed = now();
      requestAnimationFrame(() => {
        const channel = new MessageChannel();  // its message comes after the frame
        channel.port1.onmessage = () => resolve([changed, now()]);
        channel.port2.postMessage(0);
      });
    });
    observer.observe(panel, { childList: true, subtree: true, attributes: true });
  });
}"""
)


class Observer:
    """An observer of the daemon, which records when each session joins or leaves the queue."""

    def __init__(self, stage: Stage) -> None:
        self._client = stage.daemon.client()
        self._client.connect()
        self._heard: list[tuple[float, frozenset[str]]] = []
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        for status in self._client.watch():
            self._heard.append((time.time(), frozenset(one.session for one in status.queue)))

    def first(self, since: float, session: str, waits: bool) -> float:
        """Return when the observer first got the change; it may get it later than the browser."""
        ends_s = time.monotonic() + 10
        while time.monotonic() < ends_s:
            for at, queue in self._heard:
                if at >= since and (session in queue) == waits:
                    return at
            time.sleep(0.01)
        raise AssertionError("the observer did not hear of it")

    def close(self) -> None:
        self._client.close()
        self._thread.join()


_bursts = itertools.count(1)
"""Numbers of bursts: the daemon counts the bursts of a process, not of a connection."""


class Asker:
    """The session that asks and leaves, in this process."""

    def __init__(self, stage: Stage) -> None:
        (socket,) = stage.daemon.sockets()
        self._talker = Talker(socket, timeout_s=60.0)
        self.session = str(self._talker.hello(role="session", name="asks")["session"])
        self._burst = 0

    def ask(self) -> float:
        """Ask for the GPU; return the time just before."""
        self._burst = next(_bursts)
        at = time.time()
        self._talker.say("acquire", burst=self._burst)
        self._talker.until("waiting")
        return at

    def go_away(self) -> float:
        at = time.time()
        self._talker.say("withdraw", burst=self._burst)
        self._talker.until("withdrawn")
        return at

    def close(self) -> None:
        self._talker.close()


def clock_offset_ms(page: Page) -> float:
    """Return the browser's clock minus ours, by the quickest of some round trips."""
    best = (float("inf"), 0.0)
    for _ in range(50):
        began = time.time()
        theirs = page.evaluate("() => performance.timeOrigin + performance.now()")
        ended = time.time()
        best = min(best, (ended - began, theirs - 1000 * (began + ended) / 2))
    return best[1]


class Course:
    """A course of rounds: the session asks, is shown, leaves, and is no longer shown."""

    def __init__(self, stage: Stage, page: Page) -> None:
        self._page = page
        self._uuid = stage.daemon.status().uuid
        self._observer = Observer(stage)
        self._asker = Asker(stage)
        self._holder = SessionProgram(stage.daemon, name="holds")
        self.offset_ms = clock_offset_ms(page)
        self.samples: dict[str, Samples] = {name: Samples() for name in ("all", *STAGES)}

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._holder.worker.do("begin()")
            self._event(True)
            self._event(False)
            self._holder.worker.do("client.end_burst()")

    def _event(self, asks: bool) -> None:
        session = self._asker.session
        self._page.evaluate(ARM, [session, asks])
        time.sleep(random.uniform(0.3, 1.3))  # at any phase of the daemon's and server's timers
        at = self._asker.ask() if asks else self._asker.go_away()
        changed, painted = self._page.evaluate("() => window.kiwiDrawn")
        heard, said = self._delta(1000 * at, asks)
        observed = self._observer.first(at, session, asks)
        marks = [at * 1e3, observed * 1e3, said * 1e3]
        marks += [mark - self.offset_ms for mark in (heard, changed, painted)]
        for name, begin, end in zip(STAGES, marks, marks[1:], strict=False):
            self.samples[name].add(1e6 * (end - begin))
        self.samples["all"].add(1e6 * (marks[-1] - marks[0]))

    def _delta(self, since_ms: float, waits: bool) -> tuple[float, float]:
        """Return when the browser got the delta with the change, and the server's clock in it
        (s)."""
        for at, text in self._page.evaluate("() => window.kiwiHeard"):
            queue = json.loads(text).get("gpus", {}).get(self._uuid, {}).get("set", {}).get("queue")
            if queue is None or at - self.offset_ms < since_ms:
                continue
            if any(one["session"] == self._asker.session for one in queue) == waits:
                return at, float(json.loads(text)["now"])
        raise AssertionError("drawn, and never heard")

    def close(self) -> None:
        self._asker.close()
        self._holder.close()
        self._observer.close()


def measure(stage: Stage, page: Page, rounds: int) -> dict[str, Any]:
    course = Course(stage, page)
    try:
        course.run(rounds)
    finally:
        course.close()
    found: dict[str, Any] = {"clock_offset_ms": round(course.offset_ms, 3)}
    for name, samples in course.samples.items():
        found[name] = {
            "n": len(samples.values_ns),
            **{
                f"p{percent}_ms": round(samples.percentile_ns(percent) / 1e6, 1)
                for percent in (50, 95, 100)
            },
        }
    return found


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}; the browser's clock is off by {found['clock_offset_ms']} ms (taken out)")
    names = {"all": "event to pixel", "daemon": "  request → daemon's word",
             "server": "  → server's delta", "browser": "  → browser has it",
             "page": "  → page changed", "frame": "  → painted"}  # fmt: skip
    rows = [(names[part], *found[part].values()) for part in names]
    table(("ms", "n", "median", "p95", "max"), rows)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=50, help="two events each")


def main() -> int:
    args = arguments(__doc__, options)
    rounds = 3 if args.quick else args.rounds
    where = machine("emulated")
    runs = {}
    with ExitStack() as stack:
        browser = stack.enter_context(running_browser())
        stage = stack.enter_context(
            running_stage("1x256MiB", "--anti-thrash", "always", "--tq", "600")
        )
        where["chromium"] = browser.version
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        page = LabPage(context, stage.lab, "pixel")
        page.page.add_init_script(LISTEN)
        page.open()
        page.panel()
        runs["quiet"] = measure(stage, page.page, rounds)
        with crowd(stage, 50, 3.0, 30.0 + 10.0 * rounds, hold_ms=1):
            runs["crowd"] = measure(stage, page.page, rounds)
        context.close()
    for name, found in runs.items():
        show(name, found)
    targets = [
        target(f"event to pixel, {name}, {what}", found["all"][key], LIMIT_MS, "ms")
        for name, found in runs.items()
        for what, key in (("median", "p50_ms"), ("95th percentile", "p95_ms"))
    ]
    print()
    report("stream_to_pixel", {"machine": where, "targets": targets, "runs": runs}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
