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
            if isinstance(action, Grant):
                self._grant(action)
            elif isinstance(action, Notify):
                self._tell(action)

    def _grant(self, action: Grant) -> None:
        record = self._registry.get(action.session)
        if record is None:
            return
        record.in_burst, record.waiting = True, False
        if record.connection is not None:
            quantum_s = ns_to_seconds(action.quantum_ns)
            record.connection.send(Granted(burst=record.client_burst, quantum_s=quantum_s))
        if record.own_burst:
            asyncio.get_running_loop().call_soon(self._linger, action)
        self._core.observer.somebody_runs()

    def _linger(self, granted: Grant) -> None:
        """Let a burst that the daemon made linger: it ends when the session leaves the GPU idle."""
        self._core.feed(ev.BurstLingered(session=granted.session, burst=granted.burst))

    def _tell(self, action: Notify) -> None:
        record = self._registry.get(action.session)
        text, remedy = user_texts.sentence(action.notice, action.detail)
        log.info("notice", session=action.session, notice=action.notice.value, detail=action.detail)
        if record is None or record.connection is None:
            return
        record.connection.send(UserNotice(notice=action.notice, text=text, remedy=remedy))
