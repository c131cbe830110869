"""Residues: what libraries leave in the GPU when they page out, contexts mostly.

Only the driver can move a residue, and it takes one in two cases: where room is really short
(``rules.room``), and early, from a session that has been idle for long while all residues together
exceed their share of the GPU.

A program of whose residue the driver has something may stand still in a call that is none of CUDA
(NVML), and then nobody asks for the lease. So a residue that was taken comes back for its own sake,
after everything else, one at a time:

- at once if a call is known to wait for it (``ResidueWanted``) and the GPU has the room;
- otherwise after a pause (``Memory.residue_pause_ns``), if there is room also for all that
  residues are taken for, of runners and waiters, and if the residues stay within their share.

So no residue comes back that the next turn takes again, and none that would be taken early.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from kiwi_core.sched import events as ev
from kiwi_core.sched.model.turn import Want
from kiwi_core.sched.rules import orders
from kiwi_core.sched.rules.room import RESIDUE_SHARE, forced_bytes, is_residue
from kiwi_core.sched.rules.unguarded_and_stopped import must_stay
from kiwi_core.states import Residency
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.model.state import State

LOOK_INTERVAL_NS: Final = NS_PER_S
"""How often all residues, runners and waiters are looked at: a look at 10,000 takes some ms."""


def wanted(st: State, event: ev.ResidueWanted) -> None:
    session = st.known(event.session)
    if session is None or session.residency is not Residency.PAGED_OUT:
        return
    session.wants_residue(st.now_ns)
    st.look_at_residues(st.now_ns)
    st.refresh(session)


def tend(st: State) -> None:
    """Let one residue come back, or else have one taken early. The settle pass calls this last."""
    if not (st.taken or st.knows_owned):
        return
    if st.now_ns < st.residues_look_ns:
        if st.taken:
            st.wake_at(st.residues_look_ns)
        return
    if st.hinted is not None or not st.observed or any(not s.stuck for s in st.ops.values()):
        return
    st.look_at_residues(st.now_ns + LOOK_INTERVAL_NS)
    if not _bring_one_back(st) and st.knows_owned and not st.queue:
        _take_one_early(st)


def _bring_one_back(st: State) -> bool:
    """Bring back the first residue for which there is room, those that calls wait for first."""
    room_bytes = st.capacity_bytes - st.resident_bytes - st.margin_bytes
    for hung in st.ops.values():
        room_bytes -= hung.counted_claim_bytes - hung.resident_bytes
    spare_bytes: int | None = None
    for session in sorted(st.taken.values(), key=lambda one: not one.residue_wanted):
        if session.want is not Want.NONE or session.op is not None or session.gone:
            continue  # it waits for its turn, or something hangs
        if session.stopped or session.kept_out:
            continue
        if session.residue_not_before_ns > st.now_ns:
            st.wake_at(session.residue_not_before_ns)
            continue
        free_bytes = room_bytes
        if not session.residue_wanted:
            if spare_bytes is None:
                spare_bytes = _spare_bytes(st)
            free_bytes = min(room_bytes, spare_bytes)
        if session.taken_bytes <= free_bytes:
            cause = "a call waits for them" if session.residue_wanted else "there is room"
            orders.bring_residue_back(st, session, cause)
            return True
    return False


def _spare_bytes(st: State) -> int:
    """Return how much more residues may take: what runners, and each waiter in its turn, leave of
    the GPU, and what is left of the residues' share."""
    residues_bytes = sum(s.resident_bytes for s in st.idle.values() if s.partly_in)
    run_bytes = sum(forced_bytes(st, runner) for runner in st.runners.values())
    needed_bytes = max(chain([run_bytes], (forced_bytes(st, one) for one in st.queue.values())))
    left_bytes = st.capacity_bytes - needed_bytes - st.margin_bytes
    return min(left_bytes, st.total_bytes // RESIDUE_SHARE) - residues_bytes


def _take_one_early(st: State) -> None:
    """Have the driver take the residue of the session that has been idle longest."""
    residues = [one for one in st.idle.values() if is_residue(st, one)]
    if sum(one.resident_bytes for one in residues) <= st.total_bytes // RESIDUE_SHARE:
        return
    for one in residues:
        idle_ns = 0 if one.rested_ns is None else st.now_ns - one.rested_ns
        if idle_ns < st.config.residue_idle_ns or one.op is not None or one.leaving:
            continue
        fits = st.host_claimed_bytes + one.resident_bytes <= st.host_budget_bytes
        if fits and one.backoff_until_ns <= st.now_ns and not must_stay(one) and not one.stopped:
            orders.page_out(st, one, "idle for long, and contexts take much of the GPU")
            return


HANDLERS: dict[type[ev.Event], Callable[..., None]] = {ev.ResidueWanted: wanted}
