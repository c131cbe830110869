"""The ways of moving memory that the bench measures, as data: a new way is one entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core import preload
from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _no_library() -> str:
    """Return why there is no library; empty if there is one. Compile it if that was not done."""
    try:
        preload.library()
    except preload.Unavailable as error:
        return f"{error.message} {error.remedy}"
    return ""


def _with_library(env: Mapping[str, str]) -> dict[str, str]:
    return preload.environment(preload.library(), env)


@dataclass(frozen=True)
class Backend:
    """One way of moving memory. ``why_not`` says why this installation lacks it, or returns "".

    ``program_env`` returns what to add to a program's environment (its argument), and
    ``daemon_args`` are the daemon's arguments, so that this backend is used.
    ``moved_by``: what the daemon reports for such a program if it uses this backend.
    ``from_driver``: it uses the driver's checkpoint calls, which not every driver has.
    ``usual_share``: the expected share of the pinned copy's speed; less than half gets a remedy.
    """

    name: str
    moved_by: MovedBy
    why_not: Callable[[], str] = str
    program_env: Callable[[Mapping[str, str]], dict[str, str]] = dict
    daemon_args: tuple[str, ...] = ()
    from_driver: bool = False
    usual_share: float = 0.9


CHECKPOINT: Final = Backend(
    "checkpoint",
    MovedBy.CHECKPOINT,
    from_driver=True,
    usual_share=0.05,  # drivers 580 to 610 reach 2-10 GB/s of 26-55
)
INPROCESS: Final = Backend(
    "inprocess", MovedBy.INPROCESS, why_not=_no_library, program_env=_with_library
)
BACKENDS: Final = (CHECKPOINT, INPROCESS)
