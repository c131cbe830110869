"""Tests that the parent and all others continue when a program's child on the GPU is killed."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest
from emulated_gpu import EmulatedGpu
from kiwi_box import ANSWERING, running_box

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SLOW = 20 << 20
"""In bytes per second: the family's memory takes seven seconds if the child lives."""

PARENT = f"""
import subprocess, sys
class Child:
    def __init__(self):
        self.process = subprocess.Popen([sys.executable, "-c", {ANSWERING!r}],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
    def get(self, words):
        print(words, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()
    def ended(self):
        return self.process.wait()
child = Child()
{ANSWERING}
"""


@pytest.mark.parametrize("leader", ["parent", "child"])
@pytest.mark.parametrize("when", ["paged-out", "paging-in", "paging-out"])
def test_killed(when: str, leader: str) -> None:
    """``leader`` is the process with more memory, which takes longer to move. The move is slow
    until the child is dead, so that a busy machine sees it."""
    mine, its = (100, 40) if leader == "parent" else (40, 100)
    args = ("--idle-after", "0.5", "--tq", "600")
    with (
        running_box("1x256MiB", *args) as box,
        closing(EmulatedGpu(box.directory / "emulated-gpus")) as gpu,
    ):
        family = box.program("family", "--pager", "inprocess", code=PARENT)
        assert family.get(f"take({mine})") == "None"
        assert family.get(f"child.get('take({its})')") == "None"
        child = int(family.get("child.pid"))
        family.wait_rests()
        if when == "paging-out":
            gpu.copy_at(SLOW)  # before anybody can want its room
        other = box.program("other", "--pager", "inprocess")
        other.ask("take(200)")
        if when != "paging-out":
            box.wait_session("family", lambda s: s["state"] == "paged-out", "it is out")
            assert other.answer() == "None"
            other.wait_rests()
        if when == "paging-in":
            gpu.copy_at(SLOW)
            family.ask("intact()")
        box.wait_session("family", lambda s: s["state"] == when, when)
        os.kill(child, signal.SIGKILL)
        gpu.copy_at(0)
        if when == "paging-out":
            assert other.answer() == "None"
        if when == "paging-in":
            assert family.answer() == "True", box.log()
        assert family.get("child.ended()") == "-9"
        assert other.get("intact()") == "True"
        assert family.get("intact()") == "True"
        assert other.get("intact()") == "True"
