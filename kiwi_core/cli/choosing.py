"""The choice of sessions, order and columns for ``kiwi status``. As in ``squeue``, the user selects
by user and state, sorts, and names the columns."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kiwi_core.cli.terminal import printable, table
from kiwi_core.states import Priority, SessionState
from kiwi_core.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kiwi_core.cli.terminal import Style
    from kiwi_core.wire.messages import SessionStatus

NAME_MAX: Final = 32
"""Most characters shown of a notebook's name; the rest is cut off."""


@dataclass(frozen=True)
class Column:
    head: str
    cell: Callable[[SessionStatus], str]
    right: bool = False


def _state(session: SessionStatus) -> str:
    text = session.state.value
    if session.lingering and session.state is SessionState.RUNNING:
        text += " (left over)"
    text += ", unguarded" if not session.guarded else ""
    text += ", stopped" if session.stopped else ""
    return text if session.connected else text + " (away)"


def _shorten(text: str) -> str:
    return text if len(text) <= NAME_MAX else text[: NAME_MAX - 1] + "…"


COLUMNS: Final = {
    "id": Column("SESSION", lambda one: one.id),
    "name": Column("NOTEBOOK", lambda one: _shorten(printable(one.name))),
    "owner": Column("OWNER", lambda one: printable(one.owner)),
    "pid": Column("PID", lambda one: str(one.pid) if one.pid else "-", right=True),
    "state": Column("STATE", _state),
    "resident_bytes": Column("IN GPU", lambda one: format_bytes(one.resident_bytes), right=True),
    "paged_out_bytes": Column(
        "PAGED OUT", lambda one: format_bytes(one.paged_out_bytes), right=True
    ),
    "held_s": Column("HELD", lambda one: format_duration_s(one.held_s), right=True),
    "waited_s": Column("WAITED", lambda one: format_duration_s(one.waited_s), right=True),
    "suspensions": Column("SUSPENDED", lambda one: f"{one.suspensions} ×", right=True),
    "priority": Column("PRIORITY", lambda one: one.priority.value),
    "peak_bytes": Column("PEAK", lambda one: format_bytes(one.peak_bytes or 0), right=True),
    "ram_bytes": Column(
        "RAM", lambda one: format_bytes(one.ram_bytes) if one.ram_bytes else "-", right=True
    ),
}
"""The columns, by the field of a session in the JSON."""

_USUAL: Final = tuple(COLUMNS)[1:10]
"""All but the ids, which tell people nothing: commands take names."""


@dataclass(frozen=True)
class Choice:
    """What to show. Empty ``users`` and ``states`` mean all, empty ``columns`` the usual ones.
    ``sort`` has fields, each with whether the largest comes first."""

    users: tuple[str, ...] = ()
    states: tuple[SessionState, ...] = ()
    sort: tuple[tuple[str, bool], ...] = ()
    columns: tuple[str, ...] = ()

    def of(self, sessions: Sequence[SessionStatus]) -> list[SessionStatus]:
        """Return the sessions to show, in order."""
        found = [
            one
            for one in sessions
            if (not self.users or one.owner in self.users)
            and (not self.states or one.state in self.states)
        ]
        for field, largest_first in reversed(self.sort):
            found.sort(key=lambda one: _sortable(one, field), reverse=largest_first)
        return found

    def lines(self, sessions: Sequence[SessionStatus], style: Style) -> list[str]:
        """Return the table of ``sessions``; empty if there is none to show."""
        shown = self.of(sessions)
        if not shown:
            return []
        names = self.columns or _USUAL
        if not self.columns and any(one.priority is not Priority.NORMAL for one in shown):
            names = (*names, "priority")
        columns = [COLUMNS[name] for name in names]
        rows = [[column.head for column in columns]]
        rows += [[column.cell(one) for column in columns] for one in shown]
        right = [at for at, column in enumerate(columns) if column.right]
        lines = table(rows, right=right)
        return ["  " + style.dim(lines[0]), *("  " + line for line in lines[1:])]


EVERYTHING: Final = Choice()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which sessions, and how (lists are separated by commas)")
    group.add_argument("--user", metavar="USERS", help="only sessions of these users")
    group.add_argument(
        "--state", metavar="STATES", type=_states, help="only sessions in these states"
    )
    group.add_argument(
        "--sort",
        metavar="FIELDS",
        type=_sort,
        help="order by fields of the JSON; - before one: the largest first (-resident_bytes)",
    )
    group.add_argument(
        "--format",
        metavar="FIELDS",
        type=_fields,
        help=f"the columns, in order: {', '.join(COLUMNS)}",
    )


def choice_of(args: argparse.Namespace) -> Choice:
    return Choice(_words(args.user or ""), args.state or (), args.sort or (), args.format or ())


def _sortable(session: SessionStatus, field: str) -> Any:
    value = getattr(session, field)
    return 0 if value is None else getattr(value, "value", value)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _states(text: str) -> tuple[SessionState, ...]:
    known = ", ".join(state.value for state in SessionState)
    try:
        return tuple(SessionState(word) for word in _words(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; the states are {known}") from error


def _fields(text: str) -> tuple[str, ...]:
    words = _words(text)
    for word in words:
        if word not in COLUMNS:
            known = ", ".join(COLUMNS)
            raise argparse.ArgumentTypeError(f"{word!r} is not a column; the columns are {known}")
    return words


def _sort(text: str) -> tuple[tuple[str, bool], ...]:
    words = _words(text)
    fields = _fields(text.replace("-", ""))
    return tuple(zip(fields, [word.startswith("-") for word in words], strict=True))
