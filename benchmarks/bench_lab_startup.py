"""What the labextension costs: JupyterLab's start in the browser with and without it, and its size.

A real headless Chromium loads JupyterLab of one real server again and again: with the labextension;
with it disabled in the server's page configuration (JupyterLab then loads its files all the same,
and activates nothing); without it; and without it once more, as a control, since two equal loads
differ, too. The server looks for labextensions for each page, so one server does for all, in turns,
in an order that shifts. A load lasts from the start of the navigation to ``app.restored``: all
plugins that start by themselves are active and the layout is there. First with an empty cache (a
browser context of its own), then once more in the same context.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from common import Samples, arguments, machine, report, table, target
from lab import LABEXTENSION, TOKEN
from lab_load import running_browser, running_stage
from lab_page import await_in

if TYPE_CHECKING:
    import argparse

    from playwright.sync_api import Browser, Page
    from sharing_stage import Stage

LIMIT = 1.05
"""Of the start without it: not a target of the design's, but what nobody notices."""

SUBJECTS = {
    "with": (True, False),
    "disabled": (True, True),
    "without": (False, False),
    "without (control)": (False, False),
}
"""Whether it is there, and whether it is disabled."""

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
"""``performance.now()`` counts from the start of the navigation."""

LOADED = """() => performance.getEntriesByType('resource')
  .filter(entry => entry.name.includes('/extensions/kiwi-jupyter/static/'))
  .map(entry => [entry.name.split('/').pop().split('?')[0], entry.decodedBodySize])"""


def all_but_ours(place: Path) -> None:
    """``place``, where the server looks, gets the other labextensions that are installed."""
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


def load(page: Page, stage: Stage, workspace: str) -> float:
    """Milliseconds."""
    page.goto(f"{stage.lab.url}/lab/workspaces/{workspace}?token={TOKEN}", wait_until="commit")
    return float(await_in(page, "async () => await window.kiwiRestored"))


def loads(browser: Browser, stage: Stage, name: str, workspace: str) -> tuple[float, float, Any]:
    """With an empty cache, with a full one, and what was loaded of ours."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.add_init_script(WATCH)
    cold_ms = load(page, stage, workspace)
    ours = page.evaluate(LOADED)
    there, disabled = SUBJECTS[name]
    active = page.evaluate("() => window.jupyterapp.hasPlugin('kiwi-jupyter:sidebar')")
    assert (bool(ours), active) == (there, there and not disabled), (name, active, ours)
    page.wait_for_timeout(1000)  # what it does after its start belongs to this load
    warm_ms = load(page, stage, workspace)
    page.wait_for_timeout(500)
    context.close()
    return cold_ms, warm_ms, ours


def sizes() -> dict[str, dict[str, int]]:
    """Raw and compressed bytes of each file that a browser may load."""
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


def compared(samples: dict[str, Samples]) -> dict[str, dict[str, float]]:
    """In milliseconds. The last is the median of the differences between two loads of the same
    round: a machine that gets busier over the minutes does not move it."""
    without = samples["without"]
    found = {}
    for name, one in samples.items():
        pairs = zip(one.values_ns, without.values_ns, strict=True)
        found[name] = {
            "n": len(one.values_ns),
            **{f"p{p}_ms": round(one.percentile_ns(p) / 1e6, 1) for p in (50, 25, 75)},
            "ratio": round(one.median_ns / without.median_ns, 3),
            "more_ms": round(statistics.median(a - b for a, b in pairs) / 1e6, 1),
        }
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)


def main() -> int:
    args = arguments(__doc__, options)
    rounds = 2 if args.quick else args.rounds
    where = machine("emulated")
    cold = {name: Samples() for name in SUBJECTS}
    warm = {name: Samples() for name in SUBJECTS}
    at_start: set[str] = set()
    with ExitStack() as stack:
        looked_into = Path(stack.enter_context(TemporaryDirectory(prefix="kw-labextensions-")))
        all_but_ours(looked_into)
        browser = stack.enter_context(running_browser())
        stage = stack.enter_context(
            running_stage("1x256MiB", lab_options=[f"--LabApp.labextensions_path={looked_into}"])
        )
        where["chromium"] = browser.version
        names = list(SUBJECTS)
        for number in range(-1, rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                arrange(stage, looked_into, *SUBJECTS[name])
                workspace = f"load-{number}-{names.index(name)}"
                cold_ms, warm_ms, loaded = loads(browser, stage, name, workspace)
                at_start |= {file for file, _ in loaded}
                if number >= 0:  # the very first ones warm the server up
                    cold[name].add(1e6 * cold_ms)
                    warm[name].add(1e6 * warm_ms)
    results: dict[str, Any] = {"machine": where, "targets": []}
    for what, samples in (("empty cache", cold), ("full cache", warm)):
        results[what] = compared(samples)
        print(f"\n{what}")
        table(
            ("ms", "n", "median", "p25", "p75", "× without", "+ without, same round"),
            [(name, *each.values()) for name, each in results[what].items()],
        )
        ratio = results[what]["with"]["ratio"]
        results["targets"].append(target(f"with / without, {what}", ratio, LIMIT))
    print()
    results["bundle"] = show_sizes(sizes(), at_start)
    report("lab_startup", results, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
