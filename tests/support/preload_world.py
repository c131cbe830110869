"""Programs under the preloaded library, on the emulated driver or on one with unusual behaviour."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cuda_processes import Worker, wait_until

import kiwi_emulator as emulator
from kiwi_core import compiled, preload

MIB = 1 << 20
PROGRAMS = Path(__file__).parents[2] / "native/tests/interposer/programs"
PATIENCE_S = 100.0


class World:
    """An emulated machine with one GPU, no daemon, and a library to preload."""

    def __init__(self, directory: Path, library: Path, gpus: str = "1x256MiB") -> None:
        self.directory = directory
        self.library = library
        self.state = directory / "gpus"
        self.libraries = emulator.build()
        emulator.create_state(self.state, emulator.parse_gpus(gpus))
        emulator.set_context_bytes(self.state, 2 * MIB)
        self._workers: list[Worker] = []

    @property
    def plain(self) -> dict[str, str]:
        """Return a program's environment without the library."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KIWI_")}
        environment |= emulator.environment(self.state, self.libraries)
        return environment | {"KIWI_SOCKET_DIR": str(self.directory / "no-daemon")}

    @property
    def environment(self) -> dict[str, str]:
        return self.plain | preload.environment(self.library, before=self.plain)

    def worker(self, setup: str = "init()", **more: str) -> Worker:
        worker = Worker(self.environment | more)
        self._workers.append(worker)
        if setup:
            worker.do(setup)
        return worker

    def run(self, *command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        return run(*command, environment=self.environment | more)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        wait_until(lambda: not emulator.books(self.state).processes, "all processes off the books")


class Odd:
    """A driver that does what a real one may do and the emulated one does not, and programs that
    test it: ``programs/odd_driver.c``."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        before = {"LD_LIBRARY_PATH": str(directory), "KIWI_SOCKET_DIR": str(directory / "none")}
        self.environment = before | preload.environment(library, before)
        shared = ("-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1")
        compile_c("odd_driver.c", directory / "libcuda.so.1", *shared)
        for name in ("odd", "gate", "race"):
            compile_c(f"{name}.c", directory / name)


def run(*command: str | Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def compile_c(source: str, output: Path, *flags: str | Path) -> Path:
    """Compile one of ``programs/``."""
    command = [
        *compiled.find_compiler(),
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-pthread",
        "-o",
        str(output),
    ]
    command += [str(PROGRAMS / source), *map(str, flags), "-ldl"]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return output
