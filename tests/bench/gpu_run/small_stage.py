"""A stage for one part of ``tools/gpu`` alone, on an emulated GPU of 256 MiB."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import kiwi_emulator as emulator

ROOT = Path(__file__).resolve().parents[3]
GPU_SCRIPTS = ROOT / "tools/gpu"
GPU_BYTES = 256 << 20


def end_all(stage: Any) -> list[int]:
    """End its programs and close their pipes; return those that cannot be ended."""
    left = [program.pid for program in stage.programs if program.end() is None]
    for program in stage.programs:
        program._process.stdout.close()
    return left


def small_stage(folder: Path, name: str = "part", *, seconds: float = 240.0) -> Any:
    """Return the script's own stage, which also records what it is told: ``rows`` by name,
    ``programs``, and ``state``, the emulated GPU's file."""
    from stage import Stage

    class Kept(Stage):
        def row(self, name: str, value: object, **more: Any) -> None:
            super().row(name, value, **more)
            self.rows[name] = json.loads(json.dumps({"value": value, **more}))
            if os.environ.get("SHOW_ROWS"):
                print(f"{time.monotonic() % 1000:8.2f} {name}: {self.rows[name]}", file=sys.stderr)

        def spawn(self, command: list[str], env: dict[str, str] | None = None) -> Any:
            self.programs.append(super().spawn(command, env))
            return self.programs[-1]

    results, work = folder / "results", folder / "work"
    results.mkdir()
    work.mkdir()
    state = work / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x256MiB"))
    env = os.environ | emulator.environment(state, emulator.build()) | {"PYTHONPATH": str(ROOT)}
    uuid = emulator.books(state).gpus[0].uuid
    ends_s = time.monotonic() + seconds
    stage = Kept(
        name, results, work, True, ends_s, env=env, uuid=uuid, total_bytes=GPU_BYTES,
        ram_bytes=4 << 30,
    )  # fmt: skip
    stage.rows, stage.programs, stage.state = {}, [], state
    return stage
