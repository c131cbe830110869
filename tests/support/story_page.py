"""The stories of the panel (labextension/stories): constructed states, shown by the real panel in
JupyterLab's real themes, without JupyterLab around it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from axe import violations

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

ROOT = Path(__file__).parents[2]
LABEXTENSION = ROOT / "labextension"
STORIES = LABEXTENSION / "stories"
THEMES = {
    "light": "theme-light-extension",
    "dark": "theme-dark-extension",
    "high-contrast": "theme-dark-high-contrast-extension",
}
WIDTHS_PX = (240, 320, 600)
FOLD_PX = 700
"""What a laptop's window leaves the sidebar: what matters is above it."""

ORIGIN = "http://stories.invalid"
"""Origin that Playwright answers: a page from a file may not read its own style sheets, as axe
does."""


def story_names() -> list[str]:
    text = (STORIES / "states.ts").read_text().split("export const STORIES")[1]
    return re.findall(r"^  '?([a-z-]+)'?: \{", text, re.MULTILINE)


def bundle(into: Path) -> None:
    """Build the page with the panel as one script and one style sheet."""
    esbuild = LABEXTENSION / "node_modules/.bin/esbuild"
    assert esbuild.is_file(), f"esbuild is not there: npm --prefix {LABEXTENSION} ci installs it"
    subprocess.run(
        [
            # Where the machine has no Node, it is in the environment.
            *(str(ROOT / "scripts/node"), str(ROOT / ".venv")),
            *(str(esbuild), str(STORIES / "page.tsx"), "--bundle", f"--outfile={into}/bundle.js"),
            *("--jsx=transform", "--loader:.svg=text", "--log-level=warning", "--target=es2022"),
            '--define:process.env.NODE_ENV="development"',
        ],
        check=True,
        cwd=LABEXTENSION,
    )
    shutil.copy(STORIES / "index.html", into)


def show(page: Page, folder: Path, story: str, theme: str, width_px: int) -> list[str]:
    """Open the story from the files that ``bundle`` made in ``folder``. Return the list that
    collects errors of the page itself."""
    complaints: list[str] = []
    page.unroute_all()
    page.on("pageerror", lambda error: complaints.append(f"page error: {error}"))
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    page.set_viewport_size({"width": width_px, "height": 1000})
    page.route(f"{ORIGIN}/**", lambda route: _serve(route, folder))
    page.goto(f"{ORIGIN}/index.html?story={story}")
    wear(page, theme)
    page.locator("[data-kiwi=panel]").wait_for()
    # In the sidebar the panel scrolls; here it is shown whole.
    page.add_style_tag(content="#root { overflow: visible; }")
    return complaints


def faults(page: Page, *rules: str) -> list[str]:
    """Return what is wrong with the page: axe's violations (of ``rules``), and its width."""
    wider_px = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    wide = [f"{wider_px} px wider than the sidebar"] if wider_px > 0 else []
    return wide + violations(page, "html", *rules)


def wear(page: Page, theme: str) -> None:
    """Apply the theme, in place of the one before."""
    root = Path(sys.prefix) / "share/jupyter/lab/themes/@jupyterlab"
    page.evaluate(_WEAR, (root / THEMES[theme] / "index.css").read_text())


_WEAR = """css => {
  document.querySelector('#theme')?.remove();
  const style = document.createElement('style');
  style.id = 'theme';
  style.textContent = css;
  document.head.append(style);
}"""


def _serve(route: Route, folder: Path) -> None:
    asked = folder / urlsplit(route.request.url).path.lstrip("/")
    if asked.is_file():
        route.fulfill(path=asked)
    else:
        route.fulfill(status=204)  # the icon that browsers ask for
