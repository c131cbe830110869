"""A stage for the parts of ``benchmarks/gpu`` by themselves: the interface that they are given, on
an emulated GPU of 256 MiB."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
GPU_SCRIPTS = ROOT / "benchmarks" / "gpu"


class Ended(RuntimeError):  # noqa: N818 - the interface's name
    """The program has ended, and said no more."""


class Program:
    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def line(self, within_s: float) -> dict[str, Any]:
        try:
            text = self._lines.get(timeout=max(0.001, within_s))
        except queue.Empty:
            raise TimeoutError(f"nothing said in {within_s:.1f} s") from None
        if not text:
            self._lines.put("")
            raise Ended("it has ended")
        try:
            found = json.loads(text)
        except ValueError:
            return self.line(within_s)
        return found if isinstance(found, dict) else self.line(within_s)

    def say(self, text: str = "\n") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def finish(self, within_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        last: dict[str, Any] = {}
        ends_s = time.monotonic() + within_s
        with suppress(Ended):
            while True:
                last = self.line(ends_s - time.monotonic())
        return last

    def end(self) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
                break
        self._reader.join(5)
        self._process.stdout.close()
        return self._process.returncode


class SmallStage:
    def __init__(self, folder: Path, *, seconds: float = 100.0) -> None:
        from kiwi_core import emulator

        self.folder = folder / "results"
        self.work = folder / "work"
        self.folder.mkdir()
        self.work.mkdir()
        self.state = self.work / "gpus"
        emulator.create_state(self.state, emulator.parse_gpus("1x256MiB"))
        self.env = os.environ | emulator.environment(self.state, emulator.build())
        self.env["PYTHONPATH"] = str(ROOT)
        self.emulated, self.total_bytes, self.ram_bytes = True, 256 << 20, 4 << 30
        self.uuid = emulator.books(self.state).gpus[0].uuid
        self.rows: dict[str, dict[str, Any]] = {}
        self.programs: list[Program] = []
        self.ends_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def row(self, name: str, value: object, **more: Any) -> None:
        self.rows[name] = json.loads(json.dumps({"value": value, **more}))
        if os.environ.get("SHOW_ROWS"):
            print(f"{time.monotonic() % 1000:8.2f} {name}: {self.rows[name]}", file=sys.stderr)

    def spawn(self, command: list[str], env: dict[str, str] | None = None) -> Program:
        self.programs.append(Program(command, self.env if env is None else env))
        return self.programs[-1]
