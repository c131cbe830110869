"""A GPU on which two programs do not fit, and a program that is moved out and in as it computes.

A process outside Kiwi holds all of the GPU but ``room_bytes``, so that moving is also quick on a
large GPU. A *rival* under Kiwi holds most of that room and always has work; the program under test
holds as much, under ``kiwi run --pager inprocess``. So at the end of each of its quanta, the
library's own thread moves all of its memory out, whatever the program is doing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuda_processes import Worker
from daemon import Daemon, die_with_the_test

from kiwi_core.sched.events import PagedOut
from kiwi_core.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SHARE = 0.55
"""Share of the room for the rival and for the ballast of the program: together they do not fit."""

PACE_S = 0.02
TIMES = 3
"""Smallest number of times that the program must have been moved out."""

LIMIT_S = 240.0
ENDS_WITHIN_S = 60.0
"""Time limit for the end of the daemon, which waits for operations under way."""

PROGRAM = """
import json, os, sys, time
BALLAST_BYTES = int(os.environ["TEST_BALLAST_BYTES"])
def pace():
    '''Called in each step: the program under test lasts for several quanta.'''
    time.sleep(float(os.environ["TEST_PACE_S"]))
def say(**facts):
    print(json.dumps(facts), flush=True)
"""

RIVAL = """
import os, sys, time
from cuda.bindings import driver as cuda
def check(result):
    if result[0]:
        raise RuntimeError(result[0].name)
    return result[1] if len(result) > 1 else None
check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
size = int(sys.argv[1])
memory = int(check(cuda.cuMemAlloc(size)))
value = 0
while not os.path.exists(sys.argv[2]):
    value = (value + 1) % 256
    check(cuda.cuMemsetD8(memory, value, size))
    back = bytearray(4096)
    check(cuda.cuMemcpyDtoH(back, memory + size - 4096, 4096))
    assert back.count(value) == 4096
    time.sleep(0.02)
print("the rival's bytes are right", flush=True)
"""


class GpuDaemon(Daemon):
    """``kiwi daemon --gpu UUID``; ``sizes`` is the UUID."""

    def which(self) -> list[str]:
        return ["--gpu", self.sizes]

    def gpus(self) -> int:
        return 1

    def stop(self) -> None:
        """Stop first as systemd does, so that the daemon brings back what it has moved out."""
        with suppress(subprocess.TimeoutExpired):
            self.terminate(ENDS_WITHIN_S)
        super().stop()


@dataclass
class CrowdedGpu:
    """A crowded GPU; ``env`` is the environment of programs without Kiwi."""

    daemon: Daemon
    room_bytes: int
    env: Mapping[str, str]

    @property
    def ballast_bytes(self) -> int:
        return int(self.room_bytes * SHARE) // (2 * MIB) * (2 * MIB)

    def alone(self, source: str, **env: str) -> Any:
        """Run the program without Kiwi and without pauses, and return what it prints at its end."""
        return self._finish(
            self._start([], source, "alone", {**os.environ, **self.env, **env}, pace_s=0.0)
        )

    def crowded(self, source: str, times: int = TIMES, **env: str) -> Any:
        """Run the program under Kiwi, moved out at least ``times`` times; return the same."""
        before = self._page_outs()
        with self._rival():
            kiwi = [sys.executable, "-m", "kiwi_core.cli", "run", "--pager", "inprocess",
                    "--require", "--name", "tested", "--"]  # fmt: skip
            process = self._start(kiwi, source, "crowded", {**self._kiwi_env(), **env}, PACE_S)
            said = self._finish(process)
        moved = self._page_outs() - before
        assert moved >= 2 * times, f"{moved} page-outs of both together\n{self.daemon.log()}"
        return said

    def _page_outs(self) -> int:
        return sum(isinstance(entry.event, PagedOut) for entry in self.daemon.journal())

    def _kiwi_env(self) -> dict[str, str]:
        return {**os.environ, **self.daemon.env}

    def _start(
        self, before: list[str], source: str, name: str, env: Mapping[str, str], pace_s: float
    ) -> subprocess.Popen[str]:
        file = self.daemon.directory / f"{name}.py"
        file.write_text(PROGRAM + source)
        return subprocess.Popen(
            [*before, sys.executable, str(file)],
            env={**env, "TEST_BALLAST_BYTES": str(self.ballast_bytes), "TEST_PACE_S": str(pace_s)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            preexec_fn=die_with_the_test,
        )  # fmt: skip

    def _finish(self, process: subprocess.Popen[str]) -> Any:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # first of all the daemon is asked: it says what it waits for
            raise AssertionError(f"no end: {self.daemon.status()}\n{self.daemon.log()}") from None
        assert process.returncode == 0, f"{out}\n{err}\n{self.daemon.log()}"
        return json.loads(out.strip().splitlines()[-1])

    @contextmanager
    def _rival(self) -> Iterator[None]:
        enough = self.daemon.directory / "enough"
        enough.unlink(missing_ok=True)
        kiwi = [sys.executable, "-m", "kiwi_core.cli", "run", "--pager", "inprocess", "--require",
                "--name", "rival", "--", sys.executable, "-c", RIVAL]  # fmt: skip
        process = subprocess.Popen(
            [*kiwi, str(self.ballast_bytes), str(enough)], env=self._kiwi_env(),
            stdout=subprocess.PIPE, text=True, preexec_fn=die_with_the_test,
        )  # fmt: skip
        try:
            self.daemon.wait_for(
                lambda s: [x for x in s.sessions if x.resident_bytes >= self.ballast_bytes],
                "the rival has its memory", 60.0,
            )  # fmt: skip
            yield
        finally:
            enough.touch()
            out, _ = process.communicate(timeout=LIMIT_S)
        assert out == "the rival's bytes are right\n"


class Outsider:
    """A process outside Kiwi that holds all of the GPU but ``room_bytes``."""

    def __init__(self, env: Mapping[str, str], room_bytes: int) -> None:
        self._worker = Worker(dict(env))
        self._worker.do("init()")
        free_bytes = int(self._worker.get("ck(driver.cuMemGetInfo())[0]"))
        hold_bytes = (free_bytes - room_bytes) // (2 * MIB) * (2 * MIB)
        assert hold_bytes > 0, f"only {free_bytes >> 20} MiB of the GPU are free"
        self._worker.do(f"held = alloc({hold_bytes})")

    def close(self) -> None:
        self._worker.close()
