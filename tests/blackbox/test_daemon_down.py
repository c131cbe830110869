"""Tests that a kernel that starts without a daemon waits for one, and joins it."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from installed import (
    KIWI,
    PATIENCE_S,
    environment,
    eventually,
    kiwi,
    short,
    started,
    status,
)
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

__all__ = ["short"]

GRACE_S = 10.0
"""How long a cell or a program waits for a daemon by default."""

GPU_CELL = """\
from cuda.bindings import driver as cuda
result = cuda.cuInit(0)
context = cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])
print("initialised", int(result[0]), int(context[0]))
"""


@dataclass
class Cell:
    code: str
    id: str
    messages: list[Any] = field(default_factory=list)
    reply: Any = None

    @property
    def text(self) -> str:
        parts = [m["content"] for m in self.messages if m["msg_type"] == "stream"]
        return "".join(part["text"] for part in parts)

    @property
    def displayed(self) -> str:
        kinds = ("display_data", "update_display_data", "comm_msg")
        parts = [m["content"]["data"] for m in self.messages if m["msg_type"] in kinds]
        return "\n".join(part.get("text/plain", part.get("text", "")) for part in parts)


class Kernel:
    """A plain kernel of the environment in which Kiwi is installed."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self.manager = KernelManager(
            transport="ipc", ip=str(directory / "k"), connection_file=str(directory / "k.json")
        )
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="test", language="python")
        self.manager.start_kernel(env=env, cwd=str(directory))
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def send(self, code: str) -> Cell:
        return Cell(code, self.client.execute(code))

    def look(self, cell: Cell) -> bool:
        """Read the messages that have come; return whether the cell is done."""
        for get in (self.client.get_iopub_msg, self.client.get_shell_msg):
            try:
                while True:
                    message = get(timeout=0.05)
                    if message["parent_header"].get("msg_id") != cell.id:
                        continue
                    if message["msg_type"] == "execute_reply":
                        cell.reply = message["content"]
                    cell.messages.append(message)
            except queue.Empty:
                continue
        states = [m["content"] for m in cell.messages if m["msg_type"] == "status"]
        return cell.reply is not None and {"execution_state": "idle"} in states

    def wait(self, cell: Cell) -> Cell:
        eventually(lambda: self.look(cell), f"the end of the cell {cell.code!r}")
        return cell

    def run(self, code: str) -> Cell:
        return self.wait(self.send(code))

    def wait_shown(self, cell: Cell, words: str) -> None:
        eventually(lambda: self.look(cell) or words in cell.displayed, f"it shows {words!r}")
        assert words in cell.displayed, cell.text

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@contextmanager
def kernel(short: Path, grace_s: float = PATIENCE_S) -> Iterator[Kernel]:
    """Start a kernel that waits ``grace_s`` for a daemon. This is longer than the default, because
    a busy machine may be slow to start one."""
    directory = short / "kernel"
    profile = directory / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    settings = f"c.Kiwi.daemon_grace_s = {grace_s}\n"
    (profile / "ipython_kernel_config.py").write_text(settings)
    env = environment(KIWI_SOCKET_DIR=str(short / "s"), IPYTHONDIR=str(directory / "ipython"))
    one = Kernel(directory, env)
    try:
        yield one
    finally:
        one.close()


def daemon(short: Path) -> AbstractContextManager[subprocess.Popen[bytes]]:
    command = [str(KIWI), "daemon", "--emulate", "1x64MiB", "--socket-dir", str(short / "s")]
    return started(command, short / "log", environment())


def answering(short: Path) -> Any:
    (gpu,) = eventually(lambda: status(short / "s"), "the daemon answers")
    return gpu


def was_there(short: Path, how: str) -> None:
    """Let a daemon come and go."""
    with daemon(short) as process:
        answering(short)
        if how == "told to end":
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0


def sessions(short: Path) -> list[int]:
    return [one["pid"] for gpu in status(short / "s") for one in gpu["sessions"]]


SHOWN = "Waiting for the Kiwi daemon"


