"""Translate the messages of the preloaded library to and from the words of the daemon.

The library's words are on the wire (``kiwi_core/wire/pager.py``) and in its C sources. Only this
module translates them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.states import Residency
from kiwi_core.wire.pager import PagerAction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kiwi_core.pager.linked import LibraryStep
    from kiwi_core.wire.pager import LibraryState

RESIDENCY: Final[Mapping[LibraryState, Residency]] = {
    "resident": Residency.RESIDENT,
    "held": Residency.SUSPENDED,
    "out": Residency.PAGED_OUT,
}
"""Where the memory is that a library owns, by the library's word for it."""

ACTION: Final[Mapping[LibraryStep, PagerAction]] = {
    "shut": PagerAction.HOLD,
    "open": PagerAction.FREE,
    "page-out": PagerAction.PAGE_OUT,
    "page-in": PagerAction.PAGE_IN,
    "yield": PagerAction.YIELD,
}
"""The library's word for each order."""

AFTER: Final[Mapping[PagerAction, Residency]] = {
    PagerAction.HOLD: Residency.SUSPENDED,
    PagerAction.FREE: Residency.RESIDENT,
    PagerAction.PAGE_OUT: Residency.PAGED_OUT,
    PagerAction.PAGE_IN: Residency.RESIDENT,
}
"""Where the memory is after a library has carried out an order. It stays where it is after
``yield``.
"""
