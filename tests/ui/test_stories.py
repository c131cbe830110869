"""Every state that the panel can show, in every theme, as narrow as it gets: nothing overflows, axe
finds nothing, React complains about nothing. What they look like is among the artefacts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from story_page import THEMES, bundle, faults, show, story_names, wear

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


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(timezone_id="UTC")
    yield page
    page.close()


@pytest.mark.parametrize("story", story_names())
def test_a_story_is_fit_to_be_seen(page: Page, bundled: Path, artifacts: Path, story: str) -> None:
    complaints = show(page, bundled, story, "light", NARROW_PX)
    folder = artifacts / "stories"
    folder.mkdir(exist_ok=True)
    for theme in THEMES:
        wear(page, theme)
        page.screenshot(path=folder / f"{story}-{theme}.png", full_page=True)
        assert faults(page) == [], theme
    assert complaints == []


@pytest.mark.parametrize("story", ["two-waiting", "crowd", "no-daemon"])
def test_a_wide_panel_is_fit_to_be_seen(page: Page, bundled: Path, story: str) -> None:
    assert show(page, bundled, story, "light", WIDE_PX) + faults(page) == []


def test_what_was_typed_wrong_and_what_is_unfolded_is_fit_to_be_seen(
    page: Page, bundled: Path
) -> None:
    show(page, bundled, "crowd", "dark", NARROW_PX)
    page.locator("[data-kiwi=tq]").fill("0")
    page.locator("[data-kiwi=mode]").select_option("off")
    for summary in page.locator("summary").all():
        summary.click()
    page.get_by_text("more notebooks", exact=False).first.wait_for()
    assert faults(page) == []


def test_what_was_folded_is_reached_with_the_keyboard(page: Page, bundled: Path) -> None:
    """One Tab into a long list, arrows within it, one Tab out: fifty notebooks are not fifty
    stops."""
    show(page, bundled, "crowd", "light", NARROW_PX)
    for summary in page.locator("summary").all():
        summary.click()
    stops = page.evaluate(
        "[...document.querySelectorAll('button, input, select, summary')]"
        ".filter(each => each.tabIndex >= 0).length"
    )
    assert stops < 20
