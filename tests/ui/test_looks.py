"""Tests of the sidebar's looks in all themes, narrow and wide, with pictures and axe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from axe import violations
from daemon import wait_until
from playwright.sync_api import expect
from sharing_stage import TAKE, USE, A, B, Pair, Stage, write_pair

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lab_page import LabPage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PANEL = '[data-kiwi="panel"]'
THEMES = {
    "light": "JupyterLab Light",
    "dark": "JupyterLab Dark",
    "high-contrast": "JupyterLab Dark High Contrast",
}
NARROW_PX, WIDE_PX = 250, 600
"""JupyterLab makes no sidebar narrower; test_stories.py tests 240 px."""


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage("1x128MiB")


def _fits(page: LabPage) -> bool:
    """Return whether nothing is cut off at the right or needs horizontal scrolling."""
    return bool(
        page.page.evaluate(
            """selector => {
              const panel = document.querySelector(selector);
              const right = panel.getBoundingClientRect().right + 1;
              return panel.scrollWidth <= panel.clientWidth &&
                [...panel.querySelectorAll('button, input, select, p, h2, h3')]
                  .every(each => each.getBoundingClientRect().right <= right);
            }""",
            PANEL,
        )
    )


def test_a_wait_in_every_theme_and_width(
    stage: Stage, make_pair: Callable[..., Pair], screenshot: Callable[..., Path]
) -> None:
    pair = make_pair(stage, tq_s=600, height=1000)
    page, panel = pair.page, pair.page.panel()
    pair.b_waits()
    expect(panel.part("countdown")).to_contain_text("min")  # and not some seconds
    expect(panel.part("emulated")).to_be_visible()
    expect(panel.part("emulated")).to_contain_text("not a real GPU")
    found = {}
    for short, theme in THEMES.items():
        page.theme(theme)
        found[short] = violations(page.page, PANEL)
        screenshot(page, f"waiting-{short}")
    page.theme(THEMES["light"])
    for width in (WIDE_PX, NARROW_PX):
        page.resize_sidebar(width)
        found[f"{width} px"] = violations(page.page, PANEL)
        wait_until(lambda: _fits(page), f"the panel fits into {width} px")
        screenshot(page, f"waiting-{width}px")
    assert not any(found.values()), found
    pair.enough()
    pair.b.wait_end(USE)
    expect(panel.part("queue-entry")).to_have_count(0)
    page.resize_sidebar(320)
    assert violations(page.page, PANEL) == []
    screenshot(page, "idle-light")


@pytest.fixture(scope="module")
def two_gpus(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage("2x128MiB")


def test_two_gpus_are_two_cards(
    two_gpus: Stage,
    open_lab: Callable[..., LabPage],
    screenshot: Callable[..., Path],
) -> None:
    """A notebook that is opened while another one computes gets the other GPU; each is on its own
    card."""
    enough = two_gpus.enough_path()
    write_pair(two_gpus, enough)
    page = open_lab(two_gpus, height=1000)
    panel = page.panel()
    expect(panel.part("gpu")).to_have_count(2)
    cards = [panel.part("gpu").nth(index) for index in range(2)]
    for index, card in enumerate(cards):
        expect(card.get_by_role("heading", level=2)).to_contain_text(f"GPU {index}")
    a = page.open_notebook(A)
    a.run(TAKE)
    a.start(USE)
    first = [card.locator('[data-kiwi="holder"]') for card in cards]
    expect(page.page.locator('[data-kiwi="holder"]')).to_have_count(1)
    # Between A's two turns no card has a holder.
    (mine,) = wait_until(lambda: [n for n in range(2) if first[n].count()], "A's card")
    other = 1 - mine
    b = page.open_notebook(B)
    b.run(TAKE)
    b.run(USE)
    expect(cards[other].locator('[data-kiwi="my-wait"]')).to_contain_text(B)
    expect(cards[mine].locator('[data-kiwi="holder"]')).to_contain_text(A)
    expect(panel.part("queue-entry")).to_have_count(0)
    assert violations(page.page, PANEL) == []
    screenshot(page, "two-gpus")
    enough.touch()
    a.wait_end(USE)
