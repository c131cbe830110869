"""Photographs the stories of the panel, to be looked at, and says what axe finds in them.

    PYTHONPATH=tests/support python tests/ui/stories.py OUT [--story NAME …] [--theme NAME …]
                                                            [--width PX …]

Needs what the tests beside it need: ``npm ci`` in labextension/, JupyterLab, Playwright, Chromium.
Ends with status 1 if there is a fault.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path

from browser import running_browser
from story_page import THEMES, WIDTHS_PX, bundle, faults, show, story_names


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--story", nargs="*", default=story_names(), choices=story_names())
    parser.add_argument("--theme", nargs="*", default=list(THEMES), choices=list(THEMES))
    parser.add_argument("--width", nargs="*", type=int, default=list(WIDTHS_PX))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {}
    pictures = itertools.product(arguments.story, arguments.theme, arguments.width)
    with tempfile.TemporaryDirectory() as folder, running_browser() as browser:
        bundle(Path(folder))
        for story, theme, width_px in pictures:
            name = f"{story}-{theme}-{width_px}"
            page = browser.new_page(timezone_id="UTC")
            complaints = show(page, Path(folder), story, theme, width_px)
            page.screenshot(path=arguments.out / f"{name}.png", full_page=True)
            if wrong := complaints + faults(page):
                found[name] = wrong
            page.close()
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
