"""The journal, which records a scheduler's events and answers, and its replay.

A journal is NDJSON: one header, then one entry per event. A scheduler's answers depend only on
these, so a journal is a bug report that can be replayed, shrunk and kept as a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from kiwi_core.config import Config
from kiwi_core.errors import CallerError
from kiwi_core.sched import events as ev
from kiwi_core.sched.actions import (
    Action,
    BringResidueBack,
    Grant,
    Notify,
    PageIn,
    PageOut,
    Resume,
    RoomDenied,
    RoomMade,
    Suspend,
)
from kiwi_core.sched.scheduler import Scheduler
from kiwi_core.states import AntiThrash
from kiwi_core.units import NS_PER_S, format_bytes, format_duration_s

if TYPE_CHECKING:
    from kiwi_core.sched.events import Event
    from kiwi_core.units import SessionId

JOURNAL_VERSION: Final = 1


class JournalHeader(Struct, frozen=True, kw_only=True, tag="header", tag_field="journal"):
    """The arguments that the scheduler was made with. The daemon writes it as the first line."""

    version: int = JOURNAL_VERSION
    total_bytes: int
    tq_ns: int
    anti_thrash: AntiThrash
    host_budget_bytes: int
    gpu_uuid: str
    wall_time_s: float
    """The start in seconds since the epoch, for readers only."""
    first_op: int
    config: Config
    policy: str = "round-robin"
    """Journals from before there were policies lack this field."""
    continued: bool = False
    """Whether the scheduler of the previous header continues: its file was full, or
    ``lost_entries`` lines could not be written at this place."""
    lost_entries: int = 0

    def scheduler(self, *, checks: bool = False) -> Scheduler:
        """Return a new scheduler made with these arguments."""
        return Scheduler(
            self.total_bytes,
            config=self.config,
            tq_ns=self.tq_ns,
            anti_thrash=self.anti_thrash,
            host_budget_bytes=self.host_budget_bytes,
            first_op=self.first_op,
            policy=self.policy,
            checks=checks,
        )


class JournalEntry(Struct, frozen=True, kw_only=True, tag="entry", tag_field="journal"):
    """One call of ``Scheduler.handle``."""

    now_ns: int
    event: ev.Event
    actions: list[Action]


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[JournalHeader | JournalEntry]] = msgspec.json.Decoder(
    JournalHeader | JournalEntry
)


def encode_line(record: JournalHeader | JournalEntry) -> bytes:
    """Return ``record`` as a line, with its newline."""
    return _ENCODER.encode(record) + b"\n"


def decode_line(line: bytes) -> JournalHeader | JournalEntry:
    """Decode a line of a journal of this version. Raise ``CallerError`` for any other line."""
    try:
        record = _DECODER.decode(line)
    except msgspec.MsgspecError as error:
        raise CallerError(
            "bad-journal",
            f"This is not a line of a journal: {error}.",
            "A last line cut short (the daemon was killed) may be left out.",
        ) from error
    if isinstance(record, JournalHeader) and record.version != JOURNAL_VERSION:
        raise CallerError(
            "bad-journal",
            f"The journal has version {record.version}, this Kiwi reads {JOURNAL_VERSION}.",
            "Replay it with the Kiwi that wrote it.",
        )
    return record


class MovedBytes:
    """Computes how many bytes each move of a journal moved, without a scheduler: its beginning may
    be missing. It must see every move of every session, in order.

    Where the driver pages out what a library had left, the page-out reports all bytes that are out
    by then (all of them have to come back), so a plain sum would count the first page-out twice.
    """

    def __init__(self) -> None:
        self._out: dict[SessionId, int] = {}
        """Bytes that each session has in system RAM."""

    def of(self, session: SessionId, event: ev.PagedOut | ev.PagedIn | ev.ResidueBack) -> int:
        """Return how many bytes this move moved."""
        before_bytes = self._out.pop(session, 0)
        if isinstance(event, ev.ResidueBack):
            self._out[session] = max(0, before_bytes - event.moved_bytes)
        if not isinstance(event, ev.PagedOut):
            return event.moved_bytes
        self._out[session] = max(before_bytes, event.moved_bytes)
        return max(0, event.moved_bytes - before_bytes)


@dataclass(frozen=True)
class ReplayLine:
    at_ns: int
    """Time since the first event."""
    text: str
    differs: bool = False
    """Whether the scheduler's answer differs from the journal's."""

    def __str__(self) -> str:
        mark = "!!" if self.differs else "  "
        return f"{mark}{self.at_ns / NS_PER_S:12.3f} s  {self.text}"


class Replay:
    """Feeds entries to a fresh scheduler and describes in words what happens.

    Where the beginning of the journal is missing (``checked`` is false), no scheduler can know the
    earlier events; then the replay only describes the recorded answers.
    """

    def __init__(self, header: JournalHeader, checks: bool = True) -> None:
        self.checked: Final = not header.continued
        self.scheduler: Final = header.scheduler(checks=checks)
        self.differences = 0
        self._start_ns: int | None = None

    def feed(self, entry: JournalEntry) -> list[ReplayLine]:
        if self._start_ns is None:
            self._start_ns = entry.now_ns
        at_ns = entry.now_ns - self._start_ns
        actions = entry.actions
        if self.checked:
            actions = self.scheduler.handle(entry.event, entry.now_ns)
        event_text = describe_event(entry.event)
        lines = [ReplayLine(at_ns, event_text)] if event_text or actions else []
        lines += [ReplayLine(at_ns, f"  → {describe_action(action)}") for action in actions]
        if actions != entry.actions:
            self.differences += 1
            recorded = "; ".join(map(describe_action, entry.actions)) or "nothing"
            lines.append(ReplayLine(at_ns, f"  ≠ the journal says: {recorded}", differs=True))
        return lines


def goes_on(header: JournalHeader) -> bool:
    """Return whether ``header`` continues the records before it without a gap (the files of one
    journal were joined in order), so that the replay can go on with the same scheduler."""
    return header.continued and not header.lost_entries


def describe_event(event: Event) -> str:
    """Return ``event`` in words; "" for what is observed all the time, and timers."""
    if isinstance(event, (ev.MemoryObserved, ev.HostBudgetObserved, ev.DeadlinePassed)):
        return ""
    if isinstance(event, (ev.PagedOut, ev.PagedIn, ev.ResidueBack)):
        verb = _MOVED[type(event)]
        took = _seconds(event.elapsed_ns)
        return f"#{event.op} {verb} {format_bytes(event.moved_bytes)} in {took}"
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    who = fields.pop("session", None) or f"#{fields.pop('op', '')}".rstrip("#")
    rest = ", ".join(f"{name} {_plain(value)}" for name, value in fields.items() if value)
    return f"{who} {_words(type(event).__name__)}".strip() + (f" ({rest})" if rest else "")


def describe_action(action: Action) -> str:
    why = f" ({action.cause})" if action.cause else ""
    if isinstance(action, Grant):
        text = f"grant {action.session} burst {action.burst} for {_seconds(action.quantum_ns)}"
    elif isinstance(action, Notify):
        detail = f": {action.detail}" if action.detail else ""
        text = f"tell {action.session} {action.notice.value}{detail}"
    elif isinstance(action, RoomMade):
        text = f"room for {action.session}, request {action.request}"
    elif isinstance(action, RoomDenied):
        text = f"no room for {action.session}, request {action.request}: {action.detail}"
    else:
        text = f"#{action.op} {_ORDERS[type(action)]} {action.session}"
    return text + why


_MOVED: Final[dict[type, str]] = {
    ev.PagedOut: "paged out",
    ev.PagedIn: "paged in",
    ev.ResidueBack: "brought back the contexts:",
}

_ORDERS: Final[dict[type, str]] = {
    Suspend: "suspend",
    Resume: "resume",
    PageOut: "page out",
    PageIn: "page in",
    BringResidueBack: "bring back the contexts of",
}


def _words(name: str) -> str:
    """``LeaseRequested`` → ``lease requested``."""
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


def _plain(value: object) -> str:
    return str(getattr(value, "value", value))


def _seconds(duration_ns: int) -> str:
    return format_duration_s(duration_ns / NS_PER_S)