@pytest.mark.parametrize("how", ["killed", "told to end"])
@pytest.mark.parametrize("awaits", [False, True], ids=["plain", "await"])
def test_its_first_cell_waits_and_joins(short: Path, how: str, awaits: bool) -> None:
    code = "import asyncio\nawait asyncio.sleep(0)\n" + GPU_CELL if awaits else GPU_CELL
    was_there(short, how)
    with kernel(short) as one:
        cell = one.send("%%kiwi gpu\n" + code)
        one.wait_shown(cell, SHOWN)
        assert "initialised" not in cell.text
        with daemon(short):
            one.wait(cell)
            assert "initialised 0 0" in cell.text, cell.text
            assert cell.displayed.split("\n")[-1] == "", "nothing of the wait stays"
            assert sessions(short) == [one.pid]


def test_it_waits_for_a_supervisor_that_starts_it_again(short: Path) -> None:
    with daemon(short) as process:
        gpu = answering(short)
        supervisor = psutil.Process(process.pid)
        supervisor.suspend()
        os.kill(gpu["daemon_pid"], signal.SIGKILL)
        with kernel(short) as one:
            cell = one.send("%%kiwi gpu\n" + GPU_CELL)
            one.wait_shown(cell, SHOWN)
            supervisor.resume()
            assert "initialised 0 0" in one.wait(cell).text
            assert sessions(short) == [one.pid]


def test_without_one_it_goes_on_and_joins_in_the_middle_of_a_cell(short: Path) -> None:
    was_there(short, "killed")
    with kernel(short, GRACE_S) as one:
        began_s = time.monotonic()
        first = one.run("%%kiwi gpu\nprint('ran')")
        assert time.monotonic() - began_s > GRACE_S / 2, "it was waited for"
        assert "ran" in first.text
        assert "runs without Kiwi" in first.text
        long = one.send("%%kiwi gpu\nimport time\nprint('began')\ntime.sleep(600)")
        eventually(lambda: one.look(long) or "began" in long.text, "not waited for twice")
        assert SHOWN not in long.displayed
        with daemon(short):
            eventually(lambda: sessions(short) == [one.pid], "the kernel joins by itself")
            eventually(
                lambda: status(short / "s")[0]["sessions"][0]["state"] == "running",
                "as one that computes",
            )
            one.manager.interrupt_kernel()
            assert one.wait(long).reply["status"] == "error"
            assert "initialised 0 0" in one.run("%%kiwi gpu\n" + GPU_CELL).text


def test_an_interrupt_ends_the_wait(short: Path) -> None:
    was_there(short, "killed")
    with kernel(short) as one:
        cell = one.send("%%kiwi gpu\nprint('ran')")
        one.wait_shown(cell, SHOWN)
        one.manager.interrupt_kernel()
        assert one.wait(cell).reply["ename"] == "KeyboardInterrupt"
        assert "ran" not in cell.text
        with daemon(short):
            answering(short)
            assert "initialised 0 0" in one.run("%%kiwi gpu\n" + GPU_CELL).text


def test_a_kernel_where_never_was_a_daemon_waits_for_none(short: Path) -> None:
    (short / "s").mkdir(mode=0o700)
    with kernel(short) as one:
        cell = one.run("%%kiwi gpu\nprint('ran')")
        assert "ran" in cell.text
        assert SHOWN not in cell.displayed


def test_a_program_waits_too(short: Path) -> None:
    env = environment(KIWI_SOCKET_DIR=str(short / "s"))
    log = short / "program"
    command = [str(KIWI), "run", "--require", "--", "/bin/echo", "ran with Kiwi"]
    with daemon(short) as process:
        gpu = answering(short)
        supervisor = psutil.Process(process.pid)
        supervisor.suspend()
        os.kill(gpu["daemon_pid"], signal.SIGKILL)
        with started(command, log, env) as program:
            eventually(lambda: b"Waiting up to" in log.read_bytes(), "it says that it waits")
            supervisor.resume()
            assert program.wait(PATIENCE_S) == 0, log.read_text()
    assert "ran with Kiwi" in log.read_text()
    began_s = time.monotonic()
    done = kiwi("run", "--", "/bin/echo", "ran without", env=env)
    assert "ran without" in done.stdout
    assert time.monotonic() - began_s > GRACE_S / 2
