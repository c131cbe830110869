"""Fixtures: an emulated GPU, a scripted daemon at its socket, and preloaded programs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kiwi_emulator as emulator
from kiwi_core import preload

sys.path.insert(0, str(Path(__file__).parent))

from cuda_processes import Worker, wait_until
from pager_daemon import PagerDaemon
from tested_library import tested_library

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
GPU_MIB = 256


class Stage:
    """A GPU, a daemon and programs; ``program`` starts one, and ``log`` has the library's
    messages."""

    def __init__(self, directory: Path, gpu_mib: int = GPU_MIB) -> None:
        self.state = directory / "gpus"
        self.sockets = directory / "s"
        self.sockets.mkdir(mode=0o700)
        self.log_path = directory / "log"
        self._libraries = emulator.build()
        emulator.create_state(self.state, emulator.parse_gpus(f"1x{gpu_mib}MiB"))
        emulator.set_context_bytes(self.state, 2 * MIB)
        self.uuid = emulator.books(self.state).gpus[0].uuid
        self.daemon = PagerDaemon(self.sockets / f"{self.uuid}.sock")
        self._programs: list[Worker] = []

    def program(
        self, setup: str = "init()", *, before: str = "", by_name: bool = False, **more: str
    ) -> Worker:
        """Start a preloaded program. ``before`` is preloaded beside the library. With ``by_name``,
        the gate is not preloaded, but loaded under the driver's name."""
        if before:
            more["LD_PRELOAD"] = before
        library = tested_library()
        program = Worker(self._base(**more) if by_name else self.environment(**more))
        self._programs.append(program)
        if by_name:
            gate = library.with_name("libkiwi_gate.so")
            program.do(
                "from kiwi_core import preload; from pathlib import Path\n"
                f"gate = preload.load_gate({str(self._libraries.libcuda)!r}, Path({str(gate)!r}))"
            )
            assert program.get("gate.state.value") == "loaded"
        if setup:
            program.do(setup)
        return program

    def _base(self, **more: str) -> dict[str, str]:
        # Tests here have daemons that say nothing at first.
        more = {"KIWI_PRELOAD_FIRST_MS": "250"} | more
        base = emulator.environment(self.state, self._libraries) | more
        return base | {"KIWI_SOCKET_DIR": str(self.sockets), "KIWI_PRELOAD_LOG": str(self.log_path)}

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a preloaded program."""
        base = self._base(**more)
        return base | preload.environment(tested_library(), base)

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def used_bytes(self) -> int:
        return emulator.books(self.state).gpus[0].used_bytes

    def close(self) -> None:
        emulator.set_copy_bandwidth(self.state, 0)
        for program in self._programs:
            program.close()
        self.daemon.stop()
        assert self.daemon.faults == [], "the library broke the protocol"
        wait_until(lambda: self.used_bytes == 0, "the GPU's memory is free again")


@pytest.fixture
def stage() -> Iterator[Stage]:
    directory = Path(tempfile.mkdtemp(prefix="kiwi-link-"))  # short: a socket's name has 107 bytes
    stage = Stage(directory)
    try:
        stage.daemon.start()
        yield stage
        stage.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Controller:
    """A process without the library that locks and checkpoints others, as the daemon does."""

    def __init__(self, stage: Stage) -> None:
        self._worker = stage.program(KIWI_DISABLE="1")

    def take(self, pid: int) -> None:
        self._worker.do(f"it = checkpoint_of({pid}); it.lock(timeout_ms=30000); it.checkpoint()")

    def give_back(self, pid: int) -> None:
        self._worker.do(f"it = checkpoint_of({pid}); it.restore(); it.unlock()")


@pytest.fixture
def controller(stage: Stage) -> Controller:
    return Controller(stage)
