"""A process with Kiwi's library preloaded: its connection, last report and current operation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import clock
from kiwi_core.daemon.links.calls import PagerCall, refusal
from kiwi_core.gpu import processes
from kiwi_core.gpu.ownable import OwnershipObjection
from kiwi_core.pager.api import Lost, Moved, Refused
from kiwi_core.pager.linked import LibraryReport
from kiwi_core.states import GateOnly, Reason, Residency
from kiwi_core.units import MIB, NS_PER_S
from kiwi_core.wire.pager import PagerAction, PagerDo, PagerOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.daemon.base.connection import Connection
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Outcome
    from kiwi_core.units import SessionId
    from kiwi_core.wire.pager import PagerDone

log = structlog.get_logger(__name__)

RECONNECT_WITHIN_S = 5.0
"""A library that lost its connection reconnects within a second, if its process can run at all."""

EXEC_WITHIN_S = 1.0
"""A program that is replaced (exec) closes its connection. The kernel shows the new program within
milliseconds."""

SETTLED_S: Final = 1.0
"""A library reports a change within a quarter of a second. A reading after which none came for so
long fits the report before it."""

DOUBT_S: Final = 60.0
"""A library that was doubted is believed again after this; the time doubles with each doubt."""

DOUBT_MAX_S: Final = 3600.0

COMPARED_MIN_BYTES: Final = 64 * MIB
"""A smaller page-out is not compared with what the GPU gained: contexts grow and shrink."""

POOR_MOVES_MAX: Final = 2
"""So many poor page-outs in a row, and the library is not believed any more. Once can be chance:
another thread of the driver, or a reading of NVML that is late."""

FAILED_MOVES_MAX: Final = 2


@dataclass(eq=False)
class Link:
    """``session`` is the one that the process belongs to; ``None``: none. ``off``: its session has
    left Kiwi. ``gate_open`` is the last order on this connection. ``wants_lease``: a call waits at
    its gate. ``image`` is the program that it ran when it last connected (``processes.image_of``);
    ``above`` are the process and its ancestors."""

    ref: ProcessRef
    uid: int
    name: str = ""
    session: SessionId | None = None
    off: bool = False
    report: LibraryReport = field(default_factory=LibraryReport)
    context_bytes: int = 0
    """What its contexts take in the GPU, as far as that is known."""
    _reading: tuple[float, int] | None = None
    """A reading since its last report: when it was, and what NVML counted beyond its count."""
    host_bytes: int = 0
    """System RAM that the process really had at its last report."""
    next_doubt_s: float = DOUBT_S
    """How long its next doubt lasts, if it does not give back what it holds only for speed."""
    doubted_until_s: float = float("-inf")
    image: str = ""
    connection: Connection | None = None
    greeted: bool = False
    """True once it has told its state on this connection."""
    gate_open: bool | None = None
    wants_lease: bool = False
    wants_context: bool = False
    """A call of NVML waits until the driver has let go of the process."""
    call: PagerCall | None = None
    unanswered: int | None = None
    """Number of a move that timed out and is unanswered. Nothing else is sent until the answer
    comes: an order behind it would be carried out when nobody expects it."""
    opening: int | None = None
    """Number of an order to open its gate that was not answered in time. Until the answer comes, or
    its connection ends, the gate counts as open: it may open at any moment."""
    going_out: bool = False
    """True from the order of a page-out, which may not be sent yet."""
    away_since_s: float = float("-inf")
    """When the connection was lost, or when a daemon began that knew the link from the roster."""
    pidfd: int = -1
    above: tuple[ProcessRef, ...] = ()
    owns: bool = True
    """True if its library can move its memory; if false, it is only the gate."""
    told_to_own: bool = False
    """True if the last welcome said so."""
    objection: OwnershipObjection | None = None
    """Why the driver moves its memory; ``None``: its library does. See ``ownership``."""
    program: str = ""
    """The same for each start of its program (``ownership.program_of``)."""
    moved_s: float = float("-inf")
    """When a move of its memory last ended."""
    failed_moves: int = 0
    """Page-outs in a row that its library refused because of errors of the driver."""
    poor_moves: int = 0
    """Page-outs in a row by which the GPU gained far less than the library reported."""
    next_op: Callable[[], int] = field(default=lambda: 0, repr=False)

    @property
    def connected(self) -> bool:
        return self.connection is not None

    @property
    def yields(self) -> bool:
        """True if its library owns memory that only the driver may move any more."""
        return self.owns and self.objection is not None

    @property
    def expected(self) -> bool:
        """True if it will soon be connected again: daemons are restarted, libraries are not."""
        return not self.connected and clock.now_s() - self.away_since_s < RECONNECT_WITHIN_S

    @property
    def moving(self) -> bool:
        sent = self.call is not None and self.call.op is not None and self.call.moves
        late = self.unanswered is not None and (self.connected or self.expected)
        return sent or late

    @property
    def doubted(self) -> bool:
        """True if memory that it reports as held only for speed does not count as available."""
        return clock.now_s() < self.doubted_until_s

    def sees_context(self, in_gpu_bytes: int) -> None:
        """Learn what its contexts take: what NVML has counted beyond its own count. The report at
        hand may be older than that: a reading counts once no other has come for a while."""
        now_s = clock.now_s()
        if self._reading is not None:
            read_s, size_bytes = self._reading
            if now_s - read_s < SETTLED_S:
                return
            self.context_bytes = min(size_bytes, self.context_bytes or size_bytes)
        self._reading = now_s, max(0, in_gpu_bytes - self.report.held_bytes)

    def doubt(self) -> None:
        """Record that it was asked to give back memory, and has not."""
        self.doubted_until_s = clock.now_s() + self.next_doubt_s
        self.next_doubt_s = min(DOUBT_MAX_S, 2 * self.next_doubt_s)

    def compare_gain(self, gained_bytes: int, reported_bytes: int) -> None:
        """Take what NVML says that the GPU gained by a page-out, beside what its library says."""
        if reported_bytes < COMPARED_MIN_BYTES:
            return
        self.poor_moves = self.poor_moves + 1 if gained_bytes * 2 < reported_bytes else 0
        if self.poor_moves:
            log.warning(
                "the GPU gained less than was moved",
                pid=self.ref.pid, gained=gained_bytes, reported=reported_bytes,
            )  # fmt: skip
        if self.poor_moves >= POOR_MOVES_MAX and self.objection is None:
            self.objection = OwnershipObjection(GateOnly.DOUBTED)

    # --- its life -------------------------------------------------------------------------------

    def attach(self, connection: Connection) -> Connection | None:
        """Take a new connection. Return the one that it replaces, if any."""
        old, self.connection = self.connection, connection
        self._forget_old_program()
        self.image = processes.image_of(self.ref)
        self.greeted, self.gate_open, self.wants_lease = False, None, False
        self.wants_context = False
        self.opening = None
        return old if old is not connection else None

    def lost(self) -> None:
        """Record that the connection ended. A library that holds its program then lets it go; one
        that is only a gate does not, because it cannot know whether the driver has the process."""
        self.connection = None
        self.away_since_s = clock.now_s()
        self.gate_open, self.wants_lease, self.opening = None, False, None
        self.wants_context = False
        if self.report.residency is Residency.SUSPENDED and self.owns:
            self.report = _as(self.report, Residency.RESIDENT)
        if self.call is not None:
            self.call.later(RECONNECT_WITHIN_S, self._give_up_if_away)
        asyncio.get_running_loop().call_later(EXEC_WITHIN_S, self.forget_if_replaced)

    def died(self) -> None:
        self.connection = None
        self.gate_open, self.wants_lease, self.unanswered = None, False, None
        self.report = LibraryReport()
        if self.call is not None:
            self._resolve(self.call, Refused(Reason.GONE, f"Process {self.ref.pid} has ended."))

    def handle_report(self, report: LibraryReport) -> None:
        """Take its state. The first report on a connection also contains the outcome of an
        operation whose answer was lost with the last connection.
        """
        self._reading = None
        if self.report.residency is not Residency.LOST:  # nothing brings that back
            self.report = self._as_plausible(report)
        if self.greeted:
            return
        self.greeted, self.unanswered = True, None
        call = self.call
        if call is None:
            return
        came_in = call.action is PagerAction.PAGE_IN and report.residency is Residency.RESIDENT
        if call.op is not None and came_in:
            # The answer was lost, and nobody knows how long it took. (A page-out reports its bytes
            # when it is ordered again.)
            self._resolve(call, Moved(call.out_bytes, elapsed_ns=0))
        else:
            self._send(call)  # again, if need be: each action may be repeated

    def _as_plausible(self, report: LibraryReport) -> LibraryReport:
        """Return ``report``, with "resident" for "held" if the order to open has been sent. Such a
        report is the late answer to a hold that timed out."""
        held = report.residency is Residency.SUSPENDED
        return _as(report, Residency.RESIDENT) if held and self.opening is not None else report

    # --- its work -------------------------------------------------------------------------------

    def begin(self, call: PagerCall) -> None:
        if self.call is not None:  # (from its previous session, perhaps)
            detail = f"Process {self.ref.pid} is busy with something else for Kiwi."
            call.resolve(Refused(Reason.LOCK_TIMEOUT, detail))
            return
        if self.forget_if_replaced():
            call.resolve(self._gone())
            return
        self.call = call
        if self.greeted and self.connected and self.unanswered is None:
            self._send(call)
        else:
            call.later(RECONNECT_WITHIN_S, self._give_up_if_away)
            call.later(call.left_ns / NS_PER_S + call.grace_s, self._overdue)

    def forget_if_replaced(self) -> bool:
        """Return whether the process has replaced its program (``exec``) and the new one has not
        connected. Then forget the reports of the old program, which has ended, and its memory and
        gate with it.
        """
        return not self.connected and self._forget_old_program()

    def _forget_old_program(self) -> bool:
        if not self.image or processes.image_of(self.ref) in ("", self.image):
            return False
        log.info("another program", pid=self.ref.pid, was=self.report.residency.value)
        self.image, self.report, self.unanswered = "", LibraryReport(), None
        self.objection, self.told_to_own = None, False
        self.failed_moves = self.poor_moves = 0
        if self.call is not None:
            self._resolve(self.call, self._gone())
        return True

    def _gone(self) -> Refused:
        return Refused(Reason.GONE, f"Process {self.ref.pid} has replaced its program.")

    def done(self, answer: PagerDone) -> bool:
        """Take an answer. Return false if nobody waits for it."""
        call = self.call
        if answer.op == self.opening:
            self.opening = None
            return False
        if answer.op == self.unanswered:
            self.unanswered = None
            self.going_out = call is not None and call.action is PagerAction.PAGE_OUT
            if call is not None:
                self._send(call)
            return False
        if call is None or call.op != answer.op:
            return False
        if answer.outcome is PagerOutcome.MOVED:
            if call.moves:
                self.moved_s = clock.now_s()
            self.report = call.moved(self.report, answer.bytes)
            outcome: Outcome = Moved(answer.bytes, call.elapsed_ns(answer))
        elif answer.outcome is PagerOutcome.LOST:
            self.report = _as(self.report, Residency.LOST)
            detail = answer.detail or f"The GPU memory of process {self.ref.pid} is lost."
            outcome = Lost(detail)
        else:
            outcome = refusal(answer, self.ref.pid)
        if call.action is PagerAction.PAGE_OUT:
            # Leave the memory to the driver after some page-outs in a row that failed by errors of
            # the driver. Other refusals (no time, no RAM) pass.
            failed = isinstance(outcome, Refused) and outcome.reason is Reason.DRIVER
            self.failed_moves = self.failed_moves + 1 if failed else 0
            if self.failed_moves >= FAILED_MOVES_MAX and self.objection is None:
                self.objection = OwnershipObjection(
                    GateOnly.REFUSED, getattr(outcome, "detail", "")
                )
        self._resolve(call, outcome)
        return True

    def _send(self, call: PagerCall) -> None:
        call.op, call.out_bytes = self.next_op(), self.report.paged_out_bytes
        call.sent_ns = clock.now_ns()
        if call.action is not PagerAction.YIELD:
            self.wants_context = False  # see WantLease; if the driver takes it again, it asks again
        assert self.connection is not None
        order = PagerDo(op=call.op, action=call.action, within_ns=call.left_ns)
        self.connection.send(order)
        call.later(call.left_ns / NS_PER_S + call.grace_s, self._overdue)

    def _overdue(self, call: PagerCall) -> None:
        if call is not self.call:
            return
        more_s = call.deadline_ns / NS_PER_S + call.grace_s - clock.now_s()
        if more_s > 0:  # it was sent after this timer was set
            call.later(more_s, self._overdue)
            return
        if call.op is not None and call.moves:
            # It may be in the middle of the move: only its answer tells the outcome.
            self.unanswered = call.op
        elif call.op is not None and self.connection is not None:
            # Its gate will open some time after a ``hold`` or ``free`` that timed out.
            if call.action is PagerAction.FREE:
                self.opening = call.op
            elif call.action is PagerAction.HOLD:
                # Queued behind the hold: once the library gets to it, it lets go at once.
                self.opening = self.next_op()
                free = PagerDo(op=self.opening, action=PagerAction.FREE, within_ns=0)
                self.connection.send(free)
            self.report = self._as_plausible(self.report)
        detail = f"Process {self.ref.pid} did not answer in time (stopped, perhaps)."
        self._resolve(call, Refused(Reason.LOCK_TIMEOUT, detail))

    def _give_up_if_away(self, call: PagerCall) -> None:
        if call is self.call and not self.connected:
            detail = f"Process {self.ref.pid} lost its connection to Kiwi."
            self._resolve(call, Refused(Reason.DRIVER, detail))

    def _resolve(self, call: PagerCall, outcome: Outcome) -> None:
        self.call = None
        self.going_out = self.going_out and self.unanswered is not None
        call.resolve(outcome)


def _as(report: LibraryReport, residency: Residency) -> LibraryReport:
    return replace(report, residency=residency)
