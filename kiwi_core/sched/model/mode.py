"""The mode of the scheduler: whether sessions may run side by side, or run one at a time."""

from __future__ import annotations

from dataclasses import dataclass

from kiwi_core.states import AntiThrash


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
        """Take over the setting. The settle pass chooses the mode that follows from it."""
        self.anti_thrash = anti_thrash
        self.protects = anti_thrash is not AntiThrash.OFF
        self.outgrown = self.outgrown and anti_thrash is AntiThrash.ON

    def runners_outgrow(self, outgrow: bool) -> None:
        """Record whether the sessions that run side by side need more than the GPU has. Only the
        automatic mode counts it."""
        self.outgrown = outgrow and self.anti_thrash is AntiThrash.ON

    def serialise(self, serialise: bool) -> None:
        """Let sessions run one at a time from now on, or side by side."""
        self.serialised = serialise
