"""The environment of a part of run_all.py: its rows, its programs, a daemon, and its time.

Each part runs in a process of its own (see conductor.py). Nothing here waits without a limit.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
JOB = str(Path(__file__).with_name("job.py"))
MIB, GIB = 1 << 20, 1 << 30

SPARE_S = 16.0
"""Time before its limit when a part stops: its programs need time to end by themselves."""
END_S = 5.0
"""Time for a program to end by itself, and again after SIGTERM."""


class Skipped(Exception):  # noqa: N818 - an outcome, not an error
    """This part, or this row, cannot run here; the text says why."""


class Ended(RuntimeError):  # noqa: N818 - as TimeoutError, it says what came instead of an answer
    """The program has ended, or its output is not as it should be."""


@dataclass
class Stage:
    """One part of the run, inside the part's own process."""

    name: str
    folder: Path
    """Folder of results and logs, which come back."""
    work: Path
    """Scratch space of the whole run."""
    emulated: bool
    """Whether this is the self-test on the emulated driver: small sizes, meaningless figures."""
    ends_s: float
    """Time when the part must be done, on the monotonic clock."""
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment of programs without Kiwi."""
    uuid: str = ""
    total_bytes: int = 0
    ram_bytes: int = 0
    """System RAM that was available when the run began, cgroup limits included."""
    job_s: float = 32.0
    """Time that a job of a pair takes by itself."""
    fault: str = ""
    """Fault of the self-test; ``stopped-job`` and ``dying-job`` hit each part's first program."""

    @property
    def left_s(self) -> float:
        """Seconds until the part should have ended by itself."""
        return self.ends_s - SPARE_S - time.monotonic()

    def row(
        self,
        name: str,
        value: object,
        *,
        unit: str = "",
        target: str = "",
        passed: bool | None = None,
        **more: object,
    ) -> None:
        """Record an answer, which is on disk when this returns.

        ``passed`` is ``None`` without a target. A row that is recorded again under its name
        replaces the earlier one.
        """
        row = {"name": name, "value": value, "unit": unit, "target": target, "passed": passed}
        with (self.work / f"{self.name}.rows").open("a") as file:
            file.write(json.dumps(row | more) + "\n")
        print(f"  {name}: {value} {unit} {_verdict(passed)}".rstrip(), flush=True)

    def at_most(self, name: str, value: float, limit: float, **more: object) -> None:
        """Record a ratio whose target is an upper bound."""
        passed = value <= limit
        self.row(name, round(value, 4), unit="×", target=f"≤ {limit:g} ×", passed=passed, **more)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Turn an error in the block into a row, so that the rest of the part goes on."""
        try:
            yield
        except Skipped as why:
            self.row(name, f"left out: {why}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            self.row(name, f"failed: {type(error).__name__}: {error}"[:600], passed=False)

    def spawn(self, command: list[str], env: dict[str, str] | None = None) -> Program:
        """Start a program that is controlled by lines."""
        program = Program(command, self.env if env is None else env)
        fault, self.fault = self.fault, ""
        if fault in ("stopped-job", "dying-job"):
            program.hit = signal.SIGSTOP if fault == "stopped-job" else signal.SIGKILL
        else:
            self.fault = fault
        return program

    def run(self, command: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
        """Run a program to its end and return its last line."""
        program = self.spawn(command, env)
        try:
            return program.finish(self.left_s)
        finally:
            program.end()

    def together(self, programs: list[Program]) -> list[dict[str, Any]]:
        """Wait for programs that run at the same time; return the last line of each."""
        try:
            return [program.finish(self.left_s) for program in programs]
        finally:
            for program in programs:
                program.end()

    def size(self, share: float) -> int:
        """Return ``share`` of the GPU in bytes, capped so that two programs of this size fit RAM.

        Both can be out at the same time, and the in-process pager keeps host memory for what is in.
        """
        return min(int(self.total_bytes * share), int(self.ram_bytes * 0.4)) // MIB * MIB


def _verdict(passed: bool | None) -> str:
    return {None: "", True: "(pass)", False: "(FAIL)"}[passed]


# --- programs -----------------------------------------------------------------------------------


class Program:
    """A child process that prints JSON lines and reads lines from its input."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.pid = self._process.pid
        self.hit: signal.Signals | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError, OSError):
            for line in self._process.stdout:
                self._lines.put(line)
                self._meet_fault()
        self._lines.put(None)

    def _meet_fault(self) -> None:
        if self.hit is not None:
            self._process.send_signal(self.hit)
            self.hit = None

    def line(self, within_s: float) -> dict[str, Any]:
        """Return the next JSON line. Raise TimeoutError if none comes, Ended if none can."""
        ends_s = time.monotonic() + max(0.1, within_s)
        while True:
            try:
                text = self._lines.get(timeout=max(0.01, ends_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no word from program {self.pid} in {within_s:.0f} s") from None
            if text is None:
                self._lines.put(None)
                raise Ended(f"program {self.pid} ended with status {self.status(END_S)}")
            if text.startswith("{"):
                said: dict[str, Any] = json.loads(text)
                return said

    def say(self, text: str = "\n") -> None:
        """Write to the program's input; ignore a program that has gone."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def finish(self, within_s: float) -> dict[str, Any]:
        """End its input and return its last JSON line."""
        self.end_input()
        ends_s = time.monotonic() + within_s
        last: dict[str, Any] = {}
        try:
            while True:
                last = self.line(ends_s - time.monotonic())
        except Ended:
            status = self.status(END_S)
        if status != 0 or not last:
            raise Ended(f"program {self.pid} ended with status {status}")
        return last

    def show_stacks(self) -> None:
        """Make it write the stacks of its threads to its error output. Only for a program that has
        registered SIGUSR1 with ``faulthandler``: others die of the signal."""
        with suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)

    def end_input(self) -> None:
        """Close its input; it then prints its last line and ends."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.close()

    def status(self, within_s: float = 0.0) -> int | None:
        """Return its exit status, ``None`` while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(0.001, within_s))
        return None

    def end(self) -> int | None:
        """End it, the gentlest way first; return its exit status, ``None`` if nothing helps.

        A process whose memory was restored must not be killed while it is live on some drivers
        (the host hangs), so it gets every chance to end by itself.
        """
        self.end_input()
        for number in (None, signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._process.send_signal(number)
            status = self.status(0.2 if number is signal.SIGCONT else END_S)
            if status is not None:
                self._close_output()
                return status
        return None

    def _close_output(self) -> None:
        assert self._process.stdout is not None
        self._reader.join(END_S)  # a grandchild may still hold the other end
        if not self._reader.is_alive():
            self._process.stdout.close()


def job_command(kind: str, **options: object) -> list[str]:
    """Return the command line of job.py; ``options`` as its ``--option=value``."""
    words = [f"--{name}={value}" for name, value in options.items() if value is not True]
    flags = [f"--{name}" for name, value in options.items() if value is True]
    return [sys.executable, JOB, kind, *words, *flags]


def kiwi(*words: str) -> list[str]:
    """Return a ``kiwi`` command line of this checkout."""
    return [sys.executable, "-m", "kiwi_core.cli", *words]


def in_a_log(command: list[str], log: Path, within_s: float, env: dict[str, str]) -> int | None:
    """Run a command whose output goes to ``log`` line by line; return its status.

    ``None`` means that it was ended. It gets Ctrl-C first: pytest then prints its results so far.
    """
    with log.open("a") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(max(1.0, within_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


def wait_until(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    """Return the first true answer of ``condition``; raise TimeoutError if none comes."""
    ends_s = time.monotonic() + within_s
    while time.monotonic() < ends_s:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.05)
    raise TimeoutError(f"{what}: not within {within_s:.0f} s")


# --- a daemon -----------------------------------------------------------------------------------


class Daemon:
    """``kiwi daemon`` for the GPU that is measured, and programs under it."""

    def __init__(self, stage: Stage, directory: Path, tq_s: float, *options: str) -> None:
        self.stage, self.directory = stage, directory
        self.env = stage.env | {
            "KIWI_SOCKET_DIR": str(directory), "KIWI_STATE_DIR": str(directory / "state"),
        }  # fmt: skip
        # A machine that proves itself meanwhile would disturb what is measured.
        words = ["--gpu", stage.uuid, "--tq", str(tq_s), "--pager", "checkpoint"]
        words += ["--socket-dir", str(directory), *options]
        self.process = subprocess.Popen(
            kiwi("daemon", *words), env=self.env, cwd=directory, stdin=subprocess.DEVNULL
        )

    def wait_ready(self) -> None:
        """Wait until the daemon answers. Raise RuntimeError if it ends, TimeoutError otherwise."""

        def answers() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"kiwi daemon ended with status {self.process.returncode}")
            with suppress(Exception):
                self.status()
                return True
            return False

        wait_until(answers, min(60.0, self.stage.left_s), "kiwi daemon is ready")

    def status(self) -> dict[str, Any]:
        """Return what ``kiwi status --json`` says of the GPU, read over the socket."""
        import msgspec

        from kiwi_core.client import Client
        from kiwi_core.wire.messages import Role

        path = next(self.directory.glob("GPU-*.sock"))
        with Client(path, role=Role.OBSERVER, reconnect=False) as client:
            client.connect()
            said: dict[str, Any] = msgspec.to_builtins(client.status())
            return said

    def swaps(self) -> list[dict[str, Any]]:
        """Return the moves that the status lists, oldest first."""
        return [swap for swap in self.status()["swaps"] if swap["seconds"] > 0]

    def run(self, name: str, command: list[str], pager: str) -> Program:
        """Start a program as a session."""
        words = ["run", "--require", "--pager", pager, "--name", name, "--", *command]
        return self.stage.spawn(kiwi(*words), self.env)

    def set(self, *settings: str) -> None:
        subprocess.run(
            kiwi("set", *settings, "--socket-dir", str(self.directory)),
            env=self.env, check=True, capture_output=True, timeout=30,
        )  # fmt: skip

    def stop(self) -> None:
        """Stop the daemon, and let it page everything in before it ends."""
        self.process.terminate()
        for _ in range(2):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(max(END_S, min(20.0, self.stage.left_s)))
                return
            self.process.kill()


@contextmanager
def daemon(stage: Stage, tq_s: float, *options: str) -> Iterator[Daemon]:
    """Run a daemon with a directory of its own, and remove both at the end."""
    # The path is short: a socket's path may have 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="kw-"))
    one = Daemon(stage, directory, tq_s, *options)
    try:
        one.wait_ready()
        yield one
    finally:
        one.stop()
        shutil.rmtree(directory, ignore_errors=True)
