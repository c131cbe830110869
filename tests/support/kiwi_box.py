"""The installed Kiwi, for tests that import nothing of it: the command, programs under
``kiwi run``, and programs outside Kiwi that use the same emulated GPU."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from installed import KIWI, end
from patience import PATIENCE_S, wait_until
from talker import Talker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OURS = ("LD_PRELOAD", "KIWI_PRELOAD", "KIWI_PAGER")
"""Variables that ``kiwi run --pager inprocess`` sets, as any program needs them for the library."""

ON_THE_GPU = """
import os, signal, subprocess, sys, time
from cuda.bindings import driver
MIB = 1 << 20
PIECE = 2 * MIB
def ck(result):
    assert not result[0], result
    return result[1] if len(result) > 1 else None
ck(driver.cuInit(0))
ck(driver.cuCtxSetCurrent(ck(driver.cuDevicePrimaryCtxRetain(ck(driver.cuDeviceGet(0))))))
"""

ANSWERING = (
    ON_THE_GPU
    + """
held = []
def take(mib):
    '''In pieces, which can be moved one by one.'''
    for _ in range(mib // 2):
        value = (len(held) * 7 + 3) % 251
        pointer = ck(driver.cuMemAlloc(PIECE))
        ck(driver.cuMemsetD8(pointer, value, PIECE))
        held.append((pointer, value))
def intact():
    for pointer, value in held:
        back = bytearray(PIECE)
        ck(driver.cuMemcpyDtoH(back, pointer, PIECE))
        if back.count(value) != PIECE:
            return False
    return True
for line in sys.stdin:
    print(eval(line), flush=True)
"""
)
"""A program that holds GPU memory and answers one expression a line."""

GREEDY = (
    ON_THE_GPU
    + """
full = False
while True:
    if driver.cuMemAlloc(PIECE)[0]:
        if not full:
            print("full", flush=True)
            full = True
        time.sleep(0.001)
"""
)
"""A program that takes whatever is free, says "full", and takes whatever becomes free."""


class KiwiBox:
    """A ``kiwi daemon --emulate SIZE ARGS…`` in a directory of its own."""

    def __init__(self, directory: Path, size: str, *args: str, descriptors: int = 0) -> None:
        self.directory = directory
        self._command = [str(KIWI), "daemon", "--emulate", size, *args]
        self._descriptors = descriptors
        self._daemon: subprocess.Popen[bytes] | None = None
        self._others: list[subprocess.Popen[str]] = []
        self.program_env: dict[str, str] = {}
        """Environment that ``kiwi run --pager inprocess`` gives its program, without the
        session."""
        self.env = {name: value for name, value in os.environ.items() if name not in OURS}
        self.env["KIWI_SOCKET_DIR"] = str(directory)

    # --- the daemon

    def start(self) -> None:
        with (self.directory / "daemon.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                self._command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=self._limit,
            )  # fmt: skip
        wait_until(self.status_or_none, f"the daemon answers; {self.log()}")
        if not self.program_env:  # only once: it starts a program, which is a session
            self.program_env = self._ask_for_environment()

    def _limit(self) -> None:
        if self._descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._descriptors, self._descriptors))

    def kill_daemon(self) -> None:
        """Kill the supervisor and the daemon at once, as an out-of-memory killer does."""
        assert self._daemon is not None
        psutil.wait_procs(end(self._daemon), timeout=PATIENCE_S)

    def log(self) -> str:
        path = self.directory / "daemon.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def status_or_none(self) -> dict[str, Any] | None:
        """Return the first element of ``gpus`` of ``kiwi status --json``, or ``None``.

        Ask the daemon itself: tests that wait ask often, and a start of the command takes the
        processors a hundred times as long as an answer."""
        for path in sorted(self.directory.glob("GPU-*.sock")):
            with suppress(OSError, ValueError, AssertionError), closing(Talker(path)) as talker:
                talker.hello()
                gpu: dict[str, Any] | None = talker.ask("get-status").get("gpu")
                return gpu
        return None

    def set(self, setting: str) -> None:
        """Run ``kiwi set SETTING``."""
        subprocess.run([KIWI, "set", setting], env=self.env, check=True, timeout=60)

    def session(self, name: str) -> dict[str, Any] | None:
        """Return the session of that name, or ``None`` if there is none just now."""
        sessions = (self.status_or_none() or {}).get("sessions", [])
        return next((one for one in sessions if one["name"] == name), None)

    def wait_session(
        self, name: str, condition: Callable[[dict[str, Any]], Any], what: str,
        timeout_s: float = PATIENCE_S,
    ) -> dict[str, Any]:  # fmt: skip
        def look() -> dict[str, Any] | None:
            found = self.session(name)
            return found if found is not None and condition(found) else None

        try:
            session: dict[str, Any] = wait_until(look, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.status_or_none()}\n{self.log()}") from None
        return session

    # --- programs

    def program(self, name: str, *options: str, code: str = ANSWERING) -> Program:
        """Start ``kiwi run OPTIONS -- python -c CODE`` as the session ``name``."""
        command = [str(KIWI), "run", "--require", "--name", name, *options]
        return self._begin(name, [*command, "--", sys.executable, "-c", code], self.env)

    def outside(self, code: str) -> Program:
        """Start a program that uses the same GPU without Kiwi."""
        env = {name: value for name, value in self.program_env.items() if name not in OURS}
        env["KIWI_DISABLE"] = "1"
        return self._begin("outside", [sys.executable, "-c", code], env)

    def _ask_for_environment(self) -> dict[str, str]:
        command = [str(KIWI), "run", "--require", "--pager", "inprocess", "--", "env", "-0"]
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, check=True, timeout=60
        )
        pairs = (pair.partition("=") for pair in done.stdout.split("\0") if pair)
        session = ("KIWI_RUN_SESSION", "KIWI_DISABLE")
        return {name: value for name, _, value in pairs if name not in session}

    def _begin(self, name: str, command: list[str], env: dict[str, str]) -> Program:
        program = Program(self, name, command, env)
        self._others.append(program.process)
        return program

    def close(self) -> None:
        """End everything, in whatever state it is."""
        for process in self._others:
            with process:
                end(process)
        if self._daemon is not None:
            self.kill_daemon()


class Program:
    """A program that answers one expression a line; made by ``KiwiBox``."""

    def __init__(self, box: KiwiBox, name: str, command: list[str], env: dict[str, str]) -> None:
        self.box, self.name = box, name
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        os.set_blocking(self.process.stdout.fileno(), False)  # type: ignore[union-attr]

    def ask(self, expression: str) -> None:
        """Send an expression; ``answer`` returns its value."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = PATIENCE_S) -> str:
        assert self.process.stdout is not None
        stream = self.process.stdout
        parts: list[str] = []  # an unbuffered program writes a line and its end separately

        def whole() -> bool:
            parts.append(stream.readline())
            return parts[-1].endswith("\n")

        try:
            wait_until(whole, f"an answer of {self.name}", timeout_s)
        except AssertionError as error:
            ended = f"exit status: {self.process.poll()}"
            told = f"{ended}\n{self.box.status_or_none()}\n{self.box.log()}"
            raise AssertionError(f"{error}\n{told}") from None
        return "".join(parts).strip()

    def get(self, expression: str, timeout_s: float = PATIENCE_S) -> str:
        self.ask(expression)
        return self.answer(timeout_s)

    def wait_rests(self) -> None:
        """Wait until the program no longer holds or wants the GPU, although it lives."""
        busy = ("running", "waiting", "suspended")
        self.box.wait_session(self.name, lambda s: s["state"] not in busy, f"{self.name} rests")

    def get_pid(self) -> int:
        """Return the pid of the program itself, which ``kiwi run`` has started."""
        return int(self.get("os.getpid()"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running_box(size: str, *args: str, descriptors: int = 0) -> Iterator[KiwiBox]:
    """Run a box; end all that was started in it at the end."""
    with tempfile.TemporaryDirectory(prefix="kw-", ignore_cleanup_errors=True) as directory:
        box = KiwiBox(Path(directory), size, *args, descriptors=descriptors)
        with closing(box):
            box.start()
            yield box
