"""One look at a session: its processes, what each has, and who can move it now. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kiwi_core.gpu.driver import CheckpointState
from kiwi_core.pager.api import worst
from kiwi_core.states import MovedBy, Residency

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kiwi_core.errors import GpuError
    from kiwi_core.gpu.looks import GpuLook
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.linked import LinkedProcess

FREE: Final = frozenset({CheckpointState.RUNNING, CheckpointState.NOT_A_CUDA_PROCESS})
IN_TRANSIT: Final = frozenset({CheckpointState.CHECKPOINTING, CheckpointState.RESTORING})

_RESIDENCY: Final = {
    CheckpointState.NOT_A_CUDA_PROCESS: Residency.RESIDENT,
    CheckpointState.RUNNING: Residency.RESIDENT,
    CheckpointState.LOCKED: Residency.SUSPENDED,
    CheckpointState.CHECKPOINTING: Residency.SUSPENDED,
    CheckpointState.RESTORING: Residency.PAGED_OUT,
    CheckpointState.CHECKPOINTED: Residency.PAGED_OUT,
    CheckpointState.FAILED: Residency.LOST,
}


@dataclass(frozen=True)
class SessionProcess:
    """A live process that the driver knows, or that has Kiwi's library.

    ``row_bytes`` is what NVML counts (``None``: it shows no row); ``out_bytes`` is what it had when
    the driver took it out (``None``: not known). ``error`` is set if the driver did not report the
    state. ``stopped`` says why the process does not run, or that somebody else has checkpointed it:
    no operation touches it. ``kept_bytes`` is the room that must be kept for it then.
    """

    ref: ProcessRef
    state: CheckpointState
    row_bytes: int | None = None
    out_bytes: int | None = None
    library: LinkedProcess | None = None
    error: GpuError | None = None
    stopped: str = ""
    kept_bytes: int = 0
    empty: bool = False
    """It has never had a context, so there is nothing to move."""

    @property
    def backend(self) -> MovedBy:
        """What can move it now: its library, or the driver. In a process that the driver holds, the
        library would not return from its first driver call."""
        if self.library is None or self.held_by_driver:
            return MovedBy.CHECKPOINT
        return MovedBy.INPROCESS

    @property
    def gate_only(self) -> bool:
        """Whether its library is only a gate: the driver moves the memory while that is shut."""
        return self.library is not None and not self.library.owns

    @property
    def held_by_driver(self) -> bool:
        """Whether the driver has it locked, out or lost. If the driver does not answer, whether it
        was out before."""
        if self.error is not None:
            return self.out_bytes is not None
        return self.state not in FREE

    @property
    def residency(self) -> Residency:
        """Where its memory is by the driver alone. If the driver gives no state, a process that
        used GPU memory and now uses none is out."""
        if self.error is not None:
            unknown_out = not self.resident_bytes and self.out_bytes is not None
            return Residency.PAGED_OUT if unknown_out else Residency.RESIDENT
        return _RESIDENCY[self.state]

    @property
    def reported(self) -> Residency | None:
        """Where its memory is by the library's last report; ``None`` without a library."""
        return None if self.library is None else self.library.report.residency

    @property
    def worst_residency(self) -> Residency:
        """The worse of what the driver and the library say."""
        return worst({self.residency, self.reported or Residency.RESIDENT})

    @property
    def unknown(self) -> bool:
        """Whether the driver does not know it: it has no context."""
        return self.state is CheckpointState.NOT_A_CUDA_PROCESS and self.error is None

    @property
    def resident_bytes(self) -> int:
        return max(self.row_bytes or 0, self.kept_bytes)


@dataclass(frozen=True)
class SessionLook:
    """All processes of a session (``refs``), those that matter (``processes``), and the GPU."""

    gpu: GpuLook
    refs: tuple[ProcessRef, ...] = ()
    processes: tuple[SessionProcess, ...] = field(default=())

    def __iter__(self) -> Iterator[SessionProcess]:
        return iter(self.processes)

    def with_libraries(self, linked: Mapping[ProcessRef, LinkedProcess]) -> SessionLook:
        """Return the same look with what libraries report now: no driver call was made since."""
        now = tuple(replace(one, library=linked.get(one.ref)) for one in self)
        return replace(self, processes=now)

    def freed(self) -> SessionLook:
        """Return the same look after all that the driver held was unlocked."""
        running = CheckpointState.RUNNING
        return replace(
            self,
            processes=tuple(replace(x, state=running) if x.held_by_driver else x for x in self),
        )
