"""A small language for scenarios: events second by second, and the scheduler's actions.

A scenario is a text file. A line that begins with a time (seconds) has the events; the indented
lines with an arrow below it are all actions of the scheduler, in order; ``?`` lines read the view
as users do: a wait in the queue is the forecast, in words. ``#`` begins a comment. Sizes are GiB.
See ``tests/sched/scenarios/``.

    gpu 10 tq=30 mode=on ram=64 policy=round-robin end=0   the machine; must be the first line
    1  a asks 1
       → grant a burst 1 for 30 s (nobody in the way)
       ? a running, holders a, queue -

``python tests/sched/world.py FILE …`` writes the answers of the present scheduler into the files,
for review.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_core.config import DEFAULTS
from kiwi_core.sched import actions as act
from kiwi_core.sched import events as ev
from kiwi_core.sched.replay import describe_action
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash, Priority, Reason, Residency
from kiwi_core.units import GIB, NS_PER_S, OpId, SessionId
from kiwi_core.wire.words import format_wait_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_core.sched.view import QueueView

SCENARIOS = Path(__file__).parent / "scenarios"


def gib(text: str) -> int:
    return round(float(text) * GIB)


class World:
    """One scheduler, fed in words. Ordinary tests use it, too: ``world.do(1, "a asks 1")``."""

    def __init__(self, line: str = "gpu 10") -> None:
        _, total, *settings = line.split()
        chosen = dict(setting.split("=") for setting in settings)
        self.total_bytes = gib(total)
        config = replace(
            DEFAULTS,
            lingering_idle_ns=3 * NS_PER_S,
            tenancy_trips=float(chosen.get("tenancy", "0")),
        )
        self.scheduler = Scheduler(
            self.total_bytes,
            config=config,
            tq_ns=round(float(chosen.get("tq", "30")) * NS_PER_S),
            anti_thrash=AntiThrash(chosen.get("mode", "on")),
            host_budget_bytes=gib(chosen.get("ram", "64")),
            policy=chosen.get("policy", "round-robin"),
            checks=True,
        )
        self.orders: dict[OpId, act.Operation] = {}
        self.now_ns = 0

    def do(self, at_s: float, words: str) -> list[str]:
        """Feed the events at ``at_s``, separated by ``;``, and return the actions in words."""
        self.now_ns = round(at_s * NS_PER_S)
        answers: list[str] = []
        for part in words.split(";"):
            actions = self.scheduler.handle(self.event(part.split()), self.now_ns)
            self.orders.update({a.op: a for a in actions if isinstance(a, act.Operation)})
            answers += map(describe_action, actions)
        return answers

    def announce_until(self, at_s: float) -> None:
        """Forecast as often as the daemon does while somebody waits: after each event, then every
        second. Each forecast depends on those that users have read before."""
        for at_ns in range(self.now_ns, round(at_s * NS_PER_S), NS_PER_S):
            if not self.scheduler.waiting:
                return
            self.scheduler.view(at_ns, ahead=True)

    def event(self, words: list[str]) -> ev.Event:
        subject, *rest = words
        if subject.startswith("#"):
            return self.outcome(OpId(int(subject[1:])), rest)
        if subject in _MACHINE:
            return _MACHINE[subject](self, rest)
        verb, *rest = rest
        return _SESSION[verb](SessionId(subject), rest)

    def outcome(self, op: OpId, words: list[str]) -> ev.Event:
        verb, *rest = words
        if verb in _MOVED:
            kind = _MOVED[verb]
            elapsed_ns = round(float(rest[1].rstrip("s")) * NS_PER_S)
            more = {f"{name}_bytes": gib(size) for name, size in (w.split("=") for w in rest[2:])}
            return kind(op=op, moved_bytes=gib(rest[0]), elapsed_ns=elapsed_ns, **more)
        if verb == "refuses":
            refusal = _REFUSALS[type(self.orders[op])]
            return refusal(op=op, reason=Reason(rest[0]), detail=" ".join(rest[1:]))
        if verb == "loses":
            lost = ev.PageOutLost if isinstance(self.orders[op], act.PageOut) else ev.PageInLost
            return lost(op=op, detail=" ".join(rest))
        return {
            "held": ev.Suspended(op=op, resident_bytes=gib(rest[0]) if rest else None),
            "resumed": ev.Resumed(op=op),
            "overdue": ev.OperationOverdue(op=op),
        }[verb]

    def memory(self, words: list[str]) -> ev.Event:
        """Parse ``memory a=6 b=1 outside=2 busy=a idle=b large=a owned=ab taken=c:0.5 at=3``. All
        other memory is free."""
        resident: dict[SessionId, int] = {}
        busy: dict[SessionId, bool] = {}
        at_large: list[SessionId] = []
        owned: list[SessionId] = []
        taken: dict[SessionId, int] = {}
        outside = 0
        began_ns = None
        for word in words:
            name, value = word.split("=")
            if name == "outside":
                outside = gib(value)
            elif name == "at":
                began_ns = round(float(value) * NS_PER_S)
            elif name == "large":
                at_large.append(SessionId(value))
            elif name == "owned":
                owned += map(SessionId, value)
            elif name == "taken":
                who, _, size = value.partition(":")
                taken[SessionId(who)] = gib(size)
                resident[SessionId(who)] = 0
            elif name in ("busy", "idle"):
                busy[SessionId(value)] = name == "busy"
            else:
                resident[SessionId(name)] = gib(value)
        free = self.total_bytes - sum(resident.values()) - outside
        return ev.MemoryObserved(
            free_bytes=free,
            resident_bytes=resident,
            busy=busy,
            at_large=at_large,
            owned=owned,
            taken=taken,
            began_ns=began_ns,
        )

    def look(self, words: str) -> str:
        """Return ``a, holders, queue, serialised, wake, …`` with the present values filled in."""
        view = self.scheduler.view(self.now_ns)
        seen = []
        for part in words.split(","):
            name = part.split()[0]
            seen.append(f"{name} {_LOOKS[name](self)}" if name in _LOOKS else _session(view, name))
        return ", ".join(seen)


def _session(view: object, name: str) -> str:
    session = view.session(SessionId(name))  # type: ignore[attr-defined]
    if session is None:
        return f"{name} unknown"
    problem = session.record.problem
    blocked = f" [{problem.value}]" if problem else ""
    return f"{name} {session.state.value}{blocked}"


def _queue(world: World) -> str:
    """Return each waiter and its wait as users read it; ``?``: they read no figure."""
    entries = world.scheduler.view(world.now_ns, ahead=True).queue
    return "; ".join(f"{entry.session} {_wait(entry)}" for entry in entries) or "-"


def _history(world: World) -> str:
    """Return entries like ``a:held@1-3`` (from 1 s to 3 s). ``*``: due to a hint; ``!``: failed."""
    told = []
    for e in world.scheduler.history(0, world.now_ns):
        marks = "*" * e.hinted + "!" * (not e.ok)
        ended = "" if e.ended_ns is None else f"{e.ended_ns / NS_PER_S:g}"
        told.append(f"{e.session}:{e.kind.value}{marks}@{e.began_ns / NS_PER_S:g}-{ended}")
    return " ".join(told) or "-"


def _wait(entry: QueueView) -> str:
    if entry.blocked is not None and entry.expected_wait_ns is None:
        return entry.blocked.value
    held_up = f"{entry.blocked.value} " if entry.blocked is not None else ""
    waits_ns = entry.expected_wait_ns, entry.expected_low_ns, entry.expected_high_ns
    expected_s, low_s, high_s = (None if ns is None else ns / NS_PER_S for ns in waits_ns)
    if expected_s is None:
        return "?"
    return held_up + format_wait_s(expected_s, low_s, high_s, entry.expected_why)


def _newcomer(world: World) -> str:
    wait_ns = world.scheduler.newcomer_wait_ns(world.now_ns)
    return "?" if wait_ns is None else format_wait_s(wait_ns / NS_PER_S)


def _wake(world: World) -> str:
    deadline_ns = world.scheduler.next_deadline_ns()
    return "never" if deadline_ns is None else f"{deadline_ns / NS_PER_S:g}"


_LOOKS: dict[str, Callable[[World], str]] = {
    "holders": lambda w: " ".join(w.scheduler.view(w.now_ns).holders) or "-",
    "queue": _queue,
    "serialised": lambda w: "yes" if w.scheduler.view(w.now_ns).serialised else "no",
    "wake": _wake,
    "newcomer": _newcomer,
    "outside": lambda w: f"{w.scheduler.view(w.now_ns).outside_bytes / GIB:g}",
    "ram": lambda w: f"{w.scheduler.view(w.now_ns).paged_out_bytes / GIB:g}",
    "history": lambda w: _history(w),
    "ignored": lambda w: str(w.scheduler.view(w.now_ns).ignored_events),
}

_MOVED = {"out": ev.PagedOut, "in": ev.PagedIn, "back": ev.ResidueBack}

_REFUSALS = {
    act.Suspend: ev.SuspendRefused,
    act.Resume: ev.ResumeFailed,
    act.PageOut: ev.PageOutRefused,
    act.PageIn: ev.PageInRefused,
    act.BringResidueBack: ev.ResidueRefused,
}

_MACHINE: dict[str, Callable[[World, list[str]], ev.Event]] = {
    "memory": World.memory,
    "ram": lambda _, words: ev.HostBudgetObserved(budget_bytes=gib(words[0])),
    "tq": lambda _, words: ev.SettingsChanged(tq_ns=round(float(words[0]) * NS_PER_S)),
    "mode": lambda _, words: ev.SettingsChanged(anti_thrash=AntiThrash(words[0])),
    "policy": lambda _, words: ev.SettingsChanged(policy=words[0]),
    "time": lambda _world, _words: ev.DeadlinePassed(),
}


def _joins(session: SessionId, words: list[str]) -> ev.Event:
    """Parse ``joins``, ``joins paged-out 6``, ``joins locked 6 mid 3`` (in mid-burst, burst 3), and
    ``joins of bob``."""
    owner = ""
    if "of" in words:
        owner, words = words[words.index("of") + 1], words[: words.index("of")]
    residency = Residency(words[0]) if words else Residency.RESIDENT
    size = gib(words[1]) if len(words) > 1 else 0
    out = residency is Residency.PAGED_OUT
    return ev.SessionJoined(
        session=session,
        residency=residency,
        resident_bytes=0 if out else size,
        paged_out_bytes=size if out else 0,
        mid_burst="mid" in words,
        owner=owner,
        burst=int(words[-1]) if "mid" in words else 0,
    )


_SESSION: dict[str, Callable[[SessionId, list[str]], ev.Event]] = {
    "joins": _joins,
    "dies": lambda s, _: ev.SessionLost(session=s),
    "detaches": lambda s, _: ev.SessionDetached(session=s),
    "guarded": lambda s, _: ev.GuardChanged(session=s, guarded=True),
    "unguarded": lambda s, _: ev.GuardChanged(session=s, guarded=False),
    "stops": lambda s, words: ev.SessionStopped(session=s, why=" ".join(words)),
    "continues": lambda s, _: ev.SessionContinued(session=s),
    "releases": lambda s, _: ev.ReleaseRequested(session=s),
    "suspended": lambda s, words: ev.SuspensionRequested(session=s, by=" ".join(words)),
    "let": lambda s, _: ev.ResumptionRequested(session=s),
    "priority": lambda s, words: ev.PriorityChanged(session=s, priority=Priority(words[0])),
    "hinted": lambda s, _: ev.UseExpected(session=s),
    "stands": lambda s, _: ev.ResidueWanted(session=s),
    "asks": lambda s, words: ev.LeaseRequested(session=s, burst=int(words[0])),
    "withdraws": lambda s, words: ev.LeaseWithdrawn(session=s, burst=int(words[0])),
    "ends": lambda s, words: ev.BurstEnded(
        session=s,
        burst=int(words[0]),
        ended_ns=round(float(words[1]) * NS_PER_S) if words[1:] else None,
    ),
    "wants": lambda s, words: ev.RoomWanted(
        session=s, bytes=gib(words[0]), request=int(words[1]) if words[1:] else 1
    ),
    "unwants": lambda s, words: ev.RoomNoLongerWanted(session=s, request=int(words[0])),
    "lingers": lambda s, words: ev.BurstLingered(session=s, burst=int(words[0])),
}


def play(lines: Iterable[str]) -> list[str]:
    """Return the scenario with the present actions and views."""
    world: World | None = None
    played = []
    for raw in lines:
        line = raw.rstrip()
        words = line.split("#  ")[0].strip()
        if words.startswith("gpu"):
            world = World(words)
        elif world is not None and words[:1].isdigit():
            at, _, what = words.partition(" ")
            played.append(line)
            try:
                world.announce_until(float(at))
                played += [f"        → {answer}" for answer in world.do(float(at), what)]
            except LookupError as error:
                shown = "\n".join(played)
                raise ValueError(f"{shown}\n^ this makes no sense here: {error}") from error
            continue
        elif world is not None and words.startswith("?"):
            line = f"        ? {world.look(words[1:])}"
        elif words.startswith("→"):
            continue
        played.append(line)
    return played


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text("\n".join(play(path.read_text().splitlines())) + "\n")
