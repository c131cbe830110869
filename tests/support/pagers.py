"""The two ways in which Kiwi moves GPU memory, as tests of the whole path see them: what to put
into a program's environment, and in what they rightly differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core import preload
from kiwi_core.config import CHECKPOINT as BY_DRIVER
from kiwi_core.config import ENV_PAGER, INPROCESS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_core.emulator import ProcessBooks

RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
"""The driver's numbers."""

CONTEXT_BYTES: Final = 8 << 20
"""What the emulated driver takes for a context."""

HIDDEN_BYTES: Final = 5 << 20
"""What NVML leaves out of that: the emulated driver's ``hidden_overhead``."""

HANDLE_MIB: Final = 2
"""What the library owns is a multiple of this."""

LEFT_BYTES: Final = 1 << 20
"""Of a program whose memory is out, besides its context: the library's own code in the GPU."""


def told_of_context(context_bytes: int) -> int:
    """What NVML says of a context: real drivers leave out a part, and so do emulated ones."""
    return context_bytes - HIDDEN_BYTES if context_bytes > HIDDEN_BYTES else context_bytes


@dataclass(frozen=True)
class PagerUnderTest:
    """``driver_moves``: the driver's books tell who is held and who is out, and its faults can make
    a move fail. ``leaves_context``: of who is out, a context stays in the GPU (unless room for
    others has become so short that it goes, too). ``exact_leases``: a call that nobody foresaw asks
    for the GPU itself. ``room_on_demand``: an allocation that finds no room waits for some."""

    name: str
    driver_moves: bool
    leaves_context: bool
    exact_leases: bool
    room_on_demand: bool
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def mib(self, size_mib: int) -> int:
        """What an allocation of so many MiB takes of the GPU."""
        return size_mib if self.driver_moves else -(-size_mib // HANDLE_MIB) * HANDLE_MIB

    def is_out(self, process: ProcessBooks) -> bool:
        """By the driver's own books."""
        if self.driver_moves or process.state != RUNNING:
            return process.state == CHECKPOINTED
        return process.device_bytes.get(0, 0) <= LEFT_BYTES

    def is_held(self, process: ProcessBooks) -> bool:
        """By the driver's own books; a gate that is closed is not in them."""
        return process.state == LOCKED if self.driver_moves else process.state in (RUNNING, LOCKED)


CHECKPOINT: Final = PagerUnderTest(
    BY_DRIVER,
    driver_moves=True,
    leaves_context=False,
    exact_leases=False,
    room_on_demand=False,
)
IN_PROCESS: Final = PagerUnderTest(
    INPROCESS,
    driver_moves=False,
    leaves_context=True,
    exact_leases=True,
    room_on_demand=True,
    env={ENV_PAGER: INPROCESS},
)
BOTH: Final = (CHECKPOINT, IN_PROCESS)


def into(env: dict[str, str]) -> dict[str, str]:
    """A kernel's environment, as the server's provisioner makes it: where ``env`` chooses the
    in-process pager its library comes along, unless Kiwi is off there."""
    if env.get(ENV_PAGER) != INPROCESS or env.get("KIWI_DISABLE"):
        return env
    return env | preload.environment(preload.library(), env)
