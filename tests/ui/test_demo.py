"""Tests of ``kiwi demo`` with a browser: two notebooks side by side, and the open sidebar."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from daemon import die_with_the_test, wait_until
from kernels import clean_environment
from playwright.sync_api import expect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

PATIENCE_MS = 120_000.0
PATIENCE_S = PATIENCE_MS / 1000


@contextmanager
def running_demo(directory: Path) -> Iterator[str]:
    """Run the demo, and yield the address that it prints."""
    log = directory / "demo.log"
    env = clean_environment(directory)
    del env["KIWI_SOCKET_DIR"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "kiwi_core.cli", "demo", "--emulate", "--no-browser"],
            cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True, preexec_fn=die_with_the_test,
        )  # fmt: skip

    def address() -> str:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\S+token=\w+", log.read_text())
        return found[0] if found else ""

    try:
        yield str(wait_until(address, "JupyterLab's address", PATIENCE_S))
    finally:
        os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C
        assert process.wait(PATIENCE_S) == 0, log.read_text()


def test_the_demo_opens_on_what_it_is_about(browser: Browser, tmp_path: Path) -> None:
    with running_demo(tmp_path) as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(url, timeout=PATIENCE_MS)
        notebooks = page.locator(".jp-NotebookPanel")
        expect(notebooks.filter(visible=True)).to_have_count(2, timeout=PATIENCE_MS)
        panel = page.locator("[data-kiwi=panel]")
        expect(panel).to_be_visible(timeout=PATIENCE_MS)
        expect(panel.locator("[data-kiwi=gpu]")).to_contain_text(
            "not a real GPU", timeout=PATIENCE_MS
        )
        minute = panel.get_by_role("button", name="1 min")
        expect(minute).to_have_attribute("aria-pressed", "true", timeout=PATIENCE_MS)
