"""What follows from the sessions: sums over them, and places that they are looked up in.

Only ``refresh`` changes these, and only ``audit.check`` recomputes them from scratch. Rules record
on a session what happened, then call ``refresh``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kiwi_core.sched.model.mode import Mode
from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.readings import Readings
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.model.usage import RecentUsage
from kiwi_core.states import Residency

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session
    from kiwi_core.units import SessionId


@dataclass(eq=False, kw_only=True)
class Derived(Mode, Readings):
    """The part of ``State`` that follows from the sessions. Only this module writes its fields, and
    those of ``Session`` that it keeps (``counted_claim_bytes`` ...)."""

    __slots__ = tuple[str, ...]()  # ``State`` has the slots

    idle: OrderedDict[SessionId, Session] = field(default_factory=OrderedDict)
    """The sessions that hold GPU memory and want nothing or are kept out, least recently used
    first."""
    waiting_in: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions in the queue that hold GPU memory and can run without a page-in."""
    waiting_partly_in: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions in the queue that hold GPU memory but are out (``Session.partly_in``)."""
    misplaced: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions that need an operation outside the queue's order: see
    ``settle._tend_misplaced``."""
    taken: dict[SessionId, Session] = field(default_factory=dict)
    """The sessions of whose residue the driver has taken something (``Session.taken_bytes``), or a
    call of whose programs waits for that."""
    claimed_bytes: int = 0
    """The sum of what sessions hold and of what is reserved for restores and expected growth."""
    resident_bytes: int = 0
    """The sum of what sessions hold in the GPU, as last read or reported."""
    host_claimed_bytes: int = 0
    """The sum of what is in system RAM or may get there by a page-out in progress."""
    active_need_bytes: int = 0
    """The sum of the expected needs of all runners and waiters."""
    active: int = 0
    """The number of runners and waiters."""

    usage: RecentUsage = field(default_factory=RecentUsage)

    @property
    def free_bytes(self) -> int:
        """GPU memory neither held nor reserved; negative while a session of unknown need runs."""
        return self.capacity_bytes - self.claimed_bytes

    def refresh(self, session: Session) -> None:
        """Bring every derived count in line with ``session`` after any change to it. This and
        ``recount`` are the hottest functions of all, hence written out; ``audit`` computes the same
        in the plain way."""
        resident = footprint = session.resident_bytes
        if session.residency is Residency.PAGED_OUT:
            footprint = resident + session.paged_out_bytes
            if footprint < session.restore_bytes:
                footprint = session.restore_bytes
        session.footprint_bytes = footprint
        held_bytes = footprint + session.asked_bytes
        session.need_bytes = session.expected_bytes(held_bytes, self.total_bytes)
        if session.taken_bytes or session.residue_wanted:
            self.taken[session.id] = session
        elif self.taken:
            self.taken.pop(session.id, None)
        if resident != session.counted_resident_bytes:
            self.resident_bytes += resident - session.counted_resident_bytes
            session.counted_resident_bytes = resident
        active = session.need_bytes
        if session.want is Want.NONE or session.leaving or (session.kept_out and session.aside):
            active = 0
        if active != session.counted_active_bytes:
            if not active:
                self.active -= 1
                self.usage.rests(session)
            elif not session.counted_active_bytes:
                self.active += 1
                self.usage.wants(session)
            self.active_need_bytes += active - session.counted_active_bytes
            session.counted_active_bytes = active
        self.recount(session)

    def recount(self, session: Session) -> None:
        """Do what ``refresh`` does, after the grant of ``session`` or the start of its operation:
        its memory and its need are as before, and it is as active as before."""
        want, op = session.want, session.op
        claim, host = session.resident_bytes, session.paged_out_bytes
        grows = want is Want.RUNNING
        if op is not None:
            # A hung operation keeps what it may hold, but no reserve for growth.
            grows = not op.overdue and (op.ends_turn or op.doing is Doing.PAGING_IN)
            if op.doing is Doing.PAGING_IN:
                grows = grows and want is not Want.NONE
                claim = session.footprint_bytes
            elif op.doing is Doing.PAGING_OUT:
                host += claim
            elif op.doing is Doing.RESIDUE_IN:
                claim += session.taken_bytes
        if grows and self.protects and not session.gone and not session.leaving:
            need = session.need_bytes
            if need > claim:
                claim = need
        if claim != session.counted_claim_bytes:
            self.claimed_bytes += claim - session.counted_claim_bytes
            session.counted_claim_bytes = claim
        if host != session.counted_host_bytes:
            self.host_claimed_bytes += host - session.counted_host_bytes
            session.counted_host_bytes = host
        self._place(session)

    def used_now(self, session: Session) -> None:
        """Have ``refresh`` put ``session`` at the end of the idle ones if it is idle."""
        self.idle.pop(session.id, None)

    def _place(self, session: Session) -> None:
        id_ = session.id
        want = session.want if session.resident_bytes and not session.gone else None
        if want is Want.QUEUED and session.kept_out:
            want = Want.NONE
        if want is Want.NONE:
            self.idle.setdefault(id_, session)
        elif id_ in self.idle:
            del self.idle[id_]
        if want is Want.QUEUED:
            self.waiting_in[id_] = session
        elif id_ in self.waiting_in:
            del self.waiting_in[id_]
        if self.knows_owned:
            self._place_partly_in(session, want)
        held_or_stopped = session.mid_burst or session.residency is Residency.SUSPENDED
        if held_or_stopped and session.op is None and is_misplaced(session):
            self.misplaced[id_] = session
        elif self.misplaced:
            self.misplaced.pop(id_, None)

    def _place_partly_in(self, session: Session, want: Want | None) -> None:
        self.waiting_partly_in.pop(session.id, None)
        if want is Want.QUEUED and session.partly_in:
            del self.waiting_in[session.id]
            self.waiting_partly_in[session.id] = session


def is_misplaced(session: Session) -> bool:
    """Return whether ``session`` is suspended though it wants nothing (or leaves), or runs though
    it was suspended in mid-burst. A stopped process is left alone, and a session without a gate is
    not suspended in mid-burst."""
    if session.op is not None or session.gone or session.stopped:
        return False
    if session.residency is Residency.SUSPENDED:
        return session.want is Want.NONE or session.leaving
    return session.residency is Residency.RESIDENT and session.mid_burst and session.guarded
