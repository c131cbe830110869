"""Send the scheduler's orders that concern clients to them: grants and notices."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from kiwi_core.daemon import user_texts
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, Notify
from kiwi_core.units import ns_to_seconds
from kiwi_core.wire.messages import Granted, UserNotice

if TYPE_CHECKING:
    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.roster.registry import SessionRegistry

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class Messenger:
    """A subscriber (``steps``)."""

    _core: Core
    _registry: SessionRegistry

    def after(self, step: Step) -> None:
        for action in step.actions:
            record = self._registry.get(action.session)
            if isinstance(action, Grant):
                if record is None:
                    continue
                record.granted_burst = record.client_burst
                if record.connection is not None:
                    quantum_s = ns_to_seconds(action.quantum_ns)
                    word = Granted(burst=record.client_burst, quantum_s=quantum_s)
                    record.connection.send(word)
                if record.own_burst:
                    # A burst that the daemon made ends when the session leaves the GPU idle.
                    lingers = ev.BurstLingered(session=action.session, burst=action.burst)
                    asyncio.get_running_loop().call_soon(self._core.feed, lingers)
                self._core.observer.somebody_runs()
            elif isinstance(action, Notify):
                notice, detail = action.notice, action.detail
                log.info("notice", session=action.session, notice=notice.value, detail=detail)
                if record is None or record.connection is None:
                    continue
                text, remedy = user_texts.sentence(notice, detail)
                record.connection.send(UserNotice(notice=notice, text=text, remedy=remedy))
