"""The self-test: the same parts on the emulated driver, with an injected fault. Figures do not
count."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from stage import Stage

CHECKPOINT_CALLS = ("lock", "checkpoint", "restore", "unlock", "get_state")
JOB_S = 2.0
ENV_HANG = "KIWI_EMULATOR_HANG"


def prepare(work: Path, fault: str) -> None:
    """Build the emulated driver, and make a GPU whose calls meet ``fault``."""
    import kiwi_emulator as emulator

    emulator.build()
    state = work / "gpus"
    emulator.create_state(state, emulator.parse_gpus("1x256MiB"))
    call = _hanging(fault)
    if call in CHECKPOINT_CALLS:
        emulator.Faults(state).set("hang", operation=call)
    elif call:
        os.environ[ENV_HANG] = call


def enter(work: Path, stage: Stage) -> None:
    """Let this part, and the programs that it starts, use the emulated driver."""
    import kiwi_emulator as emulator

    stage.job_s = JOB_S
    libs = emulator.build()
    extra = emulator.environment(work / "gpus", libs)
    os.environ.update(extra)
    stage.env |= extra
    with suppress(RuntimeError):
        emulator.load(str(libs.libcuda), str(libs.libnvml))


def _hanging(fault: str) -> str:
    kind, _, call = fault.partition(":")
    return call if kind == "hang" else ""
