"""What the parts of run_all.py share: time limits, results on disk, programs and a daemon."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
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


class Skipped(Exception):  # noqa: N818 - an outcome, not an error
    """This part cannot be run here; the text says why."""


@dataclass
class Bench:
    """One run. ``env`` is that of programs without Kiwi: with the emulated driver where there is
    no other. ``only`` has the parts that are wanted; empty: all."""

    folder: Path
    emulated: bool
    ends_s: float
    work: Path
    job_s: float
    only: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    uuid: str = ""
    total_bytes: int = 0
    results: dict[str, Any] = field(default_factory=dict)
    _part: str = ""
    _part_ends_s: float = 0.0

    @property
    def left_s(self) -> float:
        """For the part that is under way."""
        return min(self.ends_s, self._part_ends_s) - time.monotonic()

    def part(
        self, name: str, at_least_s: float, at_most_s: float, run: Callable[[Bench], dict[str, Any]]
    ) -> None:
        """One that hangs costs ``at_most_s``, and one that fails costs the others nothing."""
        if self.only and name not in (*self.only, "machine"):
            return
        began_s = time.monotonic()
        self._part, self._part_ends_s = name, began_s + at_most_s
        whole_s = self.ends_s - began_s
        print(f"--- {name} ({whole_s:.0f} s left)", flush=True)
        try:
            if whole_s < at_least_s:
                raise Skipped(f"{whole_s:.0f} s were left and it takes {at_least_s:.0f} s")
            outcome = run(self)
        except Skipped as why:
            outcome = {"skipped": str(why)}
        except Exception as error:  # noqa: BLE001 - one part's failure must not cost the others
            so_far = self.results.get(name, {})
            outcome = {**so_far, "failed": f"{type(error).__name__}: {error}"[:2000]}
        outcome["took_s"] = round(time.monotonic() - began_s, 1)
        self.so_far(outcome)
        print(json.dumps(outcome)[:1500], flush=True)

    def so_far(self, outcome: dict[str, Any]) -> None:
        """On disk at once: a run that is cut off yields what it has."""
        self.results[self._part] = outcome
        new = self.folder / "results.json.new"
        new.write_text(json.dumps(self.results, indent=1) + "\n")
        new.replace(self.folder / "results.json")


# --- programs -----------------------------------------------------------------------------------


def has(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def need(bench: Bench, library: str) -> None:
    if bench.emulated:
        raise Skipped(f"{library} needs the CUDA runtime, which the emulated driver has not")
    if not has(library):
        raise Skipped(f"{library} is not installed in this Python")


def job_command(kind: str, **options: object) -> list[str]:
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, JOB, kind, *words]


def spawn(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """What it said. Ended by SIGTERM where it takes too long; SIGKILL only after that."""
    try:
        said, _ = process.communicate(timeout=max(1.0, timeout_s))
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        process.kill()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"a job ended with status {process.returncode}")
    answer: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return answer


def alone(bench: Bench, command: list[str]) -> dict[str, Any]:
    return finish(spawn(command, bench.env), bench.left_s)


def together(bench: Bench, programs: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """None outlives this, however it ends."""
    try:
        return [finish(program, bench.left_s) for program in programs]
    finally:
        for program in programs:
            if program.poll() is None:
                program.terminate()
                with suppress(subprocess.TimeoutExpired):
                    program.wait(10)
                program.kill()


def kiwi(*words: str) -> list[str]:
    return [sys.executable, "-m", "kiwi_core.cli", *words]


def in_a_log(command: list[str], log: Path, within_s: float) -> int | None:
    """Its exit status, ``None`` if it was ended. What it says is in ``log`` line by line, so that
    a run that is cut off has it. Ctrl-C first: pytest then tells what it has found."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(max(1.0, within_s))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# --- a daemon -----------------------------------------------------------------------------------


class Daemon:
    """``kiwi daemon`` for the one GPU that is measured, and programs under it."""

    def __init__(self, bench: Bench, directory: Path, tq_s: float) -> None:
        self.bench, self.directory = bench, directory
        self.env = bench.env | {"KIWI_SOCKET_DIR": str(directory)}
        which = (
            ["--emulate", f"1x{bench.total_bytes // MIB}MiB"]
            if bench.emulated
            else ["--gpu", bench.uuid]
        )
        self.log = (directory / "log").open("wb")
        self.process = subprocess.Popen(
            kiwi("daemon", *which, "--tq", str(tq_s), "--socket-dir", str(directory)),
            env=self.env, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_ready(self) -> None:
        ends_s = time.monotonic() + 60
        while time.monotonic() < ends_s and self.process.poll() is None:
            with suppress(Exception):
                self.status()
                return
            time.sleep(0.1)
        raise RuntimeError("no daemon: " + (self.directory / "log").read_text()[-1500:])

    def status(self) -> Any:
        from kiwi_core.client import Client
        from kiwi_core.wire.messages import Role

        path = next(self.directory.glob("GPU-*.sock"))
        with Client(path, role=Role.OBSERVER, reconnect=False) as client:
            client.connect()
            return client.status()

    def run(self, name: str, command: list[str], pager: str) -> subprocess.Popen[str]:
        words = ["run", "--require", "--pager", pager, "--name", name, "--", *command]
        env = self.env if not self.bench.emulated else without_driver(self.env)
        return spawn(kiwi(*words), env)

    def stop(self) -> None:
        """It brings everybody back before it leaves."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def without_driver(env: dict[str, str]) -> dict[str, str]:
    """The daemon gives its own emulated driver to what runs under it."""
    return {k: v for k, v in env.items() if "EMULATOR" not in k and k != "LD_LIBRARY_PATH"}


@contextmanager
def daemon(bench: Bench, tq_s: float) -> Iterator[Daemon]:
    directory = Path(tempfile.mkdtemp(prefix="kw-"))
    one = Daemon(bench, directory, tq_s)
    try:
        one.wait_ready()
        yield one
    finally:
        one.stop()
        shutil.rmtree(directory, ignore_errors=True)
