"""End the program of a session, as the scheduler orders (``EndSession``).

Its user gets a notice first. Then all processes of the session get SIGTERM, and after a while
SIGKILL. SIGCONT follows SIGTERM: a program that Ctrl-Z or Slurm has stopped handles no signal
before it goes on. A kernel that Jupyter starts in place of an ended one gets the reason. The
signals go through descriptors of the processes: a pid may belong to another process by then.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from kiwi_core.daemon import user_texts
from kiwi_core.daemon.base.peers import user_name
from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import EndSession
from kiwi_core.states import Notice
from kiwi_core.wire.messages import UserNotice

if TYPE_CHECKING:
    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.daemon.base.peers import Owner
    from kiwi_core.daemon.base.steps import Step
    from kiwi_core.daemon.engine.core import Core
    from kiwi_core.daemon.roster.registry import SessionRecord, SessionRegistry
    from kiwi_core.gpu.processes import ProcessRef

log = structlog.get_logger(__name__)

NOTICE_S: Final = 1.0
"""Time between the notice and SIGTERM: the notice has to reach the page of a notebook."""

GRACE_S: Final = 10.0
"""Time between SIGTERM and SIGKILL: a program may save its work."""

REMEMBERED_MAX: Final = 256
"""Most ended kernels that are remembered for their successors; Jupyter starts a successor within
seconds.
"""


class _Ended(NamedTuple):
    owner: Owner
    ref: ProcessRef
    unix_s: float
    cause: str


@dataclass(eq=False, repr=False)
class Ending:
    """A subscriber (``steps``)."""

    _core: Core
    _registry: SessionRegistry
    _ended: OrderedDict[str, _Ended] = field(default_factory=OrderedDict)
    """The ended sessions, by Jupyter's id of the kernel."""
    closed: bool = False
    """True when the daemon leaves: it ends nothing any more."""

    def after(self, step: Step) -> None:
        for action in step.actions:
            record = self._registry.get(action.session)
            if not isinstance(action, EndSession) or self.closed or record is None:
                continue
            if os.geteuid() not in (0, record.uid):
                self._refused(record, "the daemon may not signal another user's processes")
                continue
            log.warning(
                "session is ended", session=record.id, pid=record.ref.pid, name=record.name,
                owner=user_name(record.uid), job=record.job, why=action.cause,
            )  # fmt: skip
            if record.connection is not None:
                text, remedy = user_texts.sentence(Notice.ENDED, action.cause)
                record.connection.send(UserNotice(notice=Notice.ENDED, text=text, remedy=remedy))
            if record.kernel_id:
                ended = _Ended(record.identity, record.ref, time.time(), action.cause)
                self._ended[record.kernel_id] = ended
            if len(self._ended) > REMEMBERED_MAX:
                self._ended.popitem(last=False)
            asyncio.get_running_loop().call_later(NOTICE_S, self._terminate, record)

    def notify_successor(self, record: SessionRecord, connection: Connection) -> None:
        """Tell a new session that its kernel's id belonged to one that was ended."""
        ended = self._ended.get(record.kernel_id)
        if ended is None or ended.owner != record.identity or ended.ref == record.ref:
            return
        del self._ended[record.kernel_id]
        text, remedy = user_texts.ended_before(ended.cause, ended.unix_s)
        connection.send(UserNotice(notice=Notice.ENDED, text=text, remedy=remedy))

    def _terminate(self, record: SessionRecord) -> None:
        """Send SIGTERM to the processes of the session, parents first, and later SIGKILL."""
        signalled: list[tuple[ProcessRef, int]] = []
        try:
            others = self._registry.refs() - {record.ref}
            for ref in processes.tree(record.ref, without=others):
                if (descriptor := processes.open_pidfd(ref)) is not None:
                    signalled.append((ref, descriptor))
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                        signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        except (GpuError, OSError) as error:
            self._refused(record, str(error))

        def kill() -> None:
            """Kill the processes that SIGTERM has not ended."""
            for ref, descriptor in signalled:
                with suppress(OSError):
                    if processes.alive(ref):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        log.warning("did not end at SIGTERM: killed", pid=ref.pid)
                os.close(descriptor)

        asyncio.get_running_loop().call_later(GRACE_S, kill)

    def _refused(self, record: SessionRecord, why: str) -> None:
        log.error("session cannot be ended", session=record.id, pid=record.ref.pid, why=why)
        # In the loop, after the step that ordered it: other subscribers have yet to see that.
        event = ev.EndRefused(session=record.id, why=why)
        asyncio.get_running_loop().call_soon(self._core.feed, event)
