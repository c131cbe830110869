"""``%kiwi status``: an object that shows itself as text and as HTML."""

from __future__ import annotations

import html
import os
from typing import TYPE_CHECKING, Final

from kiwi_core import preallocation
from kiwi_core.states import MovedBy, SessionState
from kiwi_core.terms import ENDED, STATES
from kiwi_core.units import format_bytes, format_duration_s, ordinal
from kiwi_core.wire.words import counted_text, keeps_text, load_text, settings_text, wait_text
from kiwi_jupyter.kernel.display import marked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kiwi_core.wire.messages import GpuStatus, QueueEntry, SessionStatus, SwapStatus, UserNotice

SWAPS_SHOWN: Final = 4
_MOVED_BY: Final = {
    MovedBy.CHECKPOINT: "",  # as usual
    MovedBy.INPROCESS: ", moved by Kiwi's own pager",
    MovedBy.BOTH: ", moved by Kiwi's own pager and the driver",
}
Rows = list[tuple[str, str]]


class StatusView:
    """The answer of ``%kiwi status``. ``status`` is ``None`` without a daemon, and ``problem`` says
    why. ``mine`` is the id of this kernel's session, "" if it has none yet.
    """

    def __init__(
        self,
        status: GpuStatus | None,
        *,
        mine: str,
        problem: str,
        enabled: bool,
        notices: Sequence[UserNotice] = (),
    ) -> None:
        self.status = status
        self._mine = mine
        self._problem = problem
        self._enabled = enabled
        self._notices = list(notices)

    def rows(self) -> Rows:
        """Return the rows, each a label and a text."""
        rows: Rows = [] if self._enabled else [("Kiwi", "off in this kernel (`%kiwi on`)")]
        if self.status is None:
            rows.append(("Kiwi", self._problem or "There is no daemon."))
            return rows
        rows += self._gpu(self.status) + self._own(self.status) + self._others(self.status)
        names = self._names(self.status)
        rows += [("Swap", _swap(swap, names)) for swap in self.status.swaps[-SWAPS_SHOWN:]]
        if self._enabled and preallocation.is_off(os.environ):
            rows.append(("Frameworks", preallocation.TEXT))
        rows += [("Error", error) for error in self.status.errors]
        rows += [("Notice", f"{n.text} {n.remedy}".rstrip()) for n in self._notices[-SWAPS_SHOWN:]]
        return rows

    def _gpu(self, status: GpuStatus) -> Rows:
        memory, scheduler = status.memory, status.scheduler
        name = f"{status.name} ({status.uuid})"
        if status.emulated:
            name = f"EMULATED GPU, no real one: {name}"
        load = load_text(status.gauges)
        return [
            ("GPU", name),
            *([("Load", load)] if load else []),
            (
                "Memory",
                (
                    f"{format_bytes(memory.free_bytes)} free of"
                    f" {format_bytes(memory.total_bytes)},"
                    f" {format_bytes(memory.paged_out_bytes)} paged out to system RAM"
                ),
            ),
            ("Sharing", f"{scheduler.sharing}; {settings_text(scheduler)}"),
            *([("Moves", status.pager_text)] if status.pager_text else []),
        ]

    def _own(self, status: GpuStatus) -> Rows:
        own = next((s for s in status.sessions if s.id == self._mine), None)
        if own is None or _unused(own):
            return [("This notebook", "has not used the GPU under Kiwi yet")]
        place = next((q for q in status.queue if q.session == own.id), None)
        rows = [("This notebook", f"{STATES[own.state]}, {_memory(own)}{_MOVED_BY[own.pager]}")]
        if place is not None:
            rows.append(("Wait", f"{ordinal(place.position)} in line{_expected(place)}"))
        if counted := counted_text(own):
            rows.append(("Need", counted))
        rows.append(("So far", _history(own)))
        if own.stopped:
            rows.append(("Stopped", own.stopped))
        if not own.guarded:
            rows.append(("Unguarded", own.unguarded_text))
        if own.pager_text:
            rows.append(("Pager", own.pager_text))
        if own.problem:
            rows.append(("Problem", own.problem_text or own.problem))
        return rows

    def _names(self, status: GpuStatus) -> dict[str, str]:
        return {s.id: "this notebook" if s.id == self._mine else s.name for s in status.sessions}

    def _others(self, status: GpuStatus) -> Rows:
        names = self._names(status)
        holders = [names.get(h, h) for h in status.holders]
        kept = [s for s in status.sessions if s.keeps_s is not None]
        holders += [f"{names[s.id]} {keeps_text(s.keeps_s or 0)}" for s in kept]
        active = {*status.holders, *(entry.session for entry in status.queue)} - {self._mine}
        needs = ((s.name, counted_text(s)) for s in status.sessions if s.id in active)
        rows = [("Has the GPU", ", ".join(holders) if holders else "nobody")]
        # (this notebook's own has a row of its own)
        others = (s for s in status.sessions if s.problem_text and s.id != self._mine)
        why = {s.id: f": {s.problem_text}" for s in others}
        bare = (s for s in status.sessions if s.id in status.holders and not s.guarded)
        rows += [("Unguarded", f"{s.name}: {s.unguarded_text}") for s in bare if s.id != self._mine]
        for entry in status.queue:
            who = names.get(entry.session, entry.session)
            wait = _expected(entry) + why.get(entry.session, "")
            rows.append((ordinal(entry.position), who + wait))
        rows += [("Need", f"{name}: {text}") for name, text in needs if text]
        return rows

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(len(word) for word, _ in rows)
        return "\n".join(f"{word:<{width}}  {text}" for word, text in rows)

    def _repr_html_(self) -> str:
        cells = "".join(
            '<tr><th scope="row" style="text-align:left;padding-right:1em">'
            f'{html.escape(word)}</th><td style="text-align:left">{marked(text)}</td></tr>'
            for word, text in self.rows()
        )
        return f'<table aria-label="Kiwi status"><tbody>{cells}</tbody></table>'


def _unused(own: SessionStatus) -> bool:
    """Return whether it has only announced itself: it has imported what may use the GPU."""
    used = own.resident_bytes or own.paged_out_bytes or own.held_s or own.waited_s
    return own.state is SessionState.IDLE and not used


def _memory(session: SessionStatus) -> str:
    return (
        f"{format_bytes(session.resident_bytes)} in the GPU, "
        f"{format_bytes(session.paged_out_bytes)} in system RAM{_ram(session)}"
    )


def _ram(session: SessionStatus) -> str:
    return "" if session.ram_bytes is None else f" (of its {format_bytes(session.ram_bytes)} there)"


def _history(session: SessionStatus) -> str:
    times = "once" if session.suspensions == 1 else f"{session.suspensions} times"
    return (
        f"held the GPU {format_duration_s(session.held_s)}, "
        f"waited {format_duration_s(session.waited_s)}, suspended {times}"
    )


def _expected(entry: QueueEntry) -> str:
    told = wait_text(entry)
    return f", {told}" if told else ""


def _swap(swap: SwapStatus, names: Mapping[str, str]) -> str:
    speed = f" ({swap.bytes_moved / swap.seconds / 1e9:.1f} GB/s)" if swap.seconds > 0 else ""
    return (
        f"{names.get(swap.session) or swap.name or ENDED}: "
        f"{format_bytes(swap.bytes_moved)} {'out' if swap.direction == 'out' else 'back'} in "
        f"{format_duration_s(swap.seconds)}{speed}, {format_duration_s(swap.ago_s)} ago"
    )
