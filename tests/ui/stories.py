"""Photographs the stories of the panel in every theme and width, and lets axe look at each.

    python tests/ui/stories.py OUT [--story NAME ...] [--theme NAME ...] [--width PX ...]

Needs the labextension's npm packages (``npm ci``), Playwright and a Chromium, and JupyterLab for
its themes. Ends with status 1 if axe finds anything, if a story overflows its width, or if the
page reports an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

LABEXTENSION = Path(__file__).parents[2] / "labextension"
STORIES = LABEXTENSION / "stories"
THEMES = {
    "light": "theme-light-extension",
    "dark": "theme-dark-extension",
    "high-contrast": "theme-dark-high-contrast-extension",
}
WIDTHS_PX = (240, 320, 600)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


def theme_css(theme: str) -> str:
    root = Path(sys.prefix) / "share/jupyter/lab/themes/@jupyterlab"
    return (root / THEMES[theme] / "index.css").read_text()


def bundle(into: Path) -> None:
    """The page with the panel as one script and one style sheet."""
    esbuild = LABEXTENSION / "node_modules/.bin/esbuild"
    subprocess.run(
        [
            *(str(esbuild), str(STORIES / "page.tsx"), "--bundle", f"--outfile={into}/bundle.js"),
            *("--jsx=transform", "--loader:.svg=text", "--log-level=warning", "--target=es2022"),
            '--define:process.env.NODE_ENV="development"',
        ],
        check=True,
        cwd=LABEXTENSION,
    )
    shutil.copy(STORIES / "index.html", into)


def story_names() -> list[str]:
    text = (STORIES / "states.ts").read_text().split("export const STORIES")[1]
    return re.findall(r"^  '?([a-z-]+)'?: \{", text, re.MULTILINE)


@contextmanager
def chromium() -> Iterator[Browser]:
    path = os.environ.get("KIWI_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def show(page: Page, folder: Path, story: str, theme: str, width_px: int) -> list[str]:
    """Open the story; what the page itself complains about."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(f"page error: {error}"))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.set_viewport_size({"width": width_px, "height": 1000})
    page.goto(f"{(folder / 'index.html').as_uri()}?story={story}")
    page.add_style_tag(content=theme_css(theme))
    page.locator("[data-kiwi=panel]").wait_for()
    # The panel scrolls in the sidebar; here it is shown whole.
    page.add_style_tag(content="#root { overflow: visible; }")
    return errors


def look(page: Page, axe: str) -> list[str]:
    """What is wrong with what is shown."""
    found = []
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    if wide > 0:
        found.append(f"{wide} px wider than the sidebar")
    page.evaluate(axe)
    result: dict[str, Any] = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    found.extend(
        f"axe {violation['id']}: {node['html'][:160]} {node['failureSummary']}"
        for violation in result["violations"]
        for node in violation["nodes"]
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--story", nargs="*", default=story_names())
    parser.add_argument("--theme", nargs="*", default=list(THEMES), choices=list(THEMES))
    parser.add_argument("--width", nargs="*", type=int, default=list(WIDTHS_PX))
    parser.add_argument(
        "--axe", type=Path, default=LABEXTENSION / "node_modules/axe-core/axe.min.js"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    axe = arguments.axe.read_text()
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        bundle(Path(folder))
        for story in arguments.story:
            for theme in arguments.theme:
                for width_px in arguments.width:
                    name = f"{story}-{theme}-{width_px}"
                    page = browser.new_page(timezone_id="UTC")
                    errors = show(page, Path(folder), story, theme, width_px)
                    page.screenshot(path=arguments.out / f"{name}.png", full_page=True)
                    if wrong := [*errors, *look(page, axe)]:
                        found[name] = wrong
                    page.close()
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
