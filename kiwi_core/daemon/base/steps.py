"""One event and the actions that follow from it, published to the parts of the daemon in order.

``Core.feed`` makes one step of each event and hands it to its subscribers, one after another. The
list in ``assembly`` is their order. A subscriber may feed another event; that step is published
to all before this one goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from kiwi_core.sched.actions import Action
from kiwi_core.sched.events import Event
from kiwi_core.sched.model.happenings import Happening


class Step(Struct, frozen=True):
    event: Event
    actions: Sequence[Action]
    """What the scheduler orders, in order."""
    happenings: Sequence[Happening]
    """What happened in the event, in order."""
    now_ns: int
    """When the scheduler took the event, on ``kiwi_core.clock``'s time."""


class Subscriber(Protocol):
    def after(self, step: Step) -> None:
        """Take ``step``. Called in the loop; must not block."""
