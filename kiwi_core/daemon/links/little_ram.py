"""Tell a session's user early that the RAM of its job or container cannot take its GPU memory.

Such a session cannot be paged out: others wait for it until it frees GPU memory or ends. Its user
gets the notice in the first cell in which this happens, while the job is young, with the amount of
RAM to ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, WeakSet

import structlog

from kiwi_core.daemon import user_texts
from kiwi_core.daemon.links.host_budget import ram_user
from kiwi_core.errors import GpuError
from kiwi_core.gpu import host
from kiwi_core.states import Notice
from kiwi_core.wire.messages import UserNotice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_core.daemon.roster.registry import SessionRecord
    from kiwi_core.pager.api import Observation, Target
    from kiwi_core.pager.linked import LinkedProcess
    from kiwi_core.units import SessionId

log = structlog.get_logger(__name__)

GROWN_SHARE: Final = 8
"""The limits are read again once the memory has grown by this part: a session that allocates in
small steps costs a few reads, not one at each look."""


@dataclass(eq=False, repr=False)
class LittleRam:
    """Takes observations. A session gets one notice; ``root`` is as in ``kiwi_core.gpu.host``."""

    _record: Callable[[SessionId], SessionRecord | None]
    _links: Callable[[SessionId], Iterable[LinkedProcess]]
    _root: Path = Path("/")
    _told: WeakSet[SessionRecord] = field(default_factory=WeakSet)
    _checked_bytes: WeakKeyDictionary[SessionRecord, int] = field(default_factory=WeakKeyDictionary)
    """The most GPU memory of each session for which the limits were read."""

    def seen(self, target: Target, seen: Observation) -> None:
        record = self._record(target.session)
        if record is None or record.connection is None or record in self._told:
            return
        checked_bytes = self._checked_bytes.get(record, 0)
        if seen.resident_bytes <= checked_bytes + checked_bytes // GROWN_SHARE:
            return
        self._checked_bytes[record] = seen.resident_bytes
        # A library's reserve counts in the group already, and takes part of what goes out.
        reserve_bytes = sum(ram_user(link).reclaimable_bytes for link in self._links(record.id))
        pids = [one.ref.pid for one in seen.processes if one.resident_bytes]
        more_bytes = max(0, seen.resident_bytes - reserve_bytes)
        try:
            lacking = host.shortage(pids, more_bytes, self._root)
        except GpuError as error:
            log.warning("the memory limits cannot be read", session=record.id, why=str(error))
            return
        if lacking is None:
            return
        self._told.add(record)
        text, remedy = user_texts.sentence(Notice.LITTLE_RAM, str(lacking))
        log.info("notice", session=record.id, notice=Notice.LITTLE_RAM.value, detail=str(lacking))
        record.connection.send(UserNotice(notice=Notice.LITTLE_RAM, text=text, remedy=remedy))
