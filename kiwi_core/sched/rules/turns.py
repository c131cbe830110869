"""Turns: runners make way for waiters, and waiters are brought in."""

from __future__ import annotations

from enum import Enum
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import orders, room, tenancy
from kiwi_core.sched.rules.room import RoomState, VictimSurvey
from kiwi_core.sched.rules.unguarded_and_stopped import leave_those_that_stand
from kiwi_core.states import Notice, Residency

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State


FEW: Final = 4
"""The number of waiters that are considered before the rest of the queue."""


class QueueStep(Enum):
    GO_ON = "go on"
    """Consider the next waiter, too."""
    WAIT = "wait"
    """No session behind this waiter may overtake it."""


_granted_ns = attrgetter("granted_ns")
_need_bytes = attrgetter("need_bytes")
_resident_bytes = attrgetter("resident_bytes")


def admit(st: State) -> None:
    """Bring in the waiters whose turn it is, strictly in the policy's order, except that a waiter
    that is blocked by a problem does not hold up the others."""
    if st.stopped:
        leave_those_that_stand(st)
    first = next(iter(st.chosen.values())) if st.chosen else tenancy.first(st)
    if _advance(st, first) is QueueStep.GO_ON and st.queue:
        _admit_others(st, first)
    if st.chosen:
        for waiter in tuple(st.chosen.values()):
            if waiter.op is None:  # neither granted nor on the way in: an ordinary waiter again
                st.choose_no_more(waiter)


def _admit_others(st: State, first: Session) -> None:
    """Admit the waiters behind ``first``, in their present order. The pass stops at the first one
    that has to wait, which is mostly the second. So it tries a few at first, and copies the whole
    queue, which may be long, only if none of them has to wait."""
    seen = {first.id}
    for some in (FEW, None):
        order = tenancy.order(st)
        behind = chain(st.chosen.values(), order) if st.chosen else order
        for waiter in tuple(islice(behind, some)):
            if waiter.id in seen or waiter.id not in st.queue:
                continue
            seen.add(waiter.id)
            if _advance(st, waiter) is QueueStep.WAIT:
                return


def _advance(st: State, waiter: Session) -> QueueStep:
    """Do for ``waiter`` what can be done now: bring it in, make room for it, or let it wait."""
    op = waiter.op
    if op is not None:  # it comes in or goes out
        if op.overdue:
            if waiter.stopped:
                waiter.block(Notice.STOPPED, waiter.stopped)
            else:
                waiter.block(Notice.STUCK, "a driver call on it hangs")
            return QueueStep.GO_ON
        if op.doing is Doing.PAGING_IN:
            room.make_up(st, waiter)
        coming_in = waiter.id in st.chosen
        return QueueStep.GO_ON if coming_in and not st.serialised else QueueStep.WAIT
    if waiter.stopped:
        waiter.block(Notice.STOPPED, waiter.stopped)
        return QueueStep.GO_ON
    if waiter.backoff_until_ns and waiter.may_not_come_yet(st.now_ns):
        st.wake_at(waiter.backoff_until_ns)
        # (its user was notified of the refusal)
        waiter.block(waiter.problem or Notice.PAGE_IN_REFUSED, waiter.problem_detail)
        return QueueStep.GO_ON

    # Those in its way: they hold the lease or are being brought in.
    others = len(st.runners)
    if st.ops:
        others = st.holders + sum(one.op is not None for one in st.chosen.values())
    if not waiter.leaving and not st.policy.may_join(waiter, others, st.serialised):
        if _comes_ahead(st, waiter):
            waiter.unblock()
            return QueueStep.WAIT
        return _await_turn(st, waiter, others)
    state, found = room.make_room(st, waiter, not others)
    if state is RoomState.READY:
        return _bring_in(st, waiter)
    if state is RoomState.SHORT and others:
        return _await_turn(st, waiter, others)
    # What comes in for nobody can go out again: its request was withdrawn, a hint was the reason,
    # or it is a residue.
    for_nobody = any(_restoring(one) and one.want is Want.NONE for one in st.ops.values())
    if state is RoomState.SHORT and not for_nobody and found is not None:
        _block(st, waiter, *room.blocked_by(st, waiter, found))
        return QueueStep.GO_ON
    waiter.unblock()
    return QueueStep.WAIT


