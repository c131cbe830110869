"""One session's page-out with another's page-in beside it, as the daemon orders them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core.pager.api import Moved
from kiwi_core.pager.way_out import WayOut

if TYPE_CHECKING:
    from kiwi_core.pager.api import Outcome, PartialPager, Target


def swap(
    pager: PartialPager,
    out: Target,
    into: Target,
    deadline_ns: int,
    part_bytes: int = 0,
    mark: str = "",
) -> tuple[Outcome, Outcome]:
    """``mark`` is made when the page-out has ended."""
    way, outcomes = WayOut(), []

    def leave() -> None:
        outcomes.append(pager.page_out(out, deadline_ns, part_bytes, way))
        if mark:
            Path(mark).touch()
        way.end(made_room=isinstance(outcomes[0], Moved))

    leaving = threading.Thread(target=leave)
    leaving.start()
    came = pager.page_in(into, deadline_ns, [way])
    leaving.join()
    return outcomes[0], came
