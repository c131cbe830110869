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


def _always() -> str:
    return ""


def _nothing(_env: Mapping[str, str]) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Backend:
    """One way of moving memory. ``why_not`` says why this installation lacks it, or returns "".

    ``pager`` (``module:class``, made with the GPU's UUID) moves a program's memory directly; empty:
    only a daemon can. ``program_env`` returns what to add to a program's environment (its
    argument), and ``daemon_args`` are a daemon's arguments, so that this backend is used.
    ``moved_by``: what a daemon must report for such a program if it uses this backend.
    ``from_driver``: it uses the driver's checkpoint calls, which not every driver has.
    ``usual_share``: the expected share of the pinned copy's speed; less than half gets a remedy.
    """

    name: str
    why_not: Callable[[], str] = _always
    pager: str = ""
    program_env: Callable[[Mapping[str, str]], dict[str, str]] = _nothing
    daemon_args: tuple[str, ...] = ()
    moved_by: MovedBy | None = None
    from_driver: bool = False
    usual_share: float = 0.9


CHECKPOINT: Final = Backend(
    "checkpoint",
    pager="kiwi_core.bench.blocking:BlockingPager",
    from_driver=True,
    usual_share=0.05,  # drivers 580 to 610 reach 3-10 GB/s of 26-55
)
INPROCESS: Final = Backend(
    "inprocess",
    why_not=_no_library,
    program_env=_with_library,
    moved_by=MovedBy.INPROCESS,
)
BACKENDS: Final = (CHECKPOINT, INPROCESS)
