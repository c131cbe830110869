"""Tests that ``kiwi demo`` leaves no process and no file when it is told to end at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import leftovers
import psutil
import pytest
from daemon_box import KIWI
from patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMES_WITHIN_S = 120.0
"""Limit for JupyterLab to appear on a busy machine."""

ENDS_WITHIN_S = 150.0
"""A kernel whose memory is out has a minute to end, and a daemon has half a minute."""

pytestmark = pytest.mark.timeout(400)


private_tmp = leftovers.private_tmp


WRAPPER = """
sleep 770 >/dev/null 2>&1 & echo $!
exec {python} -c '
import subprocess, sys
from kiwi_core.cli.leaving import ending_descendants
with ending_descendants():
    print(subprocess.Popen(["sleep", "771"]).pid, flush=True)
'
"""


def test_what_a_script_started_before_it_stays() -> None:
    """The shell becomes the command, so the shell's children are the command's."""
    script = WRAPPER.format(python=sys.executable)
    done = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    before, own = map(int, done.stdout.split())
    try:
        assert psutil.pid_exists(before)
        wait_until(lambda: not psutil.pid_exists(own), "what it started itself is gone")
    finally:
        os.kill(before, signal.SIGKILL)


class Demo:
    def __init__(self, directory: Path, *arguments: str) -> None:
        self._log = directory / "its.log"
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [KIWI, "demo", "--emulate", "--size", "128MiB", *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", start_new_session=True,
            )  # fmt: skip
        self._directory = directory

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, look: Callable[[], object], what: str) -> None:
        def come() -> object:
            assert self.process.poll() is None, self.said
            return look()

        wait_until(come, f"{what}; it said:\n{self.said}", COMES_WITHIN_S)

    def wait_word(self, word: str) -> None:
        self.wait(lambda: word in self.said, word)

    def address(self) -> re.Match[str] | None:
        return re.search(r"(http://127\.0\.0\.1:\d+/)\S*\?token=(\w+)", self.said)

    def forget_log(self) -> None:
        self._log.unlink()

    def end(self, number: signal.Signals, *, again: bool = False) -> None:
        self.process.send_signal(number)
        if again:
            self.process.send_signal(number)
        code = self.process.wait(ENDS_WITHIN_S)
        said = self.said
        self.forget_log()
        assert code == 128 + number, said
        assert "kiwi_core/cli" not in said, f"a traceback of its own: {said}"


def start_kernel(jupyterlab: re.Match[str]) -> None:
    request = urllib.request.Request(
        f"{jupyterlab[1]}api/kernels", method="POST", data=b"{}",
        headers={"Authorization": f"token {jupyterlab[2]}"},
    )  # fmt: skip

    def started() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=COMES_WITHIN_S) as answer:
                return bool(json.load(answer)["id"])
        except urllib.error.URLError:
            return False  # it has printed an address, and does not listen yet

    wait_until(started, "a kernel", COMES_WITHIN_S)


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("EMULATED GPU", signal.SIGHUP),
        ("starting two kernels", signal.SIGTERM),
        ("A starts a cell", signal.SIGHUP),
        ("A prints", signal.SIGTERM),
    ],
)
def test_without_a_browser(private_tmp: Path, word: str, number: signal.Signals) -> None:
    demo = Demo(private_tmp, "--headless")
    demo.wait_word(word)
    demo.end(number)


def test_while_memory_moves(private_tmp: Path) -> None:
    demo = Demo(private_tmp, "--headless", "--copy-rate", "64MiB")
    demo.wait_word("begins to move out")
    demo.end(signal.SIGTERM, again=True)


def test_in_jupyterlab(private_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo has opened a browser, and a kernel computes."""
    opened = private_tmp / "opened"
    browser = private_tmp / "browser"
    browser.write_text(f"#!/bin/sh\ntouch {opened}\nexec sleep 600\n")
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s &")
    demo = Demo(private_tmp, "--port", "0")
    demo.wait(opened.exists, "the browser")
    demo.wait(demo.address, "JupyterLab's address")
    found = demo.address()
    assert found is not None
    start_kernel(found)
    demo.end(signal.SIGTERM)
    opened.unlink()
    browser.unlink()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("--no-browser", "--port", "0"), "token="), (("--headless",), "B starts a cell")],
)
def test_killed(private_tmp: Path, arguments: tuple[str, ...], word: str) -> None:
    """A killed demo cannot end its children in order, and they end all the same. Its files stay."""
    demo = Demo(private_tmp, *arguments)
    demo.wait_word(word)
    if (found := demo.address()) is not None:
        start_kernel(found)
    family = psutil.Process(demo.process.pid).children(recursive=True)
    assert len(family) > 2
    demo.process.kill()
    demo.process.wait()
    _, alive = psutil.wait_procs(family, ENDS_WITHIN_S)
    assert not alive
    (stage,) = private_tmp.glob("kiwi-demo-*")
    shutil.rmtree(stage)
    for connection_file in private_tmp.glob("tmp*.json"):
        connection_file.unlink()
    demo.forget_log()


def test_while_jupyterlab_starts(private_tmp: Path) -> None:
    demo = Demo(private_tmp, "--no-browser", "--port", "0")
    demo.wait_word("End the demo with")
    demo.end(signal.SIGTERM)


def test_a_closed_terminal(private_tmp: Path) -> None:
    """The demo cannot write to the terminal any more, either."""
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [KIWI, "demo", "--emulate", "--size", "128MiB", "--no-browser", "--port", "0"],
        stdin=end, stdout=end, stderr=end, cwd="/", start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(end)
    said = b""
    while b"token=" not in said:
        ready, _, _ = select.select([terminal], [], [], COMES_WITHIN_S)
        assert ready, said.decode()
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(ENDS_WITHIN_S) == 128 + signal.SIGHUP
