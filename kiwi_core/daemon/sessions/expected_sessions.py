"""Sessions that servers have announced and that have not joined yet, and a newcomer's wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kiwi_core import clock
from kiwi_core.errors import CallerError
from kiwi_core.gpu import processes
from kiwi_core.units import NS_PER_MS, NS_PER_S, ns_to_seconds, seconds_to_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from kiwi_core.daemon.base.peers import Peer
    from kiwi_core.daemon.base.shares import Share
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.sched.scheduler import Scheduler
    from kiwi_core.wire.messages import Expect

FOR_MAX_S: Final = 24 * 3600.0
"""Longest time that a session can be expected: a notebook that is opened and not used for a day."""

KEY_MAX: Final = 128
"""Longest key, characters: the id of a kernel has 36."""

SOON_NS: Final = 10 * NS_PER_S
"""A session expected since less than this counts as one that asks at once: many kernels that are
started together (a batch, a restarted server) spread over the GPUs. Later it only counts where
waits are equal: its user reads or types."""

KEPT_NS: Final = 250 * NS_PER_MS
"""How long a newcomer's wait is reused while nobody begins or ends anything: many readers of the
status ask at the same time."""


@dataclass
class _Expected:
    """A program that was announced, at ``since_ns``. It counts as expected until ``until_ns``."""

    since_ns: int
    until_ns: int
    process: ProcessRef | None
    """The program, or before it runs its announcer: the announcement ends with that process.
    ``None``: the daemon cannot see it."""
    runs: bool
    """True if ``process`` is the program."""
    name: str
    outside: bool = False
    """True once it was seen to use the GPU outside Kiwi, where it counts from then on."""


@dataclass(eq=False, repr=False)
class ExpectedSessions:
    """A program that runs is known by its process as well as by its key: one of an environment
    without Kiwi never says its key. It stays known, and is called by its name, as long as it lives.

    ``blind`` returns whether the GPU cannot be read.
    """

    _scheduler: Scheduler
    _share: Share
    _blind: Callable[[], bool]
    _programs: dict[tuple[int, str], _Expected] = field(default_factory=dict)
    """Announced sessions by user and key."""
    _computed: tuple[int, tuple[int, int], float | None] | None = None
    """The newcomer's wait: when it was computed, from which state, seconds."""

    def expect(self, announcer: Peer, message: Expect) -> None:
        """Raise ``CallerError``: "bad-setting" for a wrong time or key, "busy" where the user
        expects too many."""
        uid, key, for_s = announcer.uid, message.key, message.for_s
        if not 0 <= for_s <= FOR_MAX_S or not 0 < len(key) <= KEY_MAX:
            raise CallerError(
                "bad-setting",
                f"A session cannot be expected for {for_s} s with a key of {len(key)} characters.",
                f"Give 0 to {FOR_MAX_S:.0f} s and 1 to {KEY_MAX} characters.",
            )
        self.joined(uid, key)
        self._lapse()
        process = processes.ref_of(announcer.pid)
        if process is not None and message.pid:
            process = processes.child_of(process, message.pid)
            if process is None:
                return  # it has ended
        if not for_s:
            return
        if not self._share.may(uid):
            raise CallerError(
                "busy", "You have announced too many sessions.", "They lapse, or join, in time."
            )
        self._share.take(uid)
        now_ns = clock.now_ns()
        self._programs[uid, key] = _Expected(
            now_ns,
            now_ns + seconds_to_ns(for_s),
            process,
            process is not None and message.pid > 0,
            message.name,
        )

    def joined(self, uid: int, key: str) -> None:
        """Stop expecting a session, which has joined or will not come."""
        if self._programs.pop((uid, key), None) is not None:
            self._share.give_back(uid)

    def take(self, uid: int, family: Collection[ProcessRef]) -> tuple[str, str]:
        """Return the name and the key of the program that is one of ``family``, a process that
        joins and its ancestors, and stop expecting it. "": it was not announced."""
        for (owner, key), program in list(self._programs.items()):
            if owner == uid and program.runs and program.process in family:
                self.joined(owner, key)
                return program.name, key
        return "", ""

    def names_outside(self, pids: Iterable[int]) -> dict[int, str]:
        """Return the names of programs among ``pids``, which use the GPU outside Kiwi. Those that
        were expected count there from now on."""
        self._lapse()
        running = {one.process: one for one in self._programs.values() if one.runs and one.process}
        names = {}
        for pid in pids if running else ():
            ref = processes.ref_of(pid)
            family = (ref, *processes.ancestors(ref)) if ref is not None else ()
            program = next((running[one] for one in family if one in running), None)
            if program is not None:
                program.outside = True
                names[pid] = program.name
        return names

    def count(self) -> int:
        return len(self._awaited())

    def newcomer_wait_s(self) -> float | None:
        """Return the wait of a newcomer that comes after the sessions expected to ask at once;
        ``None``: not known, or the GPU cannot be read."""
        if self._blind():
            return None
        now_ns = clock.now_ns()
        soon = sum(program.since_ns > now_ns - SOON_NS for program in self._awaited())
        of = soon, self._scheduler.history_serial
        if (
            self._computed is None
            or self._computed[1] != of
            or now_ns - self._computed[0] > KEPT_NS
        ):
            wait_ns = self._scheduler.newcomer_wait_ns(now_ns, soon)
            self._computed = now_ns, of, None if wait_ns is None else ns_to_seconds(wait_ns)
        return self._computed[2]

    def _awaited(self) -> list[_Expected]:
        self._lapse()
        now_ns = clock.now_ns()
        return [one for one in self._programs.values() if now_ns < one.until_ns and not one.outside]

    def _lapse(self) -> None:
        now_ns = clock.now_ns()
        # One server announces all its kernels: each process is looked at once.
        named = {program.process for program in self._programs.values()} - {None}
        ended = {process for process in named if process and not processes.alive(process)}
        for who, program in list(self._programs.items()):
            over = program.until_ns <= now_ns and not program.runs
            if over or program.process in ended:
                self.joined(*who)
