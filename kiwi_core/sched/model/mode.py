"""The mode of the scheduler: whether sessions may run side by side, or run one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kiwi_core.states import AntiThrash

ON: Final = AntiThrash.ON
"""Under its own name: see ``memory``."""


@dataclass(eq=False, kw_only=True)
class Mode:
    """The part of ``State`` about the mode. Only this module writes its fields."""

    __slots__ = tuple[str, ...]()  # ``State`` has the slots

    anti_thrash: AntiThrash
    protects: bool = True
    """Whether the expected need of runners is reserved for them."""
    outgrown: bool = False
    """Whether the parallel runners outgrew the GPU: serialise until they fit again."""
    serialised: bool = False

    def set_anti_thrash(self, anti_thrash: AntiThrash) -> None:
        """Take over the setting. ``choose_mode`` follows it in the settle pass."""
        self.anti_thrash = anti_thrash
        self.protects = anti_thrash is not AntiThrash.OFF
        self.outgrown = self.outgrown and anti_thrash is AntiThrash.ON

    def runners_outgrow(self, outgrow: bool) -> None:
        """Record whether the sessions that run side by side need more than the GPU has. Only the
        automatic mode counts it."""
        self.outgrown = outgrow and self.anti_thrash is AntiThrash.ON

    def choose_mode(self, several: bool, fit: bool) -> bool:
        """Serialise or not; return whether this begins to. ``several`` sessions wait or run, and
        all of them ``fit`` the GPU."""
        was = self.serialised
        if self.anti_thrash is ON:
            self.serialised = several and (self.outgrown or not fit)
        else:
            self.serialised = self.anti_thrash is AntiThrash.ALWAYS
        return self.serialised and not was
