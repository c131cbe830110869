"""Run the parts one after the other, each in processes of its own that end at a limit.

This process makes no driver call and imports nothing that could: only a part can hang.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import summary

MARK = "KIWI_GPU_RUN"
"""Variable that every process of a part inherits, including daemons and their programs."""
GRACE_S = 8.0
"""Time for a part that is over its limit to end its programs; part of the limit."""
SCRIPT = Path(__file__).with_name("run_all.py")
LOG_BYTES = 8 << 20
"""Size to which a log is cut, keeping its end: results come back in files of at most 16 MiB."""


@dataclass(frozen=True)
class Part:
    """One part of the run."""

    name: str
    function: str
    """``module:function`` in this folder; it is called with a Stage."""
    answers: str
    """The question that the part answers, for the summary."""
    least_s: float
    """Least time that must be left to run the part."""
    limit_s: float
    """Time limit at which the part is ended."""
    libraries: tuple[str, ...] = ()
    """Packages that must be importable, beside those that every part needs."""


@dataclass
class Run:
    """The whole run, as the parent sees it."""

    folder: Path
    work: Path
    ends_s: float
    limit_s: float | None = None
    """A shorter limit for each part (the self-test's)."""
    results: dict[str, Any] = field(default_factory=dict)
    script: Path = SCRIPT
    """Script that runs one part, given ``--part NAME``."""

    def part(self, part: Part) -> None:
        """Run one part. This returns at the part's limit at the latest, whatever the part does."""
        left_s = self.ends_s - time.monotonic()
        limit_s = min(part.limit_s, left_s, self.limit_s or part.limit_s)
        print(f"--- {part.name}: at most {limit_s:.0f} s ({left_s:.0f} s are left)", flush=True)
        entry = {"answers": part.answers, "limit_s": round(limit_s, 1), "rows": []}
        self.results["parts"][part.name] = entry
        if left_s < part.least_s:
            words = f"left out: {left_s:.0f} s were left, it takes {part.least_s:.0f} s"
            entry["status"] = words
            entry["rows"].append(_row(words, None))
        else:
            began_s = time.monotonic()
            entry["status"] = self._run(part, began_s + limit_s, entry)
            if entry["status"] != "done":
                _fail(entry)
            entry["took_s"] = round(time.monotonic() - began_s, 1)
        self.save()
        print(f"--- {part.name}: {entry['status']}", flush=True)

    def _run(self, part: Part, ends_s: float, entry: dict[str, Any]) -> str:
        mark = f"{os.getpid()}-{part.name}"
        command = [sys.executable, str(self.script), str(self.folder)]
        command += ["--part", part.name, "--work", str(self.work), "--ends", str(ends_s)]
        with (self.folder / "parts.log").open("ab") as log:
            log.write(f"\n=== {part.name}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command, env=os.environ | {MARK: mark}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            return self._watch(process, part, ends_s, entry)
        finally:
            sweep(mark)
            with suppress(subprocess.TimeoutExpired):  # no signal may end a hanging call
                process.wait(0.5)
            self._collect(part, entry)
            _shorten(self.folder)

    def _watch(
        self, process: subprocess.Popen[bytes], part: Part, ends_s: float, entry: dict[str, Any]
    ) -> str:
        seen = 0
        while process.poll() is None and time.monotonic() < ends_s - GRACE_S:
            time.sleep(0.2)
            now = self._collect(part, entry)
            if now != seen:
                seen = now
                self.save()
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S / 2)
            return "ended at its limit"
        return "done" if process.returncode == 0 else f"failed: status {process.returncode}"

    def _collect(self, part: Part, entry: dict[str, Any]) -> int:
        """Read the rows on disk; return the size of their file."""
        file = self.work / f"{part.name}.rows"
        if not file.exists():
            return 0
        text = file.read_text()
        rows: dict[str, Any] = {}
        for line in text.splitlines():
            with suppress(ValueError):  # the last line may be half written
                row = json.loads(line)
                rows[row["name"]] = row
        entry["rows"] = list(rows.values())
        return len(text)

    def save(self) -> None:
        """Write results.json and summary.md anew, each in one step."""
        for name, text in (
            ("results.json", json.dumps(self.results, indent=1) + "\n"),
            ("summary.md", summary.text(self.results)),
        ):
            new = self.folder / f"{name}.new"
            new.write_text(text)
            new.replace(self.folder / name)


def _fail(entry: dict[str, Any]) -> None:
    """Add a failed row: a part that was ended, or that crashed, did not pass."""
    if not any(row["name"] == "this part" for row in entry["rows"]):
        entry["rows"].append(_row(entry["status"], False))


def _row(words: str, passed: bool | None) -> dict[str, Any]:
    return {"name": "this part", "value": words, "unit": "", "target": "", "passed": passed}


def sweep(mark: str, within_s: float = GRACE_S / 2) -> None:
    """End every process that carries ``mark``, the gentlest way first; never wait for long.

    The end of a part closes the inputs of its programs, so most of them end by themselves.
    """
    steps = (None, signal.SIGCONT, signal.SIGTERM, signal.SIGKILL)
    for number in steps:
        ends_s = time.monotonic() + within_s / len(steps)
        for pid in marked(mark):
            if number is not None:
                with suppress(OSError):
                    os.kill(pid, number)
        while time.monotonic() < ends_s:
            if not marked(mark):
                return
            time.sleep(0.05)
    for pid in marked(mark):
        print(f"process {pid} does not end, not even by SIGKILL", file=sys.stderr, flush=True)


def marked(mark: str) -> list[int]:
    """Return the processes (without zombies) whose environment carries ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid in processes() if wanted in environment_of(pid)]


def processes() -> list[int]:
    """Return all processes but this one."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid()]


def environment_of(pid: int) -> list[bytes]:
    """Return the environment that a process was started with; an empty list if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _shorten(folder: Path) -> None:
    for log in folder.glob("*.log"):
        if log.stat().st_size > LOG_BYTES:
            with log.open("rb") as file:
                file.seek(-LOG_BYTES // 2, os.SEEK_END)
                kept = file.read()
            log.write_bytes(b"[the beginning was cut off]\n" + kept)
