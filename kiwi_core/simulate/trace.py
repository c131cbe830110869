"""The work to simulate, and its file format.

A trace is JSON lines: one header, then each session followed by its cells in order. Sessions are
closed loops: a cell's think time begins at the end of the cell before it, so a policy that serves
cells sooner gets the next ones sooner, as in reality. ``docs/simulate.md`` documents the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from kiwi_core.errors import CallerError
from kiwi_core.units import NS_PER_S, ns_to_seconds, seconds_to_ns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TRACE_VERSION: Final = 1

LONGEST_S: Final = 366 * 24 * 3600.0
"""A time in a trace that is longer than a year is certainly a mistake."""


class Cell(Struct, frozen=True, kw_only=True, gc=False):
    """One cell that uses the GPU."""

    think_ns: int
    """Time from the end of the cell before (or the start of the session) to its start."""
    cpu_ns: int
    """Time from its start to the first statement that needs the GPU, without the lease."""
    gpu_ns: int
    """Time from then on if it is alone on the GPU: the time that it holds the lease."""
    peak_bytes: int
    """The GPU memory at its end, contexts included; the session keeps it until the next cell."""


class SessionTrace(Struct, frozen=True, kw_only=True):
    id: str
    user: str
    starts_ns: int
    """When the session joins."""
    cells: tuple[Cell, ...]
    leaves_ns: int | None = None
    """Time from the end of its last cell to the end of its process; ``None``: the process lives on
    and keeps its memory."""


class Trace(Struct, frozen=True, kw_only=True):
    name: str
    total_bytes: int
    """Size of the GPU that the trace was made for or recorded on."""
    sessions: tuple[SessionTrace, ...]
    recorded: Recorded | None = None


class Recorded(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine that a journal was recorded on. A speed of ``None``: nothing was moved."""

    tq_s: float
    anti_thrash: str
    policy: str = ""
    """The policy in force for most of the time; "": unknown."""
    host_budget_bytes: int
    out_gbps: float | None = None
    in_gbps: float | None = None


# --- the file -----------------------------------------------------------------------------------


class TraceHeader(Struct, frozen=True, kw_only=True, tag="header", tag_field="trace"):
    version: int = TRACE_VERSION
    name: str = ""
    total_bytes: int
    recorded: Recorded | None = None


class SessionLine(
    Struct, frozen=True, kw_only=True, tag="session", tag_field="trace", omit_defaults=True
):
    session: str
    user: str = ""
    """The session's user; "": unknown, and the session's name stands for it."""
    starts_s: float = 0.0
    leaves_s: float | None = None


class CellLine(Struct, frozen=True, kw_only=True, tag="cell", tag_field="trace"):
    """A cell of the session whose line came last."""

    think_s: float
    cpu_s: float = 0.0
    gpu_s: float
    bytes: int


_Line = TraceHeader | SessionLine | CellLine
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[_Line]] = msgspec.json.Decoder(_Line)


def to_lines(trace: Trace) -> Iterator[bytes]:
    """Yield the lines of the file, each with its newline."""
    yield _line(
        TraceHeader(name=trace.name, total_bytes=trace.total_bytes, recorded=trace.recorded)
    )
    for session in trace.sessions:
        yield _line(
            SessionLine(
                session=session.id,
                user=session.user,
                starts_s=ns_to_seconds(session.starts_ns),
                leaves_s=None if session.leaves_ns is None else ns_to_seconds(session.leaves_ns),
            )
        )
        for cell in session.cells:
            yield _line(
                CellLine(
                    think_s=ns_to_seconds(cell.think_ns),
                    cpu_s=ns_to_seconds(cell.cpu_ns),
                    gpu_s=ns_to_seconds(cell.gpu_ns),
                    bytes=cell.peak_bytes,
                )
            )


def _line(record: _Line) -> bytes:
    return _ENCODER.encode(record) + b"\n"


def from_lines(lines: Iterable[bytes]) -> Trace:
    """Return the trace. Raise ``CallerError("bad-trace")``, which names the line and its error."""
    reader = _Reader()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                reader.take(_DECODER.decode(line))
            except (msgspec.MsgspecError, ValueError) as error:
                raise _bad(f"Line {number} of the trace: {error}.") from error
    return reader.trace()


def _bad(message: str) -> CallerError:
    return CallerError("bad-trace", message, "The format is described in docs/simulate.md.")


class _Reader:
    def __init__(self) -> None:
        self._header: TraceHeader | None = None
        self._sessions: list[tuple[SessionLine, list[Cell]]] = []
        self._names: set[str] = set()

    def take(self, line: _Line) -> None:
        """Add ``line``. Raise ``ValueError`` with the error in words."""
        if isinstance(line, TraceHeader):
            self._begin(line)
        elif self._header is None:
            raise ValueError("the first line must be the header")
        elif isinstance(line, SessionLine):
            if line.session in self._names:
                raise ValueError(f"session {line.session!r} is there already")
            _within(line.starts_s, "starts_s")
            _within(line.leaves_s or 0.0, "leaves_s")
            self._names.add(line.session)
            self._sessions.append((line, []))
        elif not self._sessions:
            raise ValueError("a cell before the first session")
        else:
            self._sessions[-1][1].append(_cell(line, self._header.total_bytes))

    def _begin(self, header: TraceHeader) -> None:
        if self._header is not None:
            raise ValueError("a second header")
        if header.version != TRACE_VERSION:
            raise ValueError(f"version {header.version}; this Kiwi reads {TRACE_VERSION}")
        if header.total_bytes <= 0:
            raise ValueError("total_bytes must be more than 0")
        self._header = header

    def trace(self) -> Trace:
        if self._header is None:
            raise _bad("The trace is empty.")
        if not any(cells for _, cells in self._sessions):
            raise _bad("There is not one cell in the trace.")
        return Trace(
            name=self._header.name,
            total_bytes=self._header.total_bytes,
            recorded=self._header.recorded,
            sessions=tuple(
                SessionTrace(
                    id=line.session,
                    user=line.user or line.session,
                    starts_ns=seconds_to_ns(line.starts_s),
                    cells=tuple(cells),
                    leaves_ns=None if line.leaves_s is None else seconds_to_ns(line.leaves_s),
                )
                for line, cells in self._sessions
            ),
        )


def _cell(line: CellLine, total_bytes: int) -> Cell:
    for name, value_s in (("think_s", line.think_s), ("cpu_s", line.cpu_s), ("gpu_s", line.gpu_s)):
        _within(value_s, name)
    if not 0 <= line.bytes <= total_bytes:
        raise ValueError(f"bytes must be from 0 to the GPU's {total_bytes}, not {line.bytes}")
    return Cell(
        think_ns=round(line.think_s * NS_PER_S),
        cpu_ns=round(line.cpu_s * NS_PER_S),
        gpu_ns=round(line.gpu_s * NS_PER_S),
        peak_bytes=line.bytes,
    )


def _within(value_s: float, name: str) -> None:
    if not 0 <= value_s <= LONGEST_S:
        raise ValueError(f"{name} must be from 0 to {LONGEST_S:.0f} seconds, not {value_s}")
