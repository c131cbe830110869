"""The loop: feeds the scheduler events as the daemon does, performs its actions in virtual time.

Like the daemon, it reads a session's memory before it reports the end of a burst, reads the
runners' memory now and then (it omits readings that cannot show anything new), sends
``DeadlinePassed`` at the scheduler's next deadline, and reports late operations as overdue.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import Grant, Operation, PageIn, PageOut, Suspend
from kiwi_core.simulate.compute import NEVER_NS, Compute
from kiwi_core.simulate.driver import CallVerdict, SimulatedDriver, outcome_of
from kiwi_core.simulate.measure import Measures
from kiwi_core.simulate.model import NO_FAULTS, RESTART_NS
from kiwi_core.simulate.policies import scheduler_for
from kiwi_core.simulate.process import BurstPhase, SimulatedProcess
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.sched.actions import Action
    from kiwi_core.simulate.driver import Flight
    from kiwi_core.simulate.model import FaultRates, Setup, SimulatedMachine
    from kiwi_core.simulate.trace import Cell, SessionTrace, Trace
    from kiwi_core.units import SessionId

TOUCH_NS: Final = NS_PER_S
"""A cell that changes the session's memory does so after this much work (or after half of its work,
if that is less)."""


class Simulation:
    """The simulation of one GPU. ``record`` gets every call of the scheduler (a journal); with
    ``checks`` the scheduler recomputes its derived values after each event."""

    def __init__(
        self,
        trace: Trace,
        machine: SimulatedMachine,
        setup: Setup,
        *,
        seed: int = 0,
        faults: FaultRates = NO_FAULTS,
        checks: bool = False,
        record: Callable[[int, ev.Event, list[Action]], None] | None = None,
    ) -> None:
        self.scheduler: Final = scheduler_for(machine, setup, checks)
        self.measures: Final = Measures([session.user for session in trace.sessions])
        self.now_ns = 0
        self.free_bytes = machine.total_bytes
        self.compute: Final = Compute(machine.contention)
        self._sessions = list(trace.sessions)
        self._machine = machine
        self._config = setup.config
        self._seed = seed
        self._kill = faults.kill
        self._driver = SimulatedDriver(machine, faults, setup.config.lock_timeout_ns)
        self._record = record
        self._procs: dict[SessionId, SimulatedProcess] = {}
        self._begun = 0
        """The number of sessions whose start is scheduled."""
        self._heap: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._seq = 0
        self.unfinished = 0
        self._wanting = 0
        """The number of processes that wait or run."""
        self._wanting_since_ns = 0
        self._look_due = False
        """Whether a reading of the runners' memory is scheduled."""
        self._read_anew_ns = -1
        """When all memory was last read because nothing else was due."""

    def run(self) -> Measures:
        """Run until the last cell has ended. Raise ``CallerError("stalled")`` if no session can
        ever go on (too little system RAM for the memory to be paged out)."""
        self.begin()
        while self.unfinished:
            self.step()
        return self.result()

    def result(self) -> Measures:
        """Return the measures, once nothing more is to be simulated."""
        self.measures.given_ns = self.compute.given_ns
        self.measures.busy_ns = self.compute.busy_ns
        return self.measures

    def begin(self) -> None:
        """Report the empty GPU, and schedule the start of each session."""
        self._tell(ev.MemoryObserved(free_bytes=self.free_bytes))
        for session in self._sessions:
            self._schedule(session)

    def add(self, session: SessionTrace) -> None:
        """Add a session that starts at ``starts_ns``, which is not in the past."""
        self._sessions.append(session)
        self.measures.users.append(session.user)
        self._schedule(session)

    def _schedule(self, session: SessionTrace) -> None:
        index = self._begun
        self._begun += 1
        if session.cells:
            self.unfinished += 1
            proc = SimulatedProcess(session.id, index, session.cells, f"{self._seed}/{session.id}")
            self._at(session.starts_ns, self._join, proc)

    # --- time -----------------------------------------------------------------------------------

    def _at(self, at_ns: int, what: Callable[..., None], *arguments: object) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (at_ns, self._seq, what, arguments))

    @property
    def next_ns(self) -> int:
        """When the next step is due; ``NEVER_NS``: nothing happens unless a session is added."""
        wake_ns = self.scheduler.next_deadline_ns()
        next_ns = min(self.compute.next_end_ns, NEVER_NS if wake_ns is None else wake_ns)
        return min(next_ns, self._heap[0][0]) if self._heap else next_ns

    @property
    def processes(self) -> int:
        """The number of processes that live now."""
        return len(self._procs)

    def step(self) -> None:
        """Perform the next step. Of several at the same time, scheduled calls come first, then work
        that ends, and the scheduler's own deadline last."""
        heap = self._heap
        next_ns = heap[0][0] if heap else NEVER_NS
        end_ns = self.compute.next_end_ns
        wake_ns = self.scheduler.next_deadline_ns()
        if next_ns <= end_ns and (wake_ns is None or next_ns <= wake_ns):
            if next_ns == NEVER_NS:
                # A daemon reads the memory again and again: what it read while a call hung is old.
                if self._read_anew_ns == self.now_ns:
                    raise self._stalled()
                self._read_anew_ns = self.now_ns
                self._tell(self._seen({p.id: p.resident_bytes for p in self._procs.values()}))
                return
            self.now_ns, _, what, arguments = heapq.heappop(heap)
            what(*arguments)
        elif wake_ns is None or end_ns <= wake_ns:
            self.now_ns = end_ns
            proc = self.compute.take_ended(end_ns)
            _, then = proc.milestones.pop()
            then(proc)
        else:
            self.now_ns = wake_ns
            self._tell(ev.DeadlinePassed())

    def _stalled(self) -> CallerError:
        view = self.scheduler.view(self.now_ns)
        why = next((entry.detail for entry in view.queue if entry.detail), "nobody knows why")
        return CallerError(
            "stalled",
            f"After {self.now_ns / NS_PER_S:.0f} simulated seconds nobody can go on: {why}.",
            "Give the simulated machine more system RAM, or use smaller footprints.",
        )

    def _tell(self, event: ev.Event) -> None:
        actions = self.scheduler.handle(event, self.now_ns)
        self.measures.events += 1
        if self._record is not None:
            self._record(self.now_ns, event, actions)
        for action in actions:
            if isinstance(action, Grant):
                self._granted(action)
            elif isinstance(action, Operation):
                self._start(action)

    # --- notebooks ------------------------------------------------------------------------------

    def _join(self, proc: SimulatedProcess) -> None:
        self._procs[proc.id] = proc
        self._tell(ev.SessionJoined(session=proc.id, owner=self.measures.users[proc.index]))
        self._tell(self._seen({proc.id: 0}))
        self._think(proc)

    def _think(self, proc: SimulatedProcess) -> None:
        """Schedule the next cell's first GPU statement; after the last cell, the session's end."""
        if proc.next_cell == len(proc.cells):
            self.unfinished -= 1
            leaves_ns = self._sessions[proc.index].leaves_ns
            if leaves_ns is not None:
                self._at(self.now_ns + leaves_ns, self._leave, proc)
            return
        cell = proc.cells[proc.next_cell]
        self._at(self.now_ns + cell.think_ns + cell.cpu_ns, self._ask, proc)

    def _leave(self, proc: SimulatedProcess) -> None:
        if proc.flight is not None:  # the operation must report before the process ends
            self._at(proc.flight.ends_ns, self._leave, proc)
            return
        self._gone(proc)

    def _gone(self, proc: SimulatedProcess) -> None:
        del self._procs[proc.id]
        self.free_bytes += proc.resident_bytes
        self._tell(ev.SessionLost(session=proc.id))

    def _ask(self, proc: SimulatedProcess) -> None:
        proc.burst += 1
        proc.phase = BurstPhase.WAITING
        proc.asked_ns = self.now_ns
        if not self._wanting:
            self._wanting_since_ns = self.now_ns
        self._wanting += 1
        self._tell(ev.LeaseRequested(session=proc.id, burst=proc.burst))

    def _granted(self, action: Grant) -> None:
        proc = self._procs[action.session]
        if proc.phase is BurstPhase.WAITING and action.burst == proc.burst:
            proc.phase = BurstPhase.RUNNING
            proc.granted_ns = self.now_ns
            self._begin_cell(proc, proc.cells[proc.next_cell])

    def _begin_cell(self, proc: SimulatedProcess, cell: Cell) -> None:
        pieces: list[tuple[float, Callable[[SimulatedProcess], None]]] = [
            (cell.gpu_ns, self._finished)
        ]
        if cell.peak_bytes != proc.resident_bytes:
            pieces.append((min(TOUCH_NS, cell.gpu_ns // 2), self._touch))
        if self._kill and proc.rng.random() < self._kill:
            pieces.append((int(cell.gpu_ns * proc.rng.random()), self._killed))
        pieces.sort(key=_offset)
        proc.milestones = [
            (at - (pieces[number - 1][0] if number else 0), what)
            for number, (at, what) in enumerate(pieces)
        ][::-1]
        self._go_on(proc)

    def _go_on(self, proc: SimulatedProcess) -> None:
        self.compute.begin(proc, proc.milestones[-1][0], self.now_ns)

    def _touch(self, proc: SimulatedProcess) -> None:
        """Let the cell allocate or free memory. Without room a real cell would fail; here it is
        counted and goes on with the memory it has, so that the work stays the same."""
        more_bytes = proc.cells[proc.next_cell].peak_bytes - proc.resident_bytes
        if more_bytes > self.free_bytes:
            self.measures.out_of_memory += 1
        else:
            self.free_bytes -= more_bytes
            proc.resident_bytes += more_bytes
            self._look_later()
        self._go_on(proc)

    def _continue(self, proc: SimulatedProcess) -> None:
        """Let ``proc`` compute if it is not held and has work to do."""
        idle = proc.phase is BurstPhase.RUNNING and proc not in self.compute
        if idle and not proc.held:
            self._go_on(proc)

    def _finished(self, proc: SimulatedProcess) -> None:
        cell = proc.cells[proc.next_cell]
        self.measures.cell(proc.index, cell.gpu_ns, proc.asked_ns, proc.granted_ns, self.now_ns)
        self._over(proc)
        self._at(self.now_ns + self._machine.look_ns, self._burst_over, proc, proc.burst)
        self._think(proc)

    def _over(self, proc: SimulatedProcess) -> None:
        proc.phase = BurstPhase.THINKING
        proc.next_cell += 1
        self._wanting -= 1
        if not self._wanting:
            self.measures.wanted_ns += self.now_ns - self._wanting_since_ns

    def _burst_over(self, proc: SimulatedProcess, burst: int) -> None:
        # A request for the next burst has ended this one already.
        if proc.burst == burst and proc.id in self._procs:
            if proc.flight is None:
                self._tell(self._seen({proc.id: proc.resident_bytes}))
            self._tell(ev.BurstEnded(session=proc.id, burst=burst))

    def _killed(self, proc: SimulatedProcess) -> None:
        """End ``proc`` in mid-cell; its user starts a new kernel and runs the next cell."""
        lost_ns = sum(piece_ns for piece_ns, _ in proc.milestones)
        self.measures.killed += 1
        self.measures.killed_work_ns += lost_ns
        self._over(proc)
        self._gone(proc)
        name, _, number = str(proc.id).partition("+")
        heir = SimulatedProcess(f"{name}+{int(number or 0) + 1}", proc.index, proc.cells, "")
        heir.rng, heir.next_cell = proc.rng, proc.next_cell
        self._at(self.now_ns + RESTART_NS, self._join, heir)

    # --- looks ----------------------------------------------------------------------------------

    def _look_later(self) -> None:
        if not self._look_due:
            self._look_due = True
            self._at(self.now_ns + self._config.observe_interval_ns, self._look)

    def _look(self) -> None:
        self._look_due = False
        resident = {
            proc.id: proc.resident_bytes
            for proc in map(self._procs.__getitem__, self.scheduler.holders)
            if proc.flight is None
        }
        self._tell(self._seen(resident))

    def _seen(self, resident: dict[SessionId, int]) -> ev.MemoryObserved:
        return ev.MemoryObserved(free_bytes=self.free_bytes, resident_bytes=resident)

    # --- operations -----------------------------------------------------------------------------

    def _start(self, action: Operation) -> None:
        proc = self._procs[action.session]
        held, moved_bytes = proc.held, 0
        if isinstance(action, (Suspend, PageOut)):
            if proc in self.compute:
                left_ns = self.compute.stop(proc, self.now_ns)
                proc.milestones[-1] = (left_ns, proc.milestones[-1][1])
                self.measures.suspensions += 1
            proc.held = True
        if isinstance(action, PageOut):
            moved_bytes = proc.resident_bytes
        elif isinstance(action, PageIn):
            moved_bytes = proc.host_bytes
        flight = self._driver.start(
            action, moved_bytes, self.free_bytes, held, proc.rng, self.now_ns
        )
        if isinstance(action, PageIn) and flight.verdict is CallVerdict.DONE:
            self.free_bytes -= moved_bytes
        proc.flight = flight
        self._at(flight.ends_ns, self._land, proc, flight)
        if flight.is_overdue:
            self._at(action.deadline_ns, self._tell, ev.OperationOverdue(op=action.op))

    def _land(self, proc: SimulatedProcess, flight: Flight) -> None:
        proc.flight = None
        action, counts = flight.action, self.measures.operations
        if flight.verdict is CallVerdict.DONE:
            counts[type(action).__name__] += 1
            counts["hangs"] += flight.hangs
            self._take_effect(proc, flight)
        else:
            counts[flight.verdict.value] += 1
            proc.held = flight.was_held
        self._continue(proc)
        self._tell(outcome_of(flight, proc.resident_bytes, proc.host_bytes))

    def _take_effect(self, proc: SimulatedProcess, flight: Flight) -> None:
        moved_bytes = flight.moved_bytes
        if isinstance(flight.action, PageOut):
            proc.resident_bytes -= moved_bytes
            proc.host_bytes += moved_bytes
            self.free_bytes += moved_bytes
        elif isinstance(flight.action, PageIn):
            proc.resident_bytes += moved_bytes
            proc.host_bytes -= moved_bytes
            proc.held = False
        else:
            proc.held = isinstance(flight.action, Suspend)
        if moved_bytes:
            self.measures.moved(moved_bytes, flight.ends_ns - flight.began_ns)


def _offset(piece: tuple[float, Callable[[SimulatedProcess], None]]) -> float:
    return piece[0]
