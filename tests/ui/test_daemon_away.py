"""Tests of what the sidebar says without a daemon, and of how it recovers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from axe import violations
from daemon import Daemon, wait_until
from lab import running_lab
from playwright.sync_api import expect
from sharing_stage import USE, Pair, Stage

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from lab_page import LabPage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

AWAY = r"kiwi/api"
"""Requests to the server fail while the daemon is away, and the browser logs each."""


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage("1x128MiB")


def test_the_daemon_is_killed_and_started_again(
    stage: Stage, make_pair: Callable[..., Pair]
) -> None:
    """SIGKILL to the daemon of the GPU comes in the middle of a wait. Its supervisor starts
    another, and the sidebar shows the same wait as before without help."""
    pair = make_pair(stage)
    pair.page.notes.expect_error(AWAY)
    panel = pair.page.panel()
    pair.b_waits()
    before = stage.daemon.kill_child()
    stage.daemon.wait_for(
        lambda s: s.daemon_pid != before and s.queue and s.holders, "both are there again"
    )
    expect(panel.part("problem")).to_have_count(0)
    expect(panel.queue_entry(pair.session(pair.b))).to_be_visible()
    expect(panel.part("my-wait")).to_contain_text("1st of 1")
    pair.enough()
    pair.b.wait_end(USE)
    expect(panel.part("queue-entry")).to_have_count(0)


def test_the_daemon_is_stopped_and_started(
    stage: Stage, make_pair: Callable[..., Pair], screenshot: Callable[..., Path]
) -> None:
    """While the daemon is away, the sidebar says so, with what to do, and shows the last known
    state. When the daemon is back, the sidebar recovers by itself."""
    pair = make_pair(stage)
    pair.page.notes.expect_error(AWAY)
    page, panel = pair.page, pair.page.panel()
    daemon = stage.daemon
    expect(panel.part("problem")).to_have_count(0)
    assert daemon.terminate() == 0
    problem = panel.part("problem")
    expect(problem).to_be_visible()
    expect(problem).to_contain_text(re.compile("daemon", re.IGNORECASE))
    assert len(problem.locator("p").all_inner_texts()) >= 2, "what, and what to do"
    screenshot(page, "error-daemon-stopped")
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        page.theme(theme)
        assert violations(page.page, '[data-kiwi="panel"]') == []
    screenshot(page, "error-daemon-stopped-dark")
    daemon.start()
    expect(problem).to_have_count(0)
    expect(panel.part("gpu")).to_have_count(1)
    expect(panel.part("gpu")).to_have_attribute("data-uuid", daemon.status().uuid)
    pair.a_computes()
    expect(panel.part("holder")).to_contain_text("training.ipynb")
    pair.enough()


def test_there_is_no_daemon(
    stack: ExitStack,
    private_tmp: Path,
    open_lab: Callable[..., LabPage],
    screenshot: Callable[..., Path],
) -> None:
    """Nobody may start one: the sidebar says what is missing and what to do. Once there is one, the
    sidebar shows its GPU."""
    directory = private_tmp / "none"
    directory.mkdir(mode=0o700)
    daemon = Daemon(directory, "1x64MiB")
    lab = stack.enter_context(running_lab(daemon.env, options=["--KiwiServerApp.autostart=False"]))
    page = open_lab(Stage(daemon, lab))
    page.notes.expect_error(AWAY)
    panel = page.panel()
    problem = panel.part("problem")
    expect(problem).to_have_attribute("data-code", "no-daemon")
    expect(problem).to_contain_text("kiwi daemon")
    expect(panel.part("gpu")).to_have_count(0)
    assert violations(page.page, '[data-kiwi="panel"]') == []
    screenshot(page, "error-no-daemon")
    try:
        daemon.start()
        # It may have found the daemon by itself, and then there is no button any more.
        panel.part("retry").evaluate_all("buttons => buttons.forEach(button => button.click())")
        expect(panel.part("gpu")).to_have_count(1)
        expect(problem).to_have_count(0)
    finally:
        daemon.stop()
        _remove(directory)


def _remove(directory: Path) -> None:
    import shutil

    wait_until(lambda: not shutil.rmtree(directory, ignore_errors=True), "its end")
