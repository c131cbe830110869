"""Tests that everything in the sidebar works without a mouse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from sharing_stage import USE, Stage

from kiwi_core.states import AntiThrash

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab_page import LabPage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

MOST_STEPS = 40
"""More presses of Tab than a user should need to reach anything in the sidebar."""


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Stage:
    stage = make_stage("1x128MiB")
    take = "from gpu_work import Memory\nmemory = Memory(76, 1)"
    stage.lab.write_notebook("work.ipynb", [take, "memory.step()"])
    return stage


def _tab_to(page: LabPage, part: str) -> None:
    """Press Tab until the focus is on or in that part of the sidebar."""
    seen = []
    for _ in range(MOST_STEPS):
        inside, what = page.page.evaluate(
            """part => {
              const focused = document.activeElement;
              return [focused.closest(`[data-kiwi="${part}"]`) !== null,
                focused.outerHTML.slice(0, 100)];
            }""",
            part,
        )
        if inside:
            return
        seen.append(what)
        page.page.keyboard.press("Tab")
    raise AssertionError(f"{part} is not reached by Tab, but {seen}")


def test_quantum_and_release_by_keyboard(stage: Stage, open_lab: Callable[..., LabPage]) -> None:
    """Control-Alt-K moves the focus into the sidebar, Tab to the release button and the settings.
    Each says what has happened."""
    stage.set(policy="interactive", anti_thrash=AntiThrash.ON)
    page = open_lab(stage)
    work = page.open_notebook("work.ipynb")
    work.run(0)
    page.page.keyboard.press("Control+Alt+K")
    panel = page.panel_shown()
    expect(page.page.locator(":focus")).to_have_attribute("id", "kiwi-panel")
    session = stage.session("work.ipynb").id
    expect(panel.resting(session).locator('[data-kiwi="release"]')).to_be_visible()
    _tab_to(page, "resting")
    page.page.keyboard.press("ArrowDown")
    expect(page.page.locator(":focus")).to_have_attribute("data-kiwi", "release")
    page.page.keyboard.press("Enter")
    stage.wait_state("work.ipynb", "paged-out")
    expect(panel.resting(session)).to_contain_text("paged out")
    expect(panel.part("my-wait")).to_contain_text("Paged out")
    panel.unfolded()
    _tab_to(page, "tq")
    page.page.keyboard.press("Control+A")
    page.page.keyboard.type("17")
    page.page.keyboard.press("Enter")
    stage.daemon.wait_for(lambda s: s.scheduler.tq_s == 17, "the quantum that was typed")
    _tab_to(page, "mode")
    page.page.keyboard.press("ArrowDown")
    _tab_to(page, "apply")
    page.page.keyboard.press("Space")
    stage.daemon.wait_for(lambda s: s.scheduler.anti_thrash.value == "always", "the mode")
    _tab_to(page, "policy")
    page.page.keyboard.press("ArrowDown")
    _tab_to(page, "apply")
    page.page.keyboard.press("Space")
    stage.daemon.wait_for(lambda s: s.scheduler.policy == "round-robin", "the policy")
    work.run(USE)
