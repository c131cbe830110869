"""Fault injection: a small table in the state file, which any process can change at any time."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from kiwi_emulator import _layout
from kiwi_emulator._state import mapped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Kind = Literal[
    "lock_timeout", "checkpoint_fail", "restore_fail", "restore_oom", "hang", "checkpoint_poison",
    "checkpoint_kill", "checkpoint_oom", "checkpoint_unsupported", "restore_invalid", "lock_kill",
]  # fmt: skip
Operation = Literal[
    "any", "lock", "checkpoint", "restore", "unlock", "get_state", "nvml_memory", "nvml_processes"
]

KINDS: dict[str, int] = {kind: number for number, kind in enumerate(get_args(Kind), 1)}
"""The numbers of ``enum ke_fault_kind``."""
OPERATIONS: dict[str, int] = {
    "any": 0,
    "lock": 1,
    "checkpoint": 2,
    "restore": 3,
    "unlock": 4,
    "get_state": 5,
    "nvml_memory": 7,
    "nvml_processes": 8,
}


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    pid: int
    remaining: int
    operation: str
    duration_s: float
    hits: int
    """Number of operations that the fault has hit so far."""
    in_progress: int
    """Number of operations that hang in the fault now."""


class Faults:
    """The faults of one emulated machine.

    - ``lock_timeout``: a lock answers NOT_READY when its time limit is over; the process goes on.
    - ``checkpoint_fail``: a checkpoint answers OPERATING_SYSTEM; the process stays locked, nothing
      is lost.
    - ``restore_fail``: a restore answers OPERATING_SYSTEM and the process is FAILED: every later
      operation answers OPERATING_SYSTEM.
    - ``restore_oom``: a restore answers OUT_OF_MEMORY; the process stays CHECKPOINTED, and every
      later restore answers OPERATING_SYSTEM, as with the real driver (cuda-checkpoint #44).
    - ``checkpoint_poison``: a checkpoint answers NOT_SUPPORTED, but breaks the contexts all the
      same: once the process is unlocked, its calls answer LAUNCH_FAILED.
    - ``checkpoint_kill``: the process is killed in a checkpoint, ``duration_s`` after the start.
    - ``checkpoint_oom``: a checkpoint answers OUT_OF_MEMORY, as with MIG; nothing is lost.
    - ``checkpoint_unsupported``: a checkpoint answers NOT_SUPPORTED, as on arm64; nothing is lost.
    - ``restore_invalid``: a restore answers INVALID_VALUE, and so does every later one.
    - ``lock_kill``: a lock kills the process (SIGSEGV).
    - ``hang``: the operation does not begin for ``duration_s`` (0: until cleared). NVML readings
      hang only if named, and with ``pid`` 0: ``any`` means the operations on a process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(
        self,
        kind: Kind,
        *,
        pid: int = 0,
        count: int = 1,
        operation: Operation = "any",
        duration_s: float = 0.0,
    ) -> None:
        """Set a fault for one process (0: any) and ``count`` operations (-1: until cleared)."""
        with self._locked() as state:
            slot = next((f for f in state.faults if _reusable(f)), None)
            if slot is None:
                raise RuntimeError(f"all {_layout.FAULTS_MAX} fault slots are in use: clear some")
            slot.kind = 0
            slot.pid, slot.count, slot.op = pid, count, OPERATIONS[operation]
            slot.duration_ns = int(duration_s * 1e9)
            slot.hits = slot.in_progress = 0
            slot.kind = KINDS[kind]  # last: from now on the C side sees the fault

    def clear(self, kind: Kind | None = None) -> None:
        """End all faults, or those of one kind; operations that hang go on."""
        with self._locked() as state:
            for slot in state.faults:
                if kind is None or slot.kind == KINDS[kind]:
                    slot.kind = 0

    def list(self) -> tuple[Fault, ...]:
        """Return the faults that are set and not cleared, including used-up ones."""
        kinds = {number: name for name, number in KINDS.items()}
        operations = {number: name for name, number in OPERATIONS.items()}
        with mapped(self._path) as state:
            return tuple(
                Fault(
                    kind=kinds[slot.kind],
                    pid=slot.pid,
                    remaining=slot.count,
                    operation=operations[slot.op],
                    duration_s=slot.duration_ns / 1e9,
                    hits=slot.hits,
                    in_progress=slot.in_progress,
                )
                for slot in state.faults
                if slot.kind
            )

    def hits(self, kind: Kind) -> int:
        return sum(f.hits for f in self.list() if f.kind == kind)

    def hanging(self) -> int:
        """Return the number of operations that hang now."""
        return sum(f.in_progress for f in self.list())

    @contextmanager
    def _locked(self) -> Iterator[_layout.DriverState]:
        """Lock out other Python writers; the C side reads ``kind`` first and writes the counts."""
        with open(self._path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with mapped(self._path) as state:
                yield state


def _reusable(slot: _layout.FaultSlot) -> bool:
    return not slot.kind or (slot.count == 0 and not slot.in_progress)
