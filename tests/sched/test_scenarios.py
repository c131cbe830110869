"""Tests that the scenarios in ``scenarios/`` play exactly as they are written."""

from __future__ import annotations

import pytest
from world import SCENARIOS, World, play

FILES = sorted(SCENARIOS.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path):
    written = path.read_text().splitlines()
    assert play(written) == written


def test_a_wrong_answer_is_noticed():
    written = ["gpu 10", "0 a joins", "1 a asks 1", "        → grant a burst 2"]
    assert play(written) != written


def test_the_story_of_a_session_is_kept_after_it_left():
    world = World()
    world.do(0, "a joins; memory")
    world.do(1, "a asks 1")
    world.do(2, "memory a=1")
    world.do(3, "a dies")
    assert [line.text for line in world.scheduler.story("a")] == [
        "joined (resident)",
        "has the GPU for burst 1 (nobody in the way)",
        "its process ended",
    ]
    assert world.scheduler.story("nobody") == ()
    for number in range(100):
        world.do(4, f"s{number} joins; s{number} dies")
    assert world.scheduler.story("a") == ()
    assert world.scheduler.story("s99")


def test_stories_are_bounded():
    world = World()
    world.do(0, "a joins; memory")
    for burst in range(1, 200):
        world.do(burst, f"a asks {burst}; a ends {burst}")
    story = world.scheduler.story("a")
    assert len(story) == 64
    assert story[-1].text == "burst 199 ended (done)"
