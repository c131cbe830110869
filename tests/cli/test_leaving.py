"""Tests of a command that is told to end: one signal suffices, unless it was lost."""

from __future__ import annotations

import os
import signal
import weakref
from contextlib import suppress

import pytest

from kiwi_core.cli.leaving import Terminated, leaving_on_signals


def told(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_a_second_signal_does_not_cut_short_what_the_first_began() -> None:
    steps: list[str] = []

    def clean_up() -> None:
        told(signal.SIGHUP)
        steps.append("first")
        try:
            raise OSError("something is gone already")
        except OSError:
            told()
            steps.append("second")

    def work() -> None:
        try:
            told()
        finally:
            clean_up()

    with pytest.raises(Terminated) as caught, leaving_on_signals():
        work()
    assert caught.value.number == signal.SIGTERM
    assert steps == ["first", "second"]


def test_one_signal_is_enough_though_it_was_swallowed() -> None:
    def work() -> None:
        with suppress(BaseException):  # like a callback of a weak reference
            told()
        signal.pause()
        raise AssertionError("the repeated signal did not raise")

    with pytest.raises(Terminated) as caught, leaving_on_signals():
        work()
    assert caught.value.number == signal.SIGTERM


def test_what_python_swallowed_is_not_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """It is no fault: the signal comes again."""

    class Module:
        pass

    def work() -> None:
        module = Module()
        watch = weakref.ref(module, lambda _gone: told())
        del module
        signal.pause()
        raise AssertionError(f"the repeated signal did not raise: {watch}")

    with pytest.raises(Terminated), leaving_on_signals():
        work()
    assert capfd.readouterr().err == ""


def test_a_second_signal_counts_where_the_first_was_swallowed() -> None:
    def work() -> None:
        with suppress(BaseException):  # like a callback from C
            told()
        told(signal.SIGHUP)

    with pytest.raises(Terminated) as caught, leaving_on_signals():
        work()
    assert caught.value.number == signal.SIGHUP
