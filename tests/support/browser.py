"""A real headless Chromium, controlled by Playwright.

On a machine without Chromium the tests that need one fail, and say what to install: a browser test
that is skipped tests nothing.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from playwright.sync_api import Browser

FINDER = Path(__file__).parents[2] / "scripts/browser"

FLAGS = (
    "--no-sandbox",  # tests run as root in containers, and visit only their own server
    "--disable-gpu",
    # Nothing may use the network, or disturb the test and its page.
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # With 64 MB of shared memory, as in containers, the browser crashes in the middle of a page.
    "--disable-dev-shm-usage",
)

START_WITHIN_S = 120.0
"""Time limit for the first start of a browser on a cold, busy machine."""


class NoChromiumError(Exception):
    """There is no Chromium; the text says what to install."""


def find_chromium(env: Mapping[str, str] | None = None) -> str:
    """Return the path of the browser that ``scripts/browser`` finds. Raise ``NoChromiumError``."""
    done = subprocess.run(
        ["/bin/bash", str(FINDER), "--find"],
        env=dict(os.environ if env is None else env),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise NoChromiumError(f"{done.stderr.strip()} `make browser` gets one.")
    return done.stdout.strip()


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Run a browser with an empty profile; remove the browser and its files at the end. Each page,
    or each user, gets a context of its own: ``browser.new_context()``."""
    path = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=[*FLAGS], timeout=START_WITHIN_S * 1000
        )
        try:
            yield browser
        finally:
            browser.close()
