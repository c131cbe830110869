"""The ways of moving memory that the bench measures, as data: a new one is one entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core import preload
from kiwi_core.states import MovedBy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _no_library() -> str:
    """Compiles it, where that was not done before."""
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
    """``why_not`` says why this installation does not have it; empty where it has.

    ``pager`` (``module:class``, made with the GPU's UUID) moves a program's memory directly;
    empty: only a daemon can, and is asked to. ``program_env`` says what a program's environment
    (given) needs on top, ``daemon_args`` what a daemon is started with, so that this backend is the
    one used.
    ``moved_by``: what a daemon must say of such a program, or it moves its memory in another way.
    ``from_driver``: works by the driver's checkpoint calls, which not every driver has.
    ``usual_share``: of the pinned copy, what is to be expected; less than half gets a remedy.
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
