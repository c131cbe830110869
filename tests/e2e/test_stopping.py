"""Tests of ``kiwi stop`` with two notebooks that do not fit the GPU together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cli_process import finish, start_kiwi
from pagers import DEFAULT, PagerUnderTest

if TYPE_CHECKING:
    from collections.abc import Callable

    from cli_process import Result
    from daemon import Daemon
    from notebooks import Notebook

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.usefixtures("pager")]


@pytest.fixture(scope="module")
def pager() -> PagerUnderTest:
    return DEFAULT


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon("1x256MiB")


@pytest.fixture
def pair(daemon: Daemon, make_notebook: Callable[..., Notebook]) -> tuple[Notebook, Notebook]:
    """Return A, whose memory is out, and B, whose memory is in its place."""
    a = make_notebook(daemon, "A", mib=150)
    b = make_notebook(daemon, "B", mib=150)
    b.assert_intact()
    a.wait_state("paged-out")
    return a, b


def test_nothing_is_stopped_if_somebody_could_not_come_back(
    daemon: Daemon, pair: tuple[Notebook, Notebook], kiwi: Callable[..., Result]
) -> None:
    refused = kiwi(daemon, "stop")
    assert (refused.code, refused.out) == (1, "")
    assert "not stopped" in refused.err
    assert "A.ipynb (152" in refused.err
    assert "--leave" in refused.err
    for notebook in pair:
        notebook.assert_intact()
    assert kiwi(daemon, "status").code == 0


def test_a_stop_that_waits_for_room(
    daemon: Daemon, pair: tuple[Notebook, Notebook], kiwi: Callable[..., Result]
) -> None:
    a, b = pair
    command = start_kiwi("stop", "--wait", **daemon.env)
    assert command.stdout is not None
    assert "no room for what is paged out of A.ipynb (152" in command.stdout.readline()
    assert b.check("check(cuda.cuMemFree(memory.address))\nprint('freed')").text == "freed\n"
    done = finish(command)
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith(": stopped\n")
    a.assert_intact()


def test_memory_that_is_left_has_one_story(
    daemon: Daemon, pair: tuple[Notebook, Notebook], kiwi: Callable[..., Result]
) -> None:
    """The command, the notebook and the next command say the same; once there is room, the memory
    comes back without a daemon."""
    a, b = pair
    done = kiwi(daemon, "stop", "--leave")
    assert (done.code, done.err) == (0, "")
    assert "left in system RAM: A.ipynb (" in done.out
    assert "was stopped with `kiwi stop`" in kiwi(daemon, "status").err
    cell = a.start("print('INTACT' if memory.intact() else 'DAMAGED')")
    a.kernel.until(lambda: "stays in system RAM" in cell.stream("stderr"), "the notebook is told")
    assert "without waiting" not in cell.stream("stderr")
    b.check("check(cuda.cuMemFree(memory.address))")
    a.kernel.finish(cell)
    assert "INTACT\n" in cell.text
