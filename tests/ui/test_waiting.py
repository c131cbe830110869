"""Tests of what a user sees of a wait in the sidebar, the status bar and the cell."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from checks import unharmed
from daemon import wait_until
from playwright.sync_api import expect
from sharing_stage import CPU, USE, Pair, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lab_page import LabPage, Panel
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TQ_S = 90.0
"""Long enough to see it fall on a busy machine, short enough to be told in seconds."""

FALL_S = 3.0
"""How far a wait has to fall to be seen to do so."""

WHOLE_TURN = re.compile(r"\b(9|9\.5|10)(–\d+)? min")
"""The wait for most of a turn of ten minutes."""

WHOLE_TURN_SHOWN_MS = 60_000
"""The earlier tests cut their waits short. A wait is told the whole turn once it has outlasted
those waits, which take seconds, or more on a busy machine."""


@pytest.fixture(scope="module")
def stage(make_stage: Callable[..., Stage]) -> Iterator[Stage]:
    stage = make_stage("1x128MiB")
    yield stage
    unharmed(stage.daemon)


def _seconds(text: str) -> float | None:
    """Return the wait that a text tells; ``None`` if it tells none."""
    if "any moment" in text:
        return 0.0
    found = re.search(r"(?:about|up to|–) ?([\d.]+) (s|min)", text)
    return float(found[1]) * {"s": 1, "min": 60}[found[2]] if found else None


def _read(place: Locator) -> str:
    """Return the text of the element, or "" if there is none: it may disappear while it is read."""
    texts = place.all_inner_texts()
    return texts[0] if texts else ""


def _watch(pair: Pair, places: dict[str, Locator]) -> dict[str, list[float]]:
    """Return the waits that each place tells one after the other, until all have fallen."""
    told: dict[str, list[float]] = {name: [] for name in places}
    while not all(seconds and seconds[0] - seconds[-1] >= FALL_S for seconds in told.values()):
        assert pair.b.running(USE), f"the wait has ended: {told}"
        for name, place in places.items():
            seconds = _seconds(_read(place))
            if seconds is not None:
                told[name].append(seconds)
        pair.page.page.wait_for_timeout(200)
    return told


def test_a_wait_falls_everywhere_and_ends(stage: Stage, make_pair: Callable[..., Pair]) -> None:
    """A has the GPU for its quantum. B sees its place and a wait that falls, and gets the GPU at
    the end of the quantum, which is made shorter; A continues in mid-cell. The timeline shows all
    of it."""
    pair = make_pair(stage, tq_s=TQ_S)
    page, panel = pair.page, pair.page.panel()
    pair.b_waits()
    a, b = pair.session(pair.a), pair.session(pair.b)
    expect(panel.part("my-wait")).to_contain_text("1st of 1")
    expect(panel.part("holder")).to_contain_text("training.ipynb")
    expect(panel.queue_entry(b)).to_contain_text("exploration.ipynb")
    expect(panel.part("holder")).to_have_attribute("data-session", a)
    expect(page.status_item).to_contain_text("1st")
    expect(pair.b.waiting_line(USE)).to_contain_text("in line")
    # At first the burst may be expected to be as short as A's earlier one.
    whole_turn = re.compile(r"(about |up to |\d+\N{EN DASH})[5-9]\d s")
    places = {
        "sidebar": panel.part("countdown"),
        "status bar": page.status_item,
        "cell": pair.b.waiting_line(USE),
    }
    for place in places.values():  # one may tell the whole turn later than another
        expect(place).to_contain_text(whole_turn)
    told = _watch(pair, places)
    for name, seconds in told.items():
        steps = list(pairwise(seconds))
        assert all(later <= earlier for earlier, later in steps), (name, told)
    stage.set(tq_s=1.0)
    pair.b.wait_end(USE)
    assert {"name": "stdout", "text": "stepped\n"}.items() <= pair.b.outputs(USE)[-1].items()
    expect(pair.b.waiting_line(USE)).to_have_count(0)
    expect(panel.part("queue-entry")).to_have_count(0)
    assert pair.a.running(USE), "A goes on"
    for kind, session in (("held", a), ("suspended", a), ("waited", b), ("held", b)):
        expect(panel.spans(kind, session).first).to_be_attached()
    for direction in ("out", "in"):
        swaps = panel.part("timeline").locator(f'[data-kiwi="swap"][data-direction="{direction}"]')
        expect(swaps.first).to_be_attached()
    pair.enough()


def _saved_outputs(pair: Pair) -> list[dict[str, Any]]:
    """Press Ctrl-S in B, and return the outputs of its waiting cell in the file."""
    path = pair.stage.lab.notebooks / pair.b.path
    before_ns = path.stat().st_mtime_ns
    pair.b.to_front()
    pair.b.cell(USE).locator(".jp-InputPrompt").click()
    pair.page.page.keyboard.press("Control+s")

    def saved() -> Any:
        """Read the file, which the server empties before it writes."""
        if path.stat().st_mtime_ns == before_ns or not (text := path.read_text()):
            return None
        with suppress(nbformat.reader.NotJSONError):
            return nbformat.reads(text, 4)

    notebook: Any = wait_until(saved, "the notebook is saved")
    nbformat.validate(notebook)
    return list(notebook.cells[USE].outputs)


def test_a_saved_notebook_has_nothing_of_a_wait(
    stage: Stage, make_pair: Callable[..., Pair]
) -> None:
    """Neither a save during the wait, nor one after it, nor a reload shows anything of it."""
    pair = make_pair(stage)
    pair.b_waits()
    expect(pair.b.waiting_line(USE)).to_contain_text("in line")
    assert _saved_outputs(pair) == []
    expect(pair.b.waiting_line(USE)).to_be_visible()
    pair.enough()
    pair.b.wait_end(USE)
    expect(pair.b.waiting_line(USE)).to_have_count(0)
    printed = {"output_type": "stream", "name": "stdout", "text": "stepped\n"}
    assert _saved_outputs(pair) == [printed]
    pair.page.wait_saved(pair.b.path)
    pair.page.reload()
    b = pair.page.shown(pair.b.path)
    expect(b.output(USE)).to_have_text(["stepped"])
    expect(b.waiting_line(USE)).to_have_count(0)


def test_a_shorter_quantum_from_the_sidebar_ends_a_wait(
    stage: Stage, make_pair: Callable[..., Pair]
) -> None:
    """The setting also applies to the current quantum. Wrong values are refused with words and
    change nothing."""
    pair = make_pair(stage, tq_s=600)
    panel = pair.page.panel().unfolded()
    pair.b_waits()
    expect(panel.part("countdown")).to_have_text(WHOLE_TURN, timeout=WHOLE_TURN_SHOWN_MS)
    for wrong, words in (("0", "from 0.1 s"), ("", "in seconds"), ("1e9", "86400")):
        panel.part("tq").fill(wrong)
        expect(panel.root.get_by_role("alert").filter(has_text=words)).to_be_visible()
        expect(panel.part("apply")).to_be_disabled()
        panel.part("tq").press("Enter")
    assert stage.status_json()["scheduler"]["tq_s"] == 600
    panel.part("tq").fill("1.5")
    panel.part("tq").press("Enter")
    expect(panel.part("apply")).to_have_count(0)
    pair.b.wait_end(USE)
    assert stage.status_json()["scheduler"]["tq_s"] == 1.5
    for mode in ("always", "off", "on"):
        panel.part("mode").select_option(mode)
        panel.part("apply").click()
        stage.daemon.wait_for(
            lambda s, mode=mode: s.scheduler.anti_thrash.value == mode, f"mode {mode}"
        )
        expect(panel.part("apply")).to_have_count(0)
        assert stage.status_json()["scheduler"]["anti_thrash"] == mode
    pair.enough()


def test_the_order_is_chosen_in_the_sidebar(stage: Stage, make_pair: Callable[..., Pair]) -> None:
    """The daemon's policies are explained in words, also while somebody waits; a change from
    another surface is shown."""
    pair = make_pair(stage, policy="interactive")
    panel = pair.page.panel().unfolded()
    order = panel.root.get_by_label("Policy")
    expect(order).to_have_value("interactive")
    expect(order.locator("option")).to_have_text(["interactive", "round-robin"])
    pair.b_waits()
    order.select_option(label="round-robin")
    expect(order).to_have_accessible_description(re.compile("Everybody gets a whole turn"))
    assert stage.status_json()["scheduler"]["policy"] == "interactive", "not before it is applied"
    panel.part("apply").click()
    expect(panel.part("apply")).to_have_count(0)
    assert stage.status_json()["scheduler"]["policy"] == "round-robin"
    stage.set(policy="interactive")
    expect(order).to_have_value("interactive")
    pair.enough()


@pytest.mark.parametrize("place", ["toolbar", "sidebar"])
def test_a_wait_is_given_up(place: str, stage: Stage, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(stage)
    panel = pair.page.panel()
    pair.b_waits()
    b = pair.session(pair.b)
    expect(panel.queue_entry(b)).to_be_visible()
    if place == "toolbar":
        pair.b.toolbar("interrupt").click()
    else:
        panel.part("leave-queue").click()
    pair.b.wait_end(USE)
    (error,) = [o for o in pair.b.outputs(USE) if o["output_type"] == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    expect(pair.b.output(USE).filter(has_text="interrupted while waiting")).to_be_visible()
    expect(pair.b.waiting_line(USE)).to_have_count(0)
    expect(panel.part("queue-entry")).to_have_count(0)
    expect(panel.part("my-wait")).to_contain_text("Paged out")
    expect(pair.page.status_item).to_contain_text("paged out")
    assert not stage.daemon.status().queue
    pair.b.run(CPU)
    assert pair.a.running(USE), "it was not its cell"
    pair.enough()
    pair.b.run(USE)


def test_a_reload_during_a_wait(stage: Stage, make_pair: Callable[..., Pair]) -> None:
    """The page recovers within seconds; the wait continues meanwhile, and ends."""
    pair = make_pair(stage)
    pair.b_waits()
    b = pair.session(pair.b)
    pair.page.wait_saved(pair.b.path)
    before_s = stage.daemon.status().queue[0].waited_s
    read_s = time.monotonic()
    pair.page.reload()
    panel = pair.page.panel()
    expect(panel.queue_entry(b)).to_be_visible()
    expect(panel.part("countdown")).to_have_text(WHOLE_TURN, timeout=WHOLE_TURN_SHOWN_MS)
    expect(panel.part("my-wait")).to_contain_text("1st of 1")
    passed_s = time.monotonic() - read_s
    waited_s = stage.daemon.status().queue[0].waited_s
    assert waited_s >= before_s + passed_s, "it lost its place"
    pair.enough_path.touch()
    stage.wait_state(pair.b.path, "idle")
    expect(panel.part("queue-entry")).to_have_count(0)
    expect(panel.spans("held", b).first).to_be_attached()
    pair.b.run(USE)
    assert pair.b.outputs(USE)[-1]["text"] == "stepped\n"


def test_two_browsers_see_the_same(
    stage: Stage, make_pair: Callable[..., Pair], open_lab: Callable[..., LabPage]
) -> None:
    """Two people look at one server. Both see the wait, the change that one of them makes, and the
    end; the server has one connection to the daemon for both."""
    pair = make_pair(stage)
    other = open_lab(stage)
    panels = [pair.page.panel(), other.panel()]
    pair.b_waits()
    b = pair.session(pair.b)
    for panel in panels:
        expect(panel.part("countdown")).to_contain_text(WHOLE_TURN, timeout=WHOLE_TURN_SHOWN_MS)
    wait_until(lambda: stage.connections() == 1, "one connection for both")
    panels[1].unfolded().part("tq").fill("300")
    panels[1].part("tq").press("Enter")
    for panel in panels:
        expect(panel.part("tq")).to_have_value("300")
        expect(panel.part("countdown")).to_contain_text(re.compile("(4|5) min"))
    _click_opens(panels[1], other, b, pair.b.path)
    pair.enough_path.touch()
    for panel in panels:
        expect(panel.part("queue-entry")).to_have_count(0)
    pair.enough()


def _click_opens(panel: Panel, page: LabPage, session: str, path: str) -> None:
    """Click in a browser in which the notebook is not open yet."""
    panel.queue_entry(session).get_by_role("button").click()
    page.notebook(path).wait_shown()
    page.notebook(path).wait_in_front()


def test_a_notebook_that_waits_in_the_background(
    stage: Stage, make_pair: Callable[..., Pair]
) -> None:
    """Its tab says that it waits; a click on it in the queue brings it to the front."""
    pair = make_pair(stage)
    panel = pair.page.panel()
    pair.b_waits()
    pair.a.to_front()
    expect(pair.b.marked_tab).to_be_visible()
    expect(pair.a.marked_tab).to_have_count(0)
    panel.queue_entry(pair.session(pair.b)).locator("button.jp-Kiwi-name").click()
    pair.b.wait_in_front()
    expect(pair.b.marked_tab).to_have_count(0)
    pair.a.to_front()
    expect(pair.b.marked_tab).to_be_visible()
    pair.enough()
    pair.b.wait_end(USE)
    expect(pair.b.marked_tab).to_have_count(0)
