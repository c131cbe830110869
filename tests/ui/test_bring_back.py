"""Tests that memory comes back when a notebook is looked at or typed in while the GPU idles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from sharing_stage import USE, Stage

from kiwi_core.states import AntiThrash

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab_page import LabPage, NotebookPane

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PLUGIN = "kiwi-jupyter:plugin"


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Stage:
    stage = make_stage("1x128MiB")
    stage.set(policy="interactive", anti_thrash=AntiThrash.ON)
    stage.lab.write_notebook("notes.ipynb", ["# no GPU here"])
    for name in ("one", "two", "three"):
        take = "from gpu_work import Memory\nmemory = Memory(76, 1)"
        stage.lab.write_notebook(f"{name}.ipynb", [take, "memory.step()"])
    return stage


def _paged_out(page: LabPage, stage: Stage, path: str) -> NotebookPane:
    """Return a notebook that has used the GPU and whose user has then released its memory."""
    notebook = page.open_notebook(path)
    notebook.run(0)
    panel = page.panel()
    release = panel.resting(stage.session(path).id).locator('[data-kiwi="release"]')
    release.click()
    stage.wait_state(path, "paged-out")
    # Its user released the memory and still looks at the notebook: this is no hint.
    page.page.wait_for_timeout(2000)
    assert stage.session(path).state.value == "paged-out"
    assert _brought_back(stage, path) == []
    return notebook


def _brought_back(stage: Stage, path: str) -> list[bool]:
    """Return, for each time that its memory came in, whether a hint caused it."""
    session = stage.session(path).id
    with stage.daemon.client() as client:
        client.connect()
        entries = client.history().entries
    return [e.hinted for e in entries if e.session == session and e.kind.value == "in"]


def test_it_comes_back_when_its_tab_is_shown(
    stage: Stage, open_lab: Callable[..., LabPage]
) -> None:
    page = open_lab(stage)
    one = _paged_out(page, stage, "one.ipynb")
    page.open_notebook("notes.ipynb").to_front()
    one.to_front()
    stage.wait_state("one.ipynb", "idle")
    expect(page.panel().part("my-wait")).to_contain_text("Free")
    assert _brought_back(stage, "one.ipynb") == [True]
    one.run(USE)
    assert _brought_back(stage, "one.ipynb") == [True], "it was there already"


def test_it_comes_back_when_one_types_in_it(stage: Stage, open_lab: Callable[..., LabPage]) -> None:
    page = open_lab(stage)
    two = _paged_out(page, stage, "two.ipynb")
    two.edit(USE)
    page.page.keyboard.type("# h")
    stage.wait_state("two.ipynb", "idle")
    assert _brought_back(stage, "two.ipynb") == [True]


def test_the_setting_switches_it_off(stage: Stage, open_lab: Callable[..., LabPage]) -> None:
    page = open_lab(stage)
    page.set_setting(PLUGIN, "bringBack", False)
    three = _paged_out(page, stage, "three.ipynb")
    notes = page.open_notebook("notes.ipynb")
    notes.to_front()
    three.to_front()
    three.edit(USE)
    page.page.keyboard.type("# hello")
    # Far longer than a hint takes when hints are on.
    page.page.wait_for_timeout(4000)
    assert stage.session("three.ipynb").state.value == "paged-out"
    page.set_setting(PLUGIN, "bringBack", True)
    notes.to_front()
    three.to_front()
    stage.wait_state("three.ipynb", "idle")
    assert _brought_back(stage, "three.ipynb") == [True]
