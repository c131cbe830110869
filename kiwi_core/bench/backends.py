"""The ways of moving memory that the bench measures, as data: a new one is one entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final


@dataclass(frozen=True)
class Backend:
    """``pager`` (``module:class``, made with the GPU's UUID) moves the memory of programs that
    were started with ``program_env``; ``daemon_args`` make a daemon use it. ``from_driver``: works
    by the driver's checkpoint calls, which not every driver has. ``usual_share``: of the pinned
    copy, what is to be expected of it; less than half of that gets a remedy."""

    name: str
    pager: str
    program_env: dict[str, str] = field(default_factory=dict)
    daemon_args: tuple[str, ...] = ()
    from_driver: bool = False
    usual_share: float = 0.9

    def why_not(self) -> str:
        """Empty where this version of Kiwi has it."""
        module = self.pager.partition(":")[0]
        return "" if find_spec(module) else "this version of Kiwi does not have it yet"


BACKENDS: Final = (
    Backend(
        "checkpoint",
        "kiwi_core.pager.checkpoint:CheckpointPager",
        from_driver=True,
        usual_share=0.05,  # drivers 580 to 610 reach 3-10 GB/s of 26-55
    ),
    Backend("inprocess", "kiwi_core.pager.inprocess:InprocessPager"),
)