def _bring_in(st: State, waiter: Session) -> QueueStep:
    if waiter.blocked is not None:
        waiter.unblock()
    if waiter.residency is Residency.RESIDENT:
        orders.grant(st, waiter, "nobody in the way" if not st.serialised else "its turn")
        return QueueStep.GO_ON
    behind = QueueStep.WAIT if st.serialised else QueueStep.GO_ON
    if waiter.residency is Residency.SUSPENDED:
        st.choose(waiter)
        orders.resume(st, waiter, "its turn")
        return behind
    if not _may_restore(st):
        return QueueStep.WAIT
    st.choose(waiter)
    orders.page_in(st, waiter, "leaves Kiwi" if waiter.leaving else "its turn")
    return behind


def _comes_ahead(st: State, waiter: Session) -> bool:
    """Page in ``waiter`` (or make room for it) beside the runners before its turn, so that the GPU
    does not idle meanwhile; return whether that is under way. A session in mid-burst is excluded:
    its program would go on at once."""
    if waiter.residency is not Residency.PAGED_OUT or waiter.mid_burst or not st.runners:
        return False
    need_bytes = waiter.need_bytes + sum(map(_need_bytes, st.runners.values()))
    if need_bytes + st.margin_bytes > st.capacity_bytes:
        return False
    if st.holders > len(st.runners) or not _may_restore(st):
        return False
    turn_ns = max(st.policy.turn_ends_at_ns(st, runner, waiter) for runner in st.runners.values())
    begin_ns = turn_ns - st.policy.ahead_ns(st, waiter)
    if begin_ns > st.now_ns:
        st.wake_at(begin_ns)
        return False
    state, _ = room.make_room(st, waiter, alone=False)
    if state is RoomState.READY:
        orders.page_in(st, waiter, "its turn is next")
    return state is not RoomState.SHORT


def _may_restore(st: State) -> bool:
    """Return whether a restore may begin. Only one runs at a time: each is checked against free
    memory, which another one uses up, and the bus is the bottleneck anyway. None begins before
    memory has been read once: what programs outside Kiwi hold is unknown until then."""
    if not st.ops:
        return st.observed
    return st.observed and not any(_restoring(session) for session in st.ops.values())


def _restoring(session: Session) -> bool:
    op = session.op
    return op is not None and op.doing in (Doing.PAGING_IN, Doing.RESIDUE_IN) and not op.overdue


def _await_turn(st: State, waiter: Session, others: int) -> QueueStep:
    """Suspend the runners that have used up their quantum, or bring ``waiter`` in beside them if
    none of them can be suspended. ``others`` is the number of sessions in the way: if it exceeds
    the runners, one of them is being suspended or comes in already."""
    if not st.protects or others > len(st.runners):
        _unblock(st, waiter)
        return QueueStep.WAIT
    hindrance: tuple[Notice, str] | None = None
    runners = tuple(st.runners.values())
    for runner in sorted(runners, key=_granted_ns) if len(runners) > 1 else runners:
        turn_ends_at_ns = st.policy.turn_ends_at_ns(st, runner, waiter)
        if turn_ends_at_ns > st.now_ns:
            st.wake_at(turn_ends_at_ns)
            continue
        hindrance = _make_way(st, runner, waiter) or hindrance
        if not st.serialised and runner.turn_ending:
            break  # one may be enough: see what room that gives before suspending another
    if hindrance is not None:
        # Where the driver has just refused to stop them all, and not because work in the GPU must
        # end first, nobody knows for how long: who fits beside them need not wait for that.
        if all(one.backoff_until_ns > st.now_ns and not one.draining for one in runners):
            state, _ = room.make_room(st, waiter, alone=False)
            if state is RoomState.READY:
                return _bring_in(st, waiter)
        _block(st, waiter, *hindrance)
        return QueueStep.GO_ON
    # The policy is asked only once, at the end of the pass. Asking for each of a hundred waiters
    # that a runner hinders took 36 ms.
    if (reorders_at_ns := st.policy.reorders_at_ns(st)) is not None:
        st.wake_at(reorders_at_ns)
    if waiter.blocked is not None:
        _unblock(st, waiter)
    return QueueStep.WAIT


def _unblock(st: State, waiter: Session) -> None:
    """Record that ``waiter`` will go on by itself, unless a runner is being suspended that could
    not be suspended before, because work in the GPU had to end first: nobody knows how long that
    takes.
    """
    drains = next((one for one in st.ops.values() if one.draining), None)
    if drains is None:
        waiter.unblock()
    else:
        _block(st, waiter, *room.refused_by(drains))


