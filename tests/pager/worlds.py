"""Emulated and real GPUs for the tests of the checkpoint pager.

Each program and each pager runs in its own process, so that a test can kill any of them at any
point.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest
from cuda_processes import Program, Worker, end_on_a_gpu, wait_until
from cuda_program import CudaProgram
from linked_program import GatedProgram, LinkedProgram
from pager_process import PagerProcess

import kiwi_emulator as emulator
from kiwi_core import preload
from kiwi_core.gpu import nvml, processes
from kiwi_core.pager.api import Target
from kiwi_core.units import GIB, MIB, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kiwi_core.gpu.processes import ProcessRef

World = TypeVar("World", bound="EmulatedWorld")

_numbers = itertools.count(1)


class RunningSession(CudaProgram):
    """A CUDA program as a session. ``target`` names its process; the program may have a child."""

    @property
    def target(self) -> Target:
        return Target(SessionId(f"s{self.pid}"), self.root)

    def born(self) -> RunningSession:
        ref = processes.ref_of(self.pid)
        assert ref is not None
        self.root: ProcessRef = ref
        return self


class ProcessWorld:
    """Programs and pagers on one GPU; ``close`` ends them all. ``tidy`` ends what a test has
    started, for the next test."""

    unit_bytes: int
    overhead_bytes: int
    slack_bytes = 0
    sizes_seen = True
    environment: dict[str, str]
    gpu_uuid: str

    def __init__(self) -> None:
        self._closing: list[Callable[[], None]] = []
        self._programs: list[Program] = []
        self._holder: Worker | None = None
        self.pager = self.new_pager()
        self.memory_bytes = self.free_bytes()
        self._first_pager, self._ending, self._closing = self.pager, self._closing, []
        self._altered = False

    def new_pager(self, **config: object) -> PagerProcess:
        """Start another caller, beside the first or after its crash."""
        pager = PagerProcess(self.environment, self.gpu_uuid, **config)
        self._closing.append(pager.close)
        return pager

    def start(
        self, size_bytes: int, *, child_bytes: int = 0, leader: bool = False
    ) -> RunningSession:
        session = RunningSession(
            self.environment,
            size_bytes,
            seed=next(_numbers),
            child_bytes=child_bytes,
            leader=leader,
        )
        self.take(session)
        return session.born()

    def take(self, program: Program) -> None:
        """Let ``close`` end the program, too."""
        self._programs.append(program)
        self._closing.append(program.close)

    def hold_outside(self, free_bytes: int) -> None:
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        if free_bytes >= self.memory_bytes:
            return
        holder = Worker(self.environment)
        self._holder = holder
        self._closing.append(holder.close)
        holder.do("init()")
        holder.do(f"alloc(ck(driver.cuMemGetInfo())[0] - {free_bytes})")

    def free_bytes(self) -> int:
        code = f"__import__('kiwi_core.gpu.nvml').gpu.nvml.memory({self.gpu_uuid!r}).free_bytes"
        return int(self.pager.worker.get(code))

    def state(self, pid: int) -> str:
        """Return the state that the driver reports."""
        code = f"__import__('kiwi_core.gpu.driver').gpu.driver.checkpoint_state({pid}).name"
        return str(self.pager.worker.get(code))

    @property
    def reusable(self) -> bool:
        """Return whether another test would find what it expects once ``tidy`` has been called."""
        pager = self._first_pager
        return pager.worker.usable and not pager.patched and not self._altered

    def tidy(self) -> None:
        """End everything but the first pager, which forgets what it knew."""
        with contextlib.ExitStack() as stack:  # call each, even if one raises
            for close in self._closing:
                stack.callback(close)
        self._closing, self._programs, self._holder = [], [], None
        self.pager = self._first_pager

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for close in self._ending:
                stack.callback(close)
            stack.callback(self.tidy)


class EmulatedWorld(ProcessWorld):
    unit_bytes = MIB
    context_bytes = overhead_bytes = 2 * MIB
    residue_bytes = 0

    def __init__(self, state: Path, gpus: str = "1x64MiB") -> None:
        self.path = state
        libraries = emulator.build()
        emulator.create_state(state, emulator.parse_gpus(gpus))
        emulator.set_context_bytes(state, self.context_bytes)
        self.environment = emulator.environment(state, libraries)
        self.gpu_uuid = emulator.books(state).gpus[0].uuid
        self.faults = emulator.Faults(state)
        super().__init__()

    def refuse_page_out(self, session: RunningSession) -> None:
        self.faults.set("lock_timeout", pid=session.pid)

    def allow_page_out(self, session: RunningSession) -> None:
        """Do nothing: the fault was for one page-out."""

    def break_page_in(self, session: RunningSession) -> None:
        self.faults.set("restore_fail", pid=session.pid)

    def free_bytes(self) -> int:
        gpu = emulator.books(self.path).gpus[0]
        return gpu.total_bytes - gpu.used_bytes

    def used_bytes(self) -> int:
        return sum(gpu.used_bytes for gpu in emulator.books(self.path).gpus)

    def hang(self, operation: str, pid: int) -> None:
        """Make the next such operation on ``pid`` hang until ``let_go``."""
        self.faults.set("hang", pid=pid, operation=operation)  # type: ignore[arg-type]

    def wait_hanging(self) -> None:
        wait_until(lambda: self.faults.hanging() > 0, "the operation hangs")

    def let_go(self) -> None:
        self.faults.clear("hang")

    def set_copy_bandwidth(self, bytes_per_s: int) -> None:
        self._altered = True
        emulator.set_copy_bandwidth(self.path, bytes_per_s)

    def set_driver_version(self, version: int) -> None:
        self._altered = True
        emulator.set_driver_version(self.path, version)

    @property
    def reusable(self) -> bool:
        return super().reusable and not emulator.host_down(self.path)

    def tidy(self) -> None:
        self.faults.clear()
        super().tidy()
        if self.reusable:
            self.pager.forget()
            wait_until(lambda: self.used_bytes() == 0, "all programs off the books")

    def close(self) -> None:
        super().close()
        wait_until(lambda: not emulator.books(self.path).processes, "all processes off the books")
        assert self.used_bytes() == 0


class LinkedWorld(EmulatedWorld):
    """Programs with the scripted library, and the in-process pager."""

    unit_bytes = 2 * MIB
    residue_bytes = 2 * MIB

    def __init__(self, state: Path, gpus: str = "1x64MiB") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kw-"))
        super().__init__(state, gpus)
        self._ending.insert(0, lambda: shutil.rmtree(self.directory))

    @property
    def socket(self) -> Path:
        return self.directory / f"{self.gpu_uuid}.sock"

    def new_pager(self, **config: object) -> PagerProcess:
        """One more caller. Libraries connect to the newest one."""
        self._altered = True  # no library finds the first one
        pager = super().new_pager(**config)
        pager.link(str(self.socket), 64 * MIB, **config)
        return pager

    def start(self, size_bytes: int, **more: Any) -> LinkedProgram:  # type: ignore[override]
        if not size_bytes:
            return super().start(0)  # type: ignore[return-value]  # no context, no library
        program = LinkedProgram(
            self.environment, self.socket, size_bytes, seed=next(_numbers), **more
        )
        self._closing.append(program.close)
        return program

    def refuse_page_out(self, session: LinkedProgram) -> None:  # type: ignore[override]
        session.script("hold", "refuse lock-timeout")

    def break_page_in(self, session: LinkedProgram) -> None:  # type: ignore[override]
        session.script("page-in", "lose", "lose")


class GatedWorld(LinkedWorld):
    """Programs whose library is only a gate, and the driver that moves their memory."""

    residue_bytes = 0

    def start(self, size_bytes: int, **more: Any) -> LinkedProgram:  # type: ignore[override]
        if not size_bytes:
            return super().start(0)
        program = GatedProgram(self.environment, self.socket, size_bytes, seed=next(_numbers))
        self._closing.append(program.close)
        return program

    def break_page_in(self, session: LinkedProgram) -> None:  # type: ignore[override]
        self.faults.set("restore_fail", pid=session.pid)


class PreloadedWorld(LinkedWorld):
    """Programs with the real library, which takes a little memory itself."""

    overhead_bytes = residue_bytes = 16 * MIB

    def start(self, size_bytes: int, **more: Any) -> RunningSession:  # type: ignore[override]
        environment = self.environment | {"KIWI_SOCKET_DIR": str(self.directory)}
        environment |= preload.environment(preload.library(), environment)
        session = RunningSession(environment, size_bytes, seed=next(_numbers), **more)
        self._closing.append(session.close)
        last_bytes = -1
        while last_bytes != (last_bytes := self.free_bytes()):
            time.sleep(0.1)  # the library still works in the background
        return session.born()

    def refuse_page_out(self, session: RunningSession) -> None:  # type: ignore[override]
        session.get("globals().update(stuck=Stuck())")

    def allow_page_out(self, session: RunningSession) -> None:
        session.get("stuck.end()")

    def break_page_in(self, session: RunningSession) -> None:  # type: ignore[override]
        pytest.skip("the library loses nothing")


class RealWorld(ProcessWorld):
    """One real GPU. A ballast leaves only a little of its memory free, so that a test fills it
    within seconds on any model. Tests that need faults run on the emulator only."""

    unit_bytes = 128 * MIB
    overhead_bytes = GIB
    residue_bytes = 0
    slack_bytes = 64 * MIB
    left_bytes = 4 * GIB

    def __init__(self, gpu_uuid: str) -> None:
        self.environment = {}
        self.gpu_uuid = gpu_uuid
        super().__init__()
        ballast = Worker(self.environment)
        self._closing.append(ballast.close)
        ballast.do("init()")
        # In a PID namespace, NVML lists no process with a pid that is known here.
        self.sizes_seen = nvml.processes(gpu_uuid).get(ballast.pid, 0) > 0
        if self.memory_bytes > self.left_bytes:
            ballast.do(f"alloc(ck(driver.cuMemGetInfo())[0] - {self.left_bytes})")
        self.memory_bytes = self.free_bytes()

    def free_bytes(self) -> int:
        """Wait until the figure is stable: the driver scrubs freed memory first."""
        last, now = -1, super().free_bytes()
        while now != last:
            time.sleep(0.2)
            last, now = now, super().free_bytes()
        return now

    def close(self) -> None:
        end_on_a_gpu(reversed(self._programs), self.environment)
        super().close()


class SharedWorlds:
    """Worlds that tests use one after another: most of what a world takes is the start of its
    pager, which must serve many sessions one after another anyway."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count(1)
        self._idle: dict[type[EmulatedWorld], EmulatedWorld] = {}

    @contextlib.contextmanager
    def lend(self, kind: type[World]) -> Iterator[World]:
        world = self._idle.pop(kind, None)
        if world is None:
            world = kind(self._directory / f"gpus-{next(self._numbers)}")
        try:
            yield cast("World", world)
            world.tidy()
        except BaseException:
            world.close()
            raise
        if world.reusable:
            self._idle[kind] = world
        else:
            world.close()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for world in self._idle.values():
                stack.callback(world.close)
