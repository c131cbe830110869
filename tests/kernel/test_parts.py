"""Tests of single parts: waiting line, texts, overrides, left-over threads, garbage collection."""

from __future__ import annotations

import ast
import gc
import threading
from typing import TYPE_CHECKING

import pytest

from kiwi_core.states import Notice
from kiwi_core.wire.messages import Waiting
from kiwi_jupyter.kernel.config import Kiwi
from kiwi_jupyter.kernel.display import CellWaitLine, as_html
from kiwi_jupyter.kernel.gcguard import GcGuard
from kiwi_jupyter.kernel.leftovers import Before
from kiwi_jupyter.kernel.override import rewrite_head, take_override
from kiwi_jupyter.kernel.words import share_done, suspended_line, waiting_line

if TYPE_CHECKING:
    from collections.abc import Iterator


def waiting(**fields: object) -> Waiting:
    return Waiting(**({"burst": 1, "position": 2, "ahead": 1} | fields))  # type: ignore[arg-type]


def test_the_line_of_a_wait_that_no_daemon_knows_yet() -> None:
    assert waiting_line(None, 3.0) == "Waiting for the GPU (3.0 s)"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            waiting(holder="train.ipynb", expected_wait_s=12.0),
            (
                "Suspended in mid-cell: 2nd in line, train.ipynb has the GPU; this cell goes on "
                "in about 12 s"
            ),
        ),
        (
            waiting(position=1, activity="its memory is paging in", expected_wait_s=0.1),
            (
                "Suspended in mid-cell: 1st in line, its memory is paging in; this cell goes on any"
                " moment"
            ),
        ),
        (waiting(position=0, ahead=0), "Suspended in mid-cell: goes on by itself"),
        (waiting(blocked=Notice.STOPPED, detail="Do this."), "Suspended in mid-cell. Do this."),
    ],
)
def test_words_of_a_suspension(state: Waiting, text: str) -> None:
    assert suspended_line(state) == text


def test_share_done() -> None:
    assert share_done(None, 1.0) is None
    assert share_done(waiting(), 1.0) is None
    assert share_done(waiting(expected_wait_s=3.0), 1.0) == 0.25
    assert share_done(waiting(expected_wait_s=0.0), 0.0) == 0.0


def test_html_is_escaped_and_says_what_it_is() -> None:
    markup = as_html("<script>x</script>", 0.5)
    assert "<script>" not in markup
    assert 'role="status"' in markup
    assert 'aria-valuenow="50"' in markup
    assert "progressbar" not in as_html("x", None)


class Screen:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.said: list[str] = []
        self.line = CellWaitLine(
            lambda text, _html: self.said.append(text), delay_s=0.3, clock=lambda: self.now_s
        )


def test_the_line_comes_late_is_redrawn_rarely_and_goes() -> None:
    screen = Screen()
    screen.line.say("a")
    assert screen.said == []
    assert screen.line.due_in_s() == pytest.approx(0.3)
    screen.now_s = 0.4
    screen.line.say("a")
    screen.now_s = 0.5
    screen.line.say("a")
    assert screen.said == ["a"]
    screen.line.say("b")
    screen.now_s = 2.0
    screen.line.say("b")
    screen.line.close()
    screen.line.close()
    assert screen.said == ["a", "b", "b", ""]


def test_a_line_that_was_never_shown_leaves_nothing() -> None:
    screen = Screen()
    screen.line.say("a")
    screen.line.close()
    assert screen.said == []


def test_override_keeps_the_cell_as_it_is() -> None:
    def inner(lines: list[str]) -> list[str]:
        return [f"magic({lines[0].strip()!r})\n"]

    assert rewrite_head(["%%kiwi gpu\n", "x\n"], inner) == ['"%%kiwi gpu"\n', "x\n"]
    assert rewrite_head(["%%kiwi cpu \n", "%%time\n"], inner)[1] == "magic('%%time')\n"
    for lines in (["%%kiwi gpu\n"], ["%%kiwi other\n", "x\n"], ["x\n"], []):
        assert rewrite_head(list(lines), inner) == lines
    tree = ast.parse('"%%kiwi gpu"\nx = 1')
    assert take_override(tree) == "gpu"
    assert len(tree.body) == 1
    assert take_override(tree) is None


def test_leftovers() -> None:
    before, stop = Before.now(), threading.Event()
    named = [threading.Thread(target=stop.wait, name=n) for n in ("mine", "kiwi-x", "IOPub")]
    for thread in named:
        thread.start()
    left = before.left()
    try:
        assert [thread.name for thread in left.threads] == ["mine"]
        assert left.alive
    finally:
        stop.set()
        for thread in named:
            thread.join()
    assert not left.alive


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_garbage_from_before_is_left_alone_between_bursts() -> None:
    died: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            died.append(1)

    guard = GcGuard()
    Cycle()
    guard.burst_ended()
    gc.collect()
    assert died == []
    guard.burst_began()
    gc.collect()
    assert died == [1]


@pytest.mark.usefixtures("thawed")
def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    guard = GcGuard()
    guard.burst_ended()
    guard.burst_began()
    assert gc.get_freeze_count() > 0


def test_what_the_user_says_to_kiwi_is_the_setting_then_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KIWI_GPU", raising=False)
    config = Kiwi()
    assert config.named_gpu() == ""
    monkeypatch.setenv("KIWI_GPU", "GPU-5")
    assert config.named_gpu() == "GPU-5"
    config.gpu = "0"
    assert config.named_gpu() == "0"
