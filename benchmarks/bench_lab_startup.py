"""The cost of the labextension: the start of JupyterLab in the browser with and without it, and its
size.

A real headless Chromium loads JupyterLab of one real server again and again: with the labextension;
with it disabled in the server's page configuration (JupyterLab then still loads its files, but
activates nothing); without it; and without it once more, as a control, since two equal loads also
differ. The server looks for labextensions for each page, so one server is enough; the loads take
turns in an order that shifts. A load lasts from the start of the navigation to ``app.restored``:
all plugins that start by themselves are active and the layout is there. Each round loads the page
with an empty cache (a browser context of its own), then once more in the same context.

The processor time of the browser's and the server's processes is measured, too: it can be compared
on a machine with other load.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from common import arguments, machine, report, table, target
from lab import LABEXTENSION, TOKEN
from lab_load import running_browser, running_stage
from lab_page import await_in

if TYPE_CHECKING:
    import argparse

    from playwright.sync_api import Browser, Page
    from sharing_stage import Stage

SETTLE_MS = 1000

LIMIT = 1.05
"""Limit of the ratio to the start without it: no target of the design, but not noticeable."""

SUBJECTS = {
    "with": (True, False),
    "disabled": (True, True),
    "without": (False, False),
    "without (control)": (False, False),
}
"""Whether the labextension is installed, and whether it is disabled, by subject."""

WATCH = """(() => {
  performance.setResourceTimingBufferSize(2000);
  let app;
  window.kiwiRestored = new Promise(resolve => {
    Object.defineProperty(window, 'jupyterapp', {
      get: () => app,
      set: value => {
        app = value;
        void app.restored.then(() => resolve(performance.now()));
      }
    });
  });
})()"""
"""Script for the page; ``performance.now()`` counts from the start of the navigation."""

LOADED = """() => performance.getEntriesByType('resource')
  .filter(entry => entry.name.includes('/extensions/kiwi-jupyter/static/'))
  .map(entry => entry.name.split('/').pop().split('?')[0])"""


def all_but_ours(place: Path) -> None:
    """Link the other installed labextensions into ``place``, where the server looks."""
    for installed in LABEXTENSION.parent.iterdir():
        if installed != LABEXTENSION:
            (place / installed.name).symlink_to(installed)


def arrange(stage: Stage, looked_into: Path, there: bool, disabled: bool) -> None:
    ours = looked_into / LABEXTENSION.name
    ours.unlink(missing_ok=True)
    if there:
        ours.symlink_to(LABEXTENSION)
    place = stage.lab.directory / "config" / "labconfig" / "page_config.json"
    config = json.loads(place.read_text())
    config["disabledExtensions"][LABEXTENSION.name] = disabled
    place.write_text(json.dumps(config))


class Load(NamedTuple):
    """A load: its time, and the processor time of the browser and of the server, in ms."""

    took: float
    browser: float
    server: float


class Loader:
    def __init__(self, browser: Browser, stage: Stage) -> None:
        assert stage.lab.process is not None
        self._lab = stage.lab
        self._server = psutil.Process(stage.lab.process.pid)
        self._browser = browser
        self._cdp = browser.new_browser_cdp_session()

    def _busy_ms(self) -> tuple[float, float]:
        processes = self._cdp.send("SystemInfo.getProcessInfo")["processInfo"]
        times = self._server.cpu_times()
        return 1e3 * sum(one["cpuTime"] for one in processes), 1e3 * (times.user + times.system)

    def _load(self, page: Page, workspace: str) -> Load:
        before = self._busy_ms()
        page.goto(f"{self._lab.url}/lab/workspaces/{workspace}?token={TOKEN}", wait_until="commit")
        took_ms = float(await_in(page, "async () => await window.kiwiRestored"))
        page.wait_for_timeout(SETTLE_MS)  # work after the start belongs to this load
        after = self._busy_ms()
        return Load(took_ms, after[0] - before[0], after[1] - before[1])

    def loads(self, name: str, workspace: str) -> tuple[Load, Load, set[str]]:
        """Return a load with an empty cache, one with a full cache, and the loaded files of
        ours."""
        context = self._browser.new_context(viewport={"width": 1280, "height": 800})
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.add_init_script(WATCH)
        cold = self._load(page, workspace)
        ours = set(page.evaluate(LOADED))
        there, disabled = SUBJECTS[name]
        active = page.evaluate("() => window.jupyterapp.hasPlugin('kiwi-jupyter:sidebar')")
        assert (bool(ours), active) == (there, there and not disabled), (name, active, ours)
        warm = self._load(page, workspace)
        context.close()
        return cold, warm, ours


def sizes() -> dict[str, dict[str, int]]:
    """Return raw and compressed bytes of each file that a browser may load."""
    found = {}
    for path in sorted((LABEXTENSION / "static").iterdir()):
        if path.suffix == ".js":
            data = path.read_bytes()
            found[path.name] = {"raw": len(data), "gzip": len(gzip.compress(data, 9))}
    return found


def show_sizes(found: dict[str, dict[str, int]], at_start: set[str]) -> dict[str, Any]:
    rows = [
        (name, each["raw"], each["gzip"], "yes" if name in at_start else "")
        for name, each in found.items()
    ]
    totals = {
        f"{what}_{kind}_bytes": sum(
            each[kind] for name, each in found.items() if what == "all" or name in at_start
        )
        for what in ("all", "start")
        for kind in ("raw", "gzip")
    }
    rows.append(("all", totals["all_raw_bytes"], totals["all_gzip_bytes"], ""))
    table(("static/", "bytes", "gzip -9", "loaded at the start"), rows)
    return {"files": found, "loaded_at_start": sorted(at_start), **totals}


def compared(loads: dict[str, list[Load]]) -> dict[str, dict[str, float]]:
    """Return medians in milliseconds. ``more``: the median of the differences to the load without
    the labextension in the same round, which a growing load on the machine does not affect."""
    found: dict[str, dict[str, float]] = {}
    for name, ones in loads.items():
        found[name] = {"n": len(ones)}
        for part in Load._fields:
            mine = [getattr(one, part) for one in ones]
            without = [getattr(one, part) for one in loads["without"]]
            low, middle, high = statistics.quantiles(mine, n=4)
            more = statistics.median(a - b for a, b in zip(mine, without, strict=True))
            found[name] |= {
                f"{part}_ms": round(middle),
                f"{part}_p25_ms": round(low),
                f"{part}_p75_ms": round(high),
                f"{part}_more_ms": round(more),
                f"{part}_ratio": round(middle / statistics.median(without), 3),
            }
    return found


def show(what: str, found: dict[str, dict[str, float]]) -> None:
    for part, words in (("took", "time"), ("browser", "processor time of the browser"),
                        ("server", "processor time of the server")):  # fmt: skip
        print(f"\n{what}: {words}")
        rows = [
            (name, each["n"], *(each[f"{part}_{key}"] for key in
             ("ms", "p25_ms", "p75_ms", "more_ms", "ratio")))
            for name, each in found.items()
        ]  # fmt: skip
        table(("ms", "n", "median", "p25", "p75", "+ without, same round", "× without"), rows)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)


def main() -> int:
    args = arguments(__doc__, options)
    rounds = 2 if args.quick else args.rounds
    where = machine("emulated")
    caches: dict[str, dict[str, list[Load]]] = {
        what: {name: [] for name in SUBJECTS} for what in ("empty cache", "full cache")
    }
    at_start: set[str] = set()
    with ExitStack() as stack:
        looked_into = Path(stack.enter_context(TemporaryDirectory(prefix="kw-labextensions-")))
        all_but_ours(looked_into)
        browser = stack.enter_context(running_browser())
        stage = stack.enter_context(
            running_stage("1x256MiB", lab_options=[f"--LabApp.labextensions_path={looked_into}"])
        )
        where["chromium"] = browser.version
        loader, names = Loader(browser, stage), list(SUBJECTS)
        for number in range(-1, rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                arrange(stage, looked_into, *SUBJECTS[name])
                *both, ours = loader.loads(name, f"load-{number}-{names.index(name)}")
                at_start |= ours
                if number >= 0:  # the first rounds warm the server up
                    for samples, one in zip(caches.values(), both, strict=True):
                        samples[name].append(one)
    results: dict[str, Any] = {"machine": where, "targets": []}
    for what, loads in caches.items():
        results[what] = compared(loads)
        show(what, results[what])
        for part, words in (("took", "time"), ("browser", "processor time")):
            ratio = results[what]["with"][f"{part}_ratio"]
            results["targets"].append(target(f"{words} with / without, {what}", ratio, LIMIT))
    print()
    results["bundle"] = show_sizes(sizes(), at_start)
    report("lab_startup", results, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
