"""Tests of every state of the panel in every theme at the smallest width.

Nothing overflows, and axe and React report nothing. ``make panel-pictures`` photographs all states.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from story_page import FOLD_PX, THEMES, WIDTHS_PX, bundle, faults, show, story_names, wear

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

NARROW_PX, WIDE_PX = 240, 600


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    bundle(folder)
    return folder


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """Share one page for all stories: a new one compiles the panel again, which takes longer than
    axe."""
    page = browser.new_page(timezone_id="UTC")
    yield page
    page.close()


@pytest.mark.parametrize("story", story_names())
def test_a_story_is_fit_to_be_seen(page: Page, bundled: Path, story: str) -> None:
    """Themes differ in colours and widths; the other rules of axe give the same in each."""
    first, *others = THEMES
    complaints = show(page, bundled, story, first, NARROW_PX)
    for fold in page.locator("[data-kiwi=more] > summary").all():
        fold.click()
    assert faults(page) == []
    for theme in others:
        wear(page, theme)
        assert faults(page, "color-contrast") == [], theme
    assert complaints == []


@pytest.mark.parametrize("story", ["two-waiting", "crowd", "no-daemon"])
def test_a_wide_panel_is_fit_to_be_seen(page: Page, bundled: Path, story: str) -> None:
    assert show(page, bundled, story, "light", WIDE_PX) + faults(page) == []


def test_wrong_input_and_unfolded_parts_are_shown_well(page: Page, bundled: Path) -> None:
    show(page, bundled, "crowd", "dark", NARROW_PX)
    for summary in page.locator("summary").all():
        summary.click()
    page.locator("[data-kiwi=tq]").fill("0")
    page.locator("[data-kiwi=mode]").select_option("off")
    page.get_by_text("more notebooks", exact=False).first.wait_for()
    assert faults(page) == []
    field = page.locator("[data-kiwi=tq]").bounding_box()
    error = page.locator("[data-kiwi=tq-error]").bounding_box()
    assert field is not None
    assert error is not None
    assert 0 <= error["y"] - (field["y"] + field["height"]) < 20, "the error is at its field"


@pytest.mark.parametrize("story", ["two-waiting", "crowd", "emulated", "blocked", "long-names"])
def test_what_matters_is_above_the_fold(page: Page, bundled: Path, story: str) -> None:
    """The wait in large, the holder and the queue are visible without scrolling, at 240 px."""
    show(page, bundled, story, "light", NARROW_PX)
    card = page.locator("[data-kiwi=gpu]").first
    for part in ("my-wait", "holder", "queue-entry"):
        for box in card.locator(f"[data-kiwi={part}]:visible").all():
            bounds = box.bounding_box()
            assert bounds is not None
            assert bounds["y"] + bounds["height"] <= FOLD_PX, part


@pytest.mark.parametrize("width_px", WIDTHS_PX)
@pytest.mark.parametrize("story", ["minute", "two-waiting", "half-hour"])
def test_labels_of_the_axis_do_not_collide(
    page: Page, bundled: Path, story: str, width_px: int
) -> None:
    show(page, bundled, story, "light", width_px)
    boxes = page.evaluate(
        """() => {
          const picture = document.querySelector('[data-kiwi=timeline]').getBoundingClientRect();
          return [...document.querySelectorAll('.jp-Kiwi-tick text')]
            .filter(each => each.textContent !== '')
            .map(each => each.getBoundingClientRect())
            .map(box => [box.left - picture.left, picture.right - box.right]);
        }"""
    )
    assert len(boxes) >= 3
    whole_px = page.locator("[data-kiwi=timeline]").bounding_box()
    assert whole_px is not None
    spans = sorted((left, whole_px["width"] - right) for left, right in boxes)
    assert spans[0][0] >= 0
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    assert min(gaps) >= 4, spans


def test_a_long_name_keeps_its_start_and_its_end(page: Page, bundled: Path) -> None:
    show(page, bundled, "long-names", "light", NARROW_PX)
    names = page.locator("[data-kiwi=queue-entry] .jp-Kiwi-name")
    for name in names.all():
        outer = name.bounding_box()
        start = name.locator(".jp-Kiwi-cut-start").bounding_box()
        end = name.locator(".jp-Kiwi-cut > span").last.bounding_box()
        assert outer is not None
        assert start is not None
        assert end is not None
        assert start["width"] >= 12, "a letter and the dots"
        assert end["x"] + end["width"] <= outer["x"] + outer["width"] + 1


def test_folded_parts_are_reached_with_the_keyboard(page: Page, bundled: Path) -> None:
    """One Tab enters a long list, arrows move within it, one Tab leaves it, so that fifty notebooks
    are not fifty stops."""
    show(page, bundled, "crowd", "light", NARROW_PX)
    for summary in page.locator("summary").all():
        summary.click()
    stops = page.evaluate(
        "[...document.querySelectorAll('button, input, select, summary')]"
        ".filter(each => each.tabIndex >= 0).length"
    )
    assert stops < 20
