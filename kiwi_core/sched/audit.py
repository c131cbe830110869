"""Recompute every derived value from scratch and compare. Tests call this after each event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.sched.actions import BringResidueBack, PageIn
from kiwi_core.sched.model.derived import is_misplaced
from kiwi_core.sched.model.history import MOVES
from kiwi_core.sched.model.operations import Doing
from kiwi_core.sched.model.turn import Want
from kiwi_core.states import AntiThrash, HistoryKind, Residency
from kiwi_core.units import NS_PER_MS

if TYPE_CHECKING:
    from kiwi_core.sched.model.session import Session
    from kiwi_core.sched.model.state import State


def check(st: State) -> None:
    """Raise an ``AssertionError`` that names the value that differs."""
    for session in st.sessions.values():
        _check_session(st, session)
    _check_places(st)
    _check_sums(st)
    _check_rules(st)
    _check_room(st)
    _check_policy(st)


def _equal(what: str, kept: object, recomputed: object) -> None:
    if kept != recomputed:
        raise AssertionError(f"{what}: kept {kept!r}, recomputed {recomputed!r}")


def _true(what: str, holds: bool) -> None:
    if not holds:
        raise AssertionError(what)


def _footprint_bytes(s: Session) -> int:
    if s.residency is not Residency.PAGED_OUT:
        return s.resident_bytes
    return max(s.restore_bytes, s.resident_bytes + s.paged_out_bytes)


def _does(s: Session, doing: Doing) -> bool:
    return s.op is not None and s.op.doing is doing


def _claim_bytes(st: State, s: Session) -> int:
    """Return the GPU memory that ``s`` holds or is being paged in with. If it holds the lease, or
    is paged in to run, return at least its need, unless anti-thrash is off."""
    claim = s.resident_bytes
    if _does(s, Doing.PAGING_IN):
        claim = _footprint_bytes(s)
    elif _does(s, Doing.RESIDUE_IN):
        claim += s.taken_bytes
    if st.anti_thrash is AntiThrash.OFF or s.gone or s.leaving or s.stuck:
        return claim
    comes_to_run = _does(s, Doing.PAGING_IN) and s.want is not Want.NONE
    grows = s.want is Want.RUNNING or s.turn_ending or comes_to_run
    return max(claim, s.need_bytes) if grows else claim


def _host_claim_bytes(s: Session) -> int:
    claim = s.paged_out_bytes
    if s.op is not None and s.op.doing is Doing.PAGING_OUT:
        claim += s.resident_bytes
    return claim


def _active(s: Session) -> bool:
    return s.want is not Want.NONE and not s.leaving and not s.aside


def _check_session(st: State, s: Session) -> None:
    _equal(f"footprint of {s.id}", s.footprint_bytes, _footprint_bytes(s))
    need_bytes = s.expected_bytes(_footprint_bytes(s) + s.asked_bytes, st.total_bytes)
    _equal(f"need of {s.id}", s.need_bytes, need_bytes)
    _equal(f"claim of {s.id}", s.counted_claim_bytes, _claim_bytes(st, s))
    _equal(f"host claim of {s.id}", s.counted_host_bytes, _host_claim_bytes(s))
    _equal(f"active need of {s.id}", s.counted_active_bytes, s.need_bytes if _active(s) else 0)
    where, runs = s.residency, s.want is Want.RUNNING
    out = where is Residency.PAGED_OUT
    _true(f"{s.id} has bytes in RAM but is {where}", out or not s.paged_out_bytes)
    taken = s.taken_bytes or s.residue_wanted
    _true(f"the driver has taken a part of {s.id}, which is {where}", out or not taken)
    _true(f"{s.id} runs but is {where}", not runs or where is Residency.RESIDENT)
    _true(f"{s.id} runs under an operation", s.want is not Want.RUNNING or s.op is None)
    _true(f"{s.id} is in mid-burst, not queued", not s.mid_burst or s.want is Want.QUEUED)
    _true(f"{s.id} is lost but wants", s.residency is not Residency.LOST or s.want is Want.NONE)
    _true(f"{s.id} is gone but wants", not s.gone or (s.want is Want.NONE and s.op is not None))
    _true(f"{s.id} is blocked, not queued", s.blocked is None or s.want is Want.QUEUED)
    _true(f"{s.id} stops, not queued", not s.turn_ending or (s.want is Want.QUEUED and s.mid_burst))
    _equal(f"stretch of {s.id}", s.stretch, _stretch_of(s))
    moves = s.op is not None and s.op.doing in MOVES
    _equal(f"move of {s.id} in the history", s.op is not None and bool(s.op.move_id), moves)
    _true(f"negative bytes of {s.id}", min(s.resident_bytes, s.paged_out_bytes) >= 0)


def _stretch_of(session: Session) -> HistoryKind | None:
    """Return whether ``session`` holds the lease, waits or is suspended. A session that is being
    suspended still holds; a session that leaves waits for no turn."""
    if session.want is Want.RUNNING or session.turn_ending:
        return HistoryKind.HELD
    if session.want is Want.QUEUED and not session.leaving:
        return HistoryKind.SUSPENDED if session.mid_burst else HistoryKind.WAITED
    return None


def _check_places(st: State) -> None:
    sessions = st.sessions.values()
    queued = [s for s in sessions if s.want is Want.QUEUED and not s.kept_out]
    _equal("queue", set(st.queue), {s.id for s in queued})
    _equal("kept out", dict(st.kept_out), {s.id: s for s in sessions if s.kept_out})
    _true("leaves, but is kept out", not any(s.leaving or s.gone for s in st.kept_out.values()))
    _equal("runners", set(st.runners), {s.id for s in sessions if s.want is Want.RUNNING})
    resting = [
        s for s in sessions if s.want is Want.NONE or (s.kept_out and s.id not in st.runners)
    ]
    _equal("idle", set(st.idle), {s.id for s in resting if s.resident_bytes and not s.gone})
    waiting = [s for s in queued if s.resident_bytes]
    partly = {s.id for s in waiting if s.owned and s.residency is Residency.PAGED_OUT}
    _equal("waiting partly in", set(st.waiting_partly_in), partly)
    _equal("waiting in", set(st.waiting_in), {s.id for s in waiting} - partly)
    _equal("misplaced", set(st.misplaced), {s.id for s in sessions if is_misplaced(s)})
    taken = {s.id: s for s in sessions if s.taken_bytes or s.residue_wanted}
    _equal("taken", dict(st.taken), taken)
    _equal("cramped", dict(st.cramped), {s.id: s for s in sessions if s.cramped_ns >= 0})
    _equal("stopped", st.stopped, {s.id for s in sessions if s.stopped})
    _equal("ops", dict(st.ops), {s.op.op: s for s in sessions if s.op is not None})
    _equal("stories", st.stories.present(), set(st.sessions))
    _equal("capacity", st.capacity_bytes, st.total_bytes - st.outside_bytes)
    coming_in = all(id_ in st.queue and s.op is not None for id_, s in st.chosen.items())
    _true("chosen, but not queued or not on the way", coming_in)
    lingering = {s.id for s in sessions if s.lingering and s.want is Want.RUNNING}
    _true("lingerers", lingering <= set(st.lingerers))


def _check_sums(st: State) -> None:
    sessions = st.sessions.values()
    _equal("claimed", st.claimed_bytes, sum(_claim_bytes(st, s) for s in sessions))
    _equal("resident", st.resident_bytes, sum(s.resident_bytes for s in sessions))
    _equal("host claimed", st.host_claimed_bytes, sum(_host_claim_bytes(s) for s in sessions))
    active = [s for s in sessions if _active(s)]
    _equal("active", st.active, len(active))
    owners = {s.owner for s in active}
    counted = {owner: sum(s.owner == owner for s in active) for owner in owners}
    _equal("active of each owner", st.usage.owners, counted)
    _equal("active need", st.active_need_bytes, sum(s.need_bytes for s in active))


def _check_room(st: State) -> None:
    """Check that each page-in has room: when one is ordered, what is in the GPU and what all
    page-ins in progress add must fit. (Later a program outside may take the free memory, and the
    pager checks again.)"""
    comes = (Doing.PAGING_IN, Doing.RESIDUE_IN)
    arrivals = [s for s in st.sessions.values() if s.op is not None and s.op.doing in comes]
    if not any(isinstance(action, (PageIn, BringResidueBack)) for action in st.actions):
        return  # the GPU may have filled up since, even within the same nanosecond
    _true("two come in at once", sum(not s.stuck for s in arrivals) <= 1)
    added_bytes = sum(
        s.taken_bytes if _does(s, Doing.RESIDUE_IN) else _footprint_bytes(s) - s.resident_bytes
        for s in arrivals
    )
    total_bytes = sum(s.resident_bytes for s in st.sessions.values()) + added_bytes
    _true("a page-in has no room", total_bytes <= st.capacity_bytes)


def _check_policy(st: State) -> None:
    st.policy.check(st)
    usage, active = st.usage, [s for s in st.sessions.values() if _active(s)]
    _equal("weight of those that want", usage.weight, sum(s.weight for s in active))
    had = sum(s.had for s in active)
    drift_ns = abs(usage.had - had) * usage.fading(st.now_ns)
    _true("what those that want have had", drift_ns < NS_PER_MS)
    _equal("running", usage.running, len(st.runners))
    _equal("began", usage.began_ns, sum(s.began_ns for s in st.runners.values()))


def _check_rules(st: State) -> None:
    _true("wakes in the past", st.wake_ns is None or st.wake_ns > st.now_ns)
    asked = dict.fromkeys(st.sessions, 0)
    for (id_, request), wanted in st.room_requests.items():
        _true(
            "a room request under another's name",
            (wanted.session.id, wanted.request) == (id_, request),
        )
        asked[id_] += wanted.bytes
    _equal("asked for", {s.id: s.asked_bytes for s in st.sessions.values()}, asked)
    making_room = bool(st.ops) and not st.queue and not st.runners
    _true("hinted, but nothing is done for it", st.hinted is None or making_room)
    _true("outgrown without protection", not st.outgrown or st.anti_thrash is AntiThrash.ON)
    if st.anti_thrash is not AntiThrash.ON:
        _equal("serialised", st.serialised, st.anti_thrash is AntiThrash.ALWAYS)
