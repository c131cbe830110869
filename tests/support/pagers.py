"""The two ways in which Kiwi moves GPU memory, for tests of the whole path: the environment of a
program, and the expected differences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kiwi_core import preload
from kiwi_core.config import CHECKPOINT as BY_DRIVER
from kiwi_core.config import ENV_PAGER, INPROCESS, pager_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_emulator import ProcessBooks

RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
"""Process states, as the driver's numbers."""

CONTEXT_BYTES: Final = 8 << 20
"""Bytes that the emulated driver takes for a context."""

HIDDEN_BYTES: Final = 6 << 20
"""Bytes of a context that NVML leaves out: the emulated driver's ``hidden_overhead``."""

HANDLE_MIB: Final = 2
"""Owned memory of the library is a multiple of this."""

LEFT_BYTES: Final = 1 << 20
"""Most bytes that a paged-out program leaves in the GPU beside its context: the library's code."""


def told_of_context(context_bytes: int) -> int:
    """Return the bytes that NVML shows for a context: real and emulated drivers leave out a
    part."""
    return context_bytes - HIDDEN_BYTES if context_bytes > HIDDEN_BYTES else context_bytes


@dataclass(frozen=True)
class PagerUnderTest:
    """A pager and its properties. ``driver_moves``: the driver's books show which processes are
    held and which are out, and the driver's faults can make a move fail. ``leaves_context``: the
    context of a paged-out process stays in the GPU (unless room has become so short that it goes,
    too). ``exact_leases``: an unforeseen call asks for the GPU itself. ``room_on_demand``: an
    allocation that finds no room waits for some."""

    name: str
    driver_moves: bool
    leaves_context: bool
    exact_leases: bool
    room_on_demand: bool
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def mib(self, size_mib: int) -> int:
        """Return the MiB of the GPU that an allocation of ``size_mib`` takes."""
        return size_mib if self.driver_moves else -(-size_mib // HANDLE_MIB) * HANDLE_MIB

    def is_out(self, process: ProcessBooks) -> bool:
        """Return whether the process is paged out, by the driver's own books."""
        if self.driver_moves or process.state != RUNNING:
            return process.state == CHECKPOINTED
        return process.device_bytes.get(0, 0) <= LEFT_BYTES

    def is_held(self, process: ProcessBooks) -> bool:
        """Return whether the process may be held: the driver's books do not show a closed gate."""
        return process.state == LOCKED if self.driver_moves else process.state in (RUNNING, LOCKED)


CHECKPOINT: Final = PagerUnderTest(
    BY_DRIVER,
    driver_moves=True,
    leaves_context=False,
    exact_leases=False,
    room_on_demand=False,
    env={ENV_PAGER: BY_DRIVER},
)
IN_PROCESS: Final = PagerUnderTest(
    INPROCESS,
    driver_moves=False,
    leaves_context=True,
    exact_leases=True,
    room_on_demand=True,
    env={ENV_PAGER: INPROCESS},
)
DEFAULT: Final = replace(IN_PROCESS, env={})
"""What users have who ask for nothing: the emulated GPU has proven itself."""
BOTH: Final = (CHECKPOINT, DEFAULT)


def into(env: dict[str, str]) -> dict[str, str]:
    """Return a kernel's environment as the server's provisioner makes it: with the library, unless
    Kiwi is disabled there. Where the driver is to move the memory, the kernel is left to find its
    gate by itself, as where no server starts it."""
    pager = pager_of(env)
    if pager == BY_DRIVER or env.get("KIWI_DISABLE"):
        return env
    own = {preload.ENV_OWN: preload.OWN_BY_PAGER[pager]}
    return env | preload.environment(preload.library(), env) | own
