"""Photograph every state of the panel, and print the findings of axe.

    make panel-pictures      all of them, into build/panel
    PYTHONPATH=tests/support python tools/stories.py OUT [--story NAME …] [--theme NAME …]
                                                        [--width PX …] [--no-axe]

Each story in each theme (light, dark, high contrast) and width (240, 320, 600 px) is one picture.
``sheet-*.png`` show all of one theme and width side by side; a line shows where a window of 700 px
ends. Needs what the tests here need: ``npm ci`` in labextension/, JupyterLab, Playwright,
Chromium. The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from browser import running_browser
from story_page import FOLD_PX, THEMES, WIDTHS_PX, bundle, faults, show, story_names, wear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playwright.sync_api import Browser

ON_A_SHEET = 8
"""Stories beside each other; more are hard to look at."""

SHEET_PX = 1300
"""A sheet cuts off longer pictures."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--story", nargs="*", default=story_names(), choices=story_names())
    parser.add_argument("--theme", nargs="*", default=list(THEMES), choices=list(THEMES))
    parser.add_argument("--width", nargs="*", type=int, default=list(WIDTHS_PX))
    parser.add_argument("--no-axe", action="store_true", help="pictures only, which is faster")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, running_browser() as browser:
        bundle(Path(folder))
        for width_px in arguments.width:
            for story in arguments.story:
                page = browser.new_page(timezone_id="UTC")
                complaints = show(page, Path(folder), story, arguments.theme[0], width_px)
                for theme in arguments.theme:
                    wear(page, theme)
                    name = f"{story}-{theme}-{width_px}"
                    page.screenshot(path=out / f"{name}.png", full_page=True)
                    wrong = [] if arguments.no_axe else faults(page)
                    if wrong or complaints:
                        found[name] = wrong + complaints
                page.close()
            for theme in arguments.theme:
                _sheets(browser, out, arguments.story, theme, width_px)
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 1 if found else 0


def _sheets(browser: Browser, out: Path, stories: Sequence[str], theme: str, width_px: int) -> None:
    """Join the pictures of one theme and width."""
    wide = max(2, ON_A_SHEET * WIDTHS_PX[0] // width_px)
    for begin in range(0, len(stories), wide):
        some = stories[begin : begin + wide]
        figures = "".join(
            f"<figure><figcaption>{story}</figcaption><img src='data:image/png;base64,"
            f"{base64.b64encode((out / f'{story}-{theme}-{width_px}.png').read_bytes()).decode()}'>"
            "</figure>"
            for story in some
        )
        page = browser.new_page(viewport={"width": len(some) * (width_px + 12), "height": SHEET_PX})
        page.set_content(_SHEET.format(figures=figures, fold_px=FOLD_PX))
        page.screenshot(path=out / f"sheet-{theme}-{width_px}-{begin // wide + 1}.png")
        page.close()


_SHEET = """<style>
  body {{ margin: 0; background: #808080; display: flex; gap: 12px; align-items: flex-start; }}
  figure {{ margin: 0; position: relative; }}
  figure::after {{ content: ''; position: absolute; left: 0; right: 0;
    top: calc(18px + {fold_px}px); border-top: 1px dashed magenta; }}
  figcaption {{ font: 12px/18px sans-serif; height: 18px; color: white; overflow: hidden; }}
  img {{ display: block; }}
</style>{figures}"""


if __name__ == "__main__":
    sys.exit(main())