def _make_way(st: State, runner: Session, waiter: Session) -> tuple[Notice, str] | None:
    """Suspend ``runner``, or return why it cannot be suspended and continues past its quantum."""
    if not runner.guarded:
        return Notice.BLOCKED_UNGUARDED, ""
    if runner.backoff_until_ns > st.now_ns:
        st.wake_at(runner.backoff_until_ns)
        return room.refused_by(runner)
    early = st.now_ns < runner.granted_ns + st.quantum_ns(runner)
    cause = f"{waiter.id} goes first" if early else f"its quantum ended and {waiter.id} waits"
    # What is reserved for the growth of runners, and of sessions being suspended, is free once they
    # are suspended.
    growing = [*st.runners.values()]
    growing += [s for s in st.ops.values() if s.op is not None and s.op.doing is Doing.SUSPENDING]
    free_bytes = sum([s.counted_claim_bytes - s.resident_bytes for s in growing])
    free_bytes += st.free_bytes + room.coming_bytes(st) + waiter.counted_claim_bytes
    short_bytes = room.wanted_bytes(st, waiter) - free_bytes
    movable_bytes = sum(map(_resident_bytes, st.runners.values()))
    forced_bytes = room.forced_bytes(st, waiter) - free_bytes - movable_bytes
    found = room.survey(st, short_bytes, beside=waiter, residues_for_bytes=forced_bytes)
    enough = found.gain_bytes >= short_bytes
    if not enough and (runner.unmovable or runner.cramped_ns >= 0):
        # Its memory was to go out in this burst, and could not. That ``waiter`` runs beside it,
        # once it is suspended, is better than to wait for the end of its burst.
        least_bytes = room.minimum_bytes(st, waiter, alone=st.holders == 1)
        enough = free_bytes + found.gain_bytes >= least_bytes
    if enough:
        orders.end_turn(st, runner, Doing.SUSPENDING, cause)
        return None
    if waiter.footprint_bytes - free_bytes > found.gain_bytes + movable_bytes:
        return room.blocked_by(st, waiter, found)
    if runner.unmovable:
        return room.refused_by(runner)
    if st.host_claimed_bytes + runner.resident_bytes > st.host_budget_bytes:
        return room.blocked_by(st, waiter, VictimSurvey(over_budget=runner))
    orders.end_turn(st, runner, Doing.PAGING_OUT, cause)
    st.goes_out_for(runner, waiter)
    return None


def shelter(st: State) -> None:
    """Keep the margin free for runners: idle memory is paged out before a growing runner runs out
    of memory. If that is not enough for several runners, they have outgrown the GPU."""
    short_bytes = st.margin_bytes + st.claimed_bytes - st.capacity_bytes
    if short_bytes <= 0:
        return
    coming = room.coming_bytes(st)
    for_bytes = short_bytes
    if len(st.runners) <= 1:
        # A session that runs alone and cannot ask for room hits the wall where memory that is free
        # now, reservations aside, ends.
        asks = any(runner.owned for runner in st.runners.values())
        for_bytes = 0 if asks else st.margin_bytes - (st.capacity_bytes - st.resident_bytes)
    found = room.survey(st, short_bytes - coming, residues_for_bytes=for_bytes - coming)
    room.evict(st, found, "the runners need more room")
    st.runners_outgrow(len(st.runners) > 1 and coming + found.gain_bytes < short_bytes)


def thin_out(st: State) -> None:
    """Suspend the youngest of parallel runners that have outgrown the GPU, each not before its
    floor, until the others fit or one is left. Runners without a gate go on in any case."""
    youngest_first = sorted(st.runners.values(), key=_granted_ns, reverse=True)
    guarded = [runner for runner in youngest_first if runner.guarded]
    one_stays = len(guarded) < len(youngest_first)
    for runner in guarded if one_stays else guarded[:-1]:
        short_bytes = st.margin_bytes - st.free_bytes - room.coming_bytes(st)
        if short_bytes <= 0:
            return
        floor_ns = st.policy.floor_ns(st, runner)
        may_ns = max(runner.granted_ns + floor_ns, runner.backoff_until_ns)
        if may_ns > st.now_ns:
            st.wake_at(may_ns)
            continue
        # Where system RAM is full or the session cannot be moved, suspending it stops its growth.
        fits = st.host_claimed_bytes + runner.resident_bytes <= st.host_budget_bytes
        doing = Doing.PAGING_OUT if fits and not runner.unmovable else Doing.SUSPENDING
        orders.end_turn(st, runner, doing, "the runners no longer fit together")


def _block(st: State, waiter: Session, notice: Notice, detail: str) -> None:
    """Mark ``waiter`` as blocked and notify its user once; the detail may change while it
    waits."""
    if waiter.blocked is not notice:
        st.notify(waiter, notice, detail)
        st.tell(waiter, "cannot go on: {} ({})", notice.value, detail)
    waiter.block(notice, detail)
