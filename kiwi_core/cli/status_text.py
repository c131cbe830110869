"""One GPU's status as lines of text for people, without I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core import terms
from kiwi_core.cli.choosing import EVERYTHING
from kiwi_core.cli.terminal import Style, printable
from kiwi_core.units import format_bytes, format_duration_s
from kiwi_core.wire.words import (
    LEFT_REMEDY,
    counted_text,
    keeps_text,
    load_text,
    outside_text,
    outside_texts,
    settings_text,
    turn_text,
    wait_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kiwi_core.cli.choosing import Choice
    from kiwi_core.wire.messages import GpuStatus, QueueEntry, SessionStatus, SwapStatus

SWAPS_SHOWN = 4
LEAST_SWAP_S = 0.05
"""A swap that costs less would be shown as "0.0 s"."""


def gpu_lines(gpu: GpuStatus, style: Style, choice: Choice = EVERYTHING) -> list[str]:
    """Return what ``kiwi status`` prints for one GPU. ``choice`` applies to the table."""
    lines = [_title(gpu, style)]
    lines += _fact("memory", [_memory(gpu), *_outside(gpu)], style)
    if load := load_text(gpu.gauges):
        lines += _fact("load", [load], style)
    lines += _fact("sharing", _sharing(gpu), style)
    lines += _fact("holder", _holders(gpu) or ["nobody"], style)
    lines += _fact("queue", _queue(gpu) or ["nobody waits"], style)
    lines += _fact("needs", _needs(gpu), style)
    lines += _fact("swaps", [_swap(swap) for swap in reversed(gpu.swaps[-SWAPS_SHOWN:])], style)
    lines += _fact("problems", _problems(gpu), style, style.red)
    if rows := choice.lines(gpu.sessions, style):
        lines += ["", *rows]
    elif gpu.sessions:
        lines += ["", style.dim("  no session matches")]
    return lines


def _title(gpu: GpuStatus, style: Style) -> str:
    title = style.bold(f"GPU {gpu.index}  {printable(gpu.name)}") + "  "
    if gpu.emulated:  # before the UUID, because a narrow window cuts off the end
        title += style.loud("EMULATED: no real GPU, its speed means nothing") + "  "
    return title + style.dim(gpu.uuid)


def _fact(
    name: str, values: list[str], style: Style, paint: Callable[[str], str] | None = None
) -> list[str]:
    """Return ``name`` beside the first value, the other values below it; nothing without values."""
    return [
        f"  {style.dim(label.ljust(9))} {paint(value) if paint else value}"
        for label, value in zip([name] + [""] * len(values), values, strict=False)
    ]


def _memory(gpu: GpuStatus) -> str:
    memory = gpu.memory
    text = f"{format_bytes(memory.free_bytes)} of {format_bytes(memory.total_bytes)} free"
    text += f", {format_bytes(memory.paged_out_bytes)} paged out"
    text += f" (system RAM may take {format_bytes(memory.host_budget_bytes)})"
    return ", ".join([text, *outside_texts(gpu)])


def _outside(gpu: GpuStatus) -> list[str]:
    return [
        f"outside Kiwi: {printable(outside_text(one))}, {format_bytes(one.used_bytes)}"
        + (f" → {LEFT_REMEDY}" if one.left else "")
        for one in gpu.outside
    ]


def _sharing(gpu: GpuStatus) -> list[str]:
    scheduler = gpu.scheduler
    settings = printable(settings_text(scheduler))
    if scheduler.floor_s is not None:
        settings += f", a turn lasts at least {format_duration_s(scheduler.floor_s)}"
    swap_s = scheduler.swap_round_trip_s or 0.0
    if swap_s >= LEAST_SWAP_S:
        settings += f", a swap costs about {format_duration_s(swap_s)}"
    lines = [printable(scheduler.sharing), settings]
    if gpu.pager_text:
        lines.append(f"memory moves {printable(gpu.pager_text)}")
    if scheduler.foretold:
        well, of = scheduler.foretold_well, scheduler.foretold
        lines.append(
            f"expected waits: {well} of the last {of} right to 2 s or a quarter of the figure"
        )
    return lines


def _holders(gpu: GpuStatus) -> list[str]:
    holders = _by_id(gpu, gpu.holders)
    kept = [one for one in gpu.sessions if one.keeps_s is not None]
    return [
        *(", ".join(filter(None, (_who(one), turn_text(gpu, one)))) for one in holders),
        *(f"{_who(one)} {keeps_text(one.keeps_s or 0)}" for one in kept),
    ]


def _queue(gpu: GpuStatus) -> list[str]:
    names = {session.id: _who(session) for session in gpu.sessions}
    return [
        f"{entry.position}. {names.get(entry.session, entry.session)}: {_wait(entry)}"
        for entry in gpu.queue
    ]


def _wait(entry: QueueEntry) -> str:
    text = printable(wait_text(entry)) or terms.NOBODY_CAN_TELL
    return f"{text} (has waited {format_duration_s(entry.waited_s)})"


def _needs(gpu: GpuStatus) -> list[str]:
    """Return who counts with more than it holds, among those that run or wait: it keeps others
    from running beside it."""
    active = _by_id(gpu, [*gpu.holders, *(entry.session for entry in gpu.queue)])
    return [f"{_who(one)}: {text}" for one in active if (text := counted_text(one))]


def _swap(swap: SwapStatus) -> str:
    text = f"{printable(swap.name) or terms.ENDED} {swap.direction}: "
    text += f"{format_bytes(swap.bytes_moved)} in {format_duration_s(swap.seconds)}"
    if swap.seconds > 0 and swap.bytes_moved:
        text += f" ({swap.bytes_moved / swap.seconds / 1e9:.1f} GB/s)"
    return f"{text}, {format_duration_s(swap.ago_s)} ago"


def _problems(gpu: GpuStatus) -> list[str]:
    lines = [printable(text) for text in gpu.errors]
    for session in gpu.sessions:
        if session.problem:
            words = printable(session.problem_text) or session.problem
            lines.append(f"{_who(session)}: {words}")
        if session.stopped:
            lines.append(f"{_who(session)}: {printable(session.stopped)}")
        if not session.guarded:
            lines.append(f"{_who(session)}: unguarded. {printable(session.unguarded_text)}")
        if session.pager_text:
            lines.append(f"{_who(session)}: {printable(session.pager_text)}")
    return lines


def _by_id(gpu: GpuStatus, ids: list[str]) -> list[SessionStatus]:
    sessions = {session.id: session for session in gpu.sessions}
    return [sessions[one] for one in ids if one in sessions]


def _who(session: SessionStatus) -> str:
    name = printable(session.name) or session.id
    owner = printable(session.owner)
    return f"{name} ({owner})" if owner and name != "another user" else name
