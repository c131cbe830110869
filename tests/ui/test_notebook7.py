"""Tests of Kiwi in Notebook 7, where each notebook is a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from axe import violations
from lab import TOKEN
from playwright.sync_api import expect
from sharing_stage import USE, A, B, Stage, write_pair

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_page import LabPage, NotebookPane

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage("1x128MiB", "--tq", "600", app="notebook")


def _open(page: LabPage, path: str) -> NotebookPane:
    page.page.goto(f"{page.lab.url}/notebooks/{path}?token={TOKEN}")
    page.wait_ready()
    return page.shown(path)


def _is_no_menu(page: LabPage) -> None:
    """Check that the state is at the right, like the kernel's, and not among the menus."""
    state, width_px = page.status_item.bounding_box(), page.page.evaluate("window.innerWidth")
    assert state is not None
    assert state["x"] + state["width"] / 2 > width_px / 2


def test_a_wait_is_shown_beside_the_notebook(
    stage: Stage, open_lab: Callable[..., LabPage], screenshot: Callable[..., Path]
) -> None:
    """Each of two pages has a notebook: the one that waits says so, and opens the sidebar."""
    enough = stage.enough_path()
    write_pair(stage, enough)
    try:
        first, second = open_lab(stage), open_lab(stage)
        a, b = _open(first, A), _open(second, B)
        a.run(0)
        b.run(0)
        a.start(USE)
        stage.wait_state(A, "running")
        expect(first.status_item).to_contain_text("yours")
        b.start(USE)
        expect(second.status_item).to_contain_text("1st")
        second.status_item.click()
        panel = second.panel_shown()
        expect(panel.part("my-wait")).to_contain_text("1st of 1")
        expect(panel.part("holder")).to_contain_text("training.ipynb")
        _is_no_menu(second)
        assert violations(second.page, '[data-kiwi="panel"]') == []
        assert violations(second.page, ".jp-Kiwi-status") == []
        screenshot(second, "notebook7")
    finally:
        enough.touch()
    a.wait_end(USE)
    b.wait_end(USE)
    expect(panel.part("queue-entry")).to_have_count(0)
