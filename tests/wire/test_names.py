"""Tests that names fit a screen, and that settings stay within their limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_core.errors import CallerError
from kiwi_core.states import AntiThrash, Priority
from kiwi_core.wire.messages import Set
from kiwi_core.wire.names import NAME_MAX_CHARS, check_settings, clean_name


@given(st.text())
def test_any_text_becomes_a_name(text: str) -> None:
    name = clean_name(text)
    assert len(name) <= NAME_MAX_CHARS
    assert name.isprintable()
    name.encode()
    assert clean_name(name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", ""),
        ("train model.ipynb", "train model.ipynb"),
        ("größe-模型.ipynb", "größe-模型.ipynb"),
        ("a\nb\tc", "a b c"),
        ("\x1b[2J", "�[2J"),
        ("\u202egpj.exe", "�gpj.exe"),
        ("\udcff", "�"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 199 + "…"),
    ],
)
def test_names(text: str, name: str) -> None:
    assert clean_name(text) == name


@pytest.mark.parametrize(
    "wanted",
    [
        Set(tq_s=0.1),
        Set(tq_s=86400.0),
        Set(anti_thrash=AntiThrash.OFF),
        Set(tq_s=30.0, anti_thrash=AntiThrash.ON),
        Set(policy="interactive"),
        Set(session="k1", priority=Priority.HIGH),
    ],
)
def test_good_settings(wanted: Set) -> None:
    check_settings(wanted)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Set(), "nothing to set"),
        (Set(session="k1"), "is a session's"),
        (Set(priority=Priority.LOW), "is a session's"),
        (Set(tq_s=0.0999), "out of range"),
        (Set(tq_s=-1.0), "out of range"),
        (Set(tq_s=86401.0), "Choose one from 0.1 s to 24 h 0 min"),
        (Set(tq_s=float("nan")), "out of range"),
        (Set(tq_s=float("inf"), anti_thrash=AntiThrash.ON), "out of range"),
    ],
)
def test_bad_settings(wanted: Set, words: str) -> None:
    with pytest.raises(CallerError, match=words) as caught:
        check_settings(wanted)
    assert caught.value.code == "bad-setting"
