"""A scripted driver and GPU for the checkpoint pager. They give answers that neither a real nor an
emulated driver can be made to give, such as doing the work and then reporting a failure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from blocking import Blocking, Loop
from contract import moved, soon_ns

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import GpuError
from kiwi_core.gpu import claims
from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.gpu.looks import GpuLook
from kiwi_core.gpu.nvml import UtilisationSample
from kiwi_core.gpu.processes import ProcessRef
from kiwi_core.gpu.results import cuda_error
from kiwi_core.pager.api import Target
from kiwi_core.pager.session_pager import SessionPager
from kiwi_core.units import MIB, SessionId

RUNNING, LOCKED = CheckpointState.RUNNING, CheckpointState.LOCKED
OUT, FAILED = CheckpointState.CHECKPOINTED, CheckpointState.FAILED
UNDER_WAY, BACK_UNDER_WAY = CheckpointState.CHECKPOINTING, CheckpointState.RESTORING
CONFIG = replace(DEFAULTS, room_wait_ns=50_000_000, checkpoint_room_bytes=0)
"""This driver moves programs out of a full GPU, too; ``test_full_gpu.py`` has the other kind."""

MOVES = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, OUT),
    "restore": (OUT, LOCKED),
    "unlock": (LOCKED, RUNNING),
}


class Machine:
    """A scripted GPU, driver and processes. Process 1 is the session's root; the others in
    ``sizes`` are its children. ``faults[call, pid]`` apply one by one. A fault is a result code, or
    a function that may do the work and then returns a code (0: none)."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = {int(name[1:]): size for name, size in sizes.items()}
        self.total = 100 * MIB
        self.outside = 0
        self.nameless = 0
        """Bytes that are used in the GPU without a process in NVML's list."""
        self.hidden = 0
        """Bytes that each process has in the GPU beyond those that NVML reports for it."""
        self.claims: list[Sequence[int]] = []
        self.names = True
        self.states = dict.fromkeys(self.sizes, RUNNING)
        self.unlisted: set[int] = set()
        self.elsewhere: dict[int, str] = {}
        self.faults: dict[tuple[str, int], list[int | Callable[[], int]]] = defaultdict(list)
        self.calls: list[str] = []
        self.nvml_fails = False
        self.now_samples: tuple[UtilisationSample, ...] | None = ()

    # The driver.

    async def checkpoint_state(self, pid: int) -> CheckpointState:
        self._fault("state", pid)
        return self.states.get(pid, CheckpointState.NOT_A_CUDA_PROCESS)

    async def lock(self, pid: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._move("lock", pid)

    async def measured_checkpoint(self, pid: int, within_s: float) -> tuple[int | None, int | None]:
        assert within_s > 0
        before_bytes = None if self.nvml_fails else await self.free_bytes()
        self._move("checkpoint", pid)
        return before_bytes, None if self.nvml_fails else await self.free_bytes()

    async def restore(self, pid: int, within_s: float) -> None:
        self._move("restore", pid)
        assert self.left_bytes() >= 0, "on a GPU this restore fails, for good"

    async def unlock(self, pid: int) -> None:
        self._move("unlock", pid)

    def _move(self, call: str, pid: int) -> None:
        self.calls.append(f"{call} {pid}")
        self._fault(call, pid)
        before, after = MOVES[call]
        if self.states.get(pid) is not before:
            raise cuda_error(f"{call} of {pid}", 401)
        self.states[pid] = after

    def _fault(self, call: str, pid: int) -> None:
        if not self.faults[call, pid]:
            return
        fault = self.faults[call, pid].pop(0)
        number = fault if isinstance(fault, int) else fault()
        if number:
            raise cuda_error(f"{call} of {pid}", number)

    # The GPU.

    async def free_bytes(self) -> int:
        self._check_nvml()
        return self.left_bytes()

    def left_bytes(self) -> int:
        resident = self._resident()
        sessions = sum(resident.values()) + self.hidden * len(resident)
        return self.total - self.outside - self.nameless - sessions

    def total_bytes(self) -> int:
        return self.total

    def doubt_rows(self, doubted: bool) -> None:
        pass

    async def look(self, pids: Sequence[int] = ()) -> GpuLook:
        states: dict[int, CheckpointState | GpuError] = {}
        seen = GpuLook(await self.free_bytes(), await self.bytes_by_pid(), self.names, states)
        for pid in pids:
            try:
                states[pid] = await self.checkpoint_state(pid)
            except GpuError as error:
                states[pid] = error
        return seen

    async def bytes_by_pid(self) -> dict[int, int]:
        self._check_nvml()
        outside = {99: self.outside} if self.outside else {}
        return outside | {p: s for p, s in self._resident().items() if p not in self.unlisted}

    async def users_elsewhere(self) -> dict[int, str]:
        return self.elsewhere

    async def claimed_restore(self, pid: int, claims_bytes: Sequence[int], within_s: float) -> None:
        self.claims.append(claims_bytes)
        if await self.free_bytes() < min(claims_bytes):
            raise GpuError(claims.NO_ROOM, "no room")
        await self.restore(pid, within_s)

    async def samples(self, since_us: int) -> tuple[UtilisationSample, ...] | None:
        if self.now_samples is None:
            return None
        return tuple(s for s in self.now_samples if s.time_us > since_us)

    def _resident(self) -> dict[int, int]:
        gone = (OUT, BACK_UNDER_WAY, FAILED)
        return {p: s for p, s in self.sizes.items() if self.states.get(p, OUT) not in gone}

    def _check_nvml(self) -> None:
        if self.nvml_fails:
            raise GpuError("nvml-gpu-lost", "The GPU is gone.", driver_code=15)

    def does(self, pid: int, state: CheckpointState, number: int) -> Callable[[], int]:
        """Return a fault that leaves the process in ``state`` and then reports ``number``."""

        def act() -> int:
            self.states[pid] = state
            return number

        return act

    def dies(self, pid: int, number: int) -> Callable[[], int]:
        def act() -> int:
            del self.states[pid]
            return number

        return act


TARGET = Target(SessionId("s"), ProcessRef(1, 0))
LOOP = Loop()


def new_pager(machine: Machine, **more: object) -> SessionPager:
    """Return a pager whose calls block."""
    pager = SessionPager(
        machine,  # type: ignore[arg-type]
        machine,  # type: ignore[arg-type]
        CONFIG,
        **{"host_available_bytes": lambda _pids: 1 << 50, **more},  # type: ignore[arg-type]
    )
    return Blocking(pager, LOOP)  # type: ignore[return-value]


def out(machine: Machine, pager: SessionPager) -> None:
    moved(pager.page_out(TARGET, soon_ns()))
    assert machine.states == {1: OUT, 2: OUT}
    machine.calls.clear()
