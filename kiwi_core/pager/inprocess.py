"""The daemon's pager: linked processes move their own memory, the driver's checkpoint all the rest.

A *linked* process has Kiwi's library preloaded, which owns its allocations and moves them at the
speed of the bus. What a page-out through the library leaves in the GPU (contexts, and what the
library cannot own) stays there, unless it is large, or room is still short: then a second page-out,
or somebody's page-in, has the driver's checkpoint move that, too. A session without linked
processes is the checkpoint backend's alone.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kiwi_core.config import DEFAULTS
from kiwi_core.errors import GpuError
from kiwi_core.gpu import processes
from kiwi_core.pager.api import Capabilities, Refused
from kiwi_core.pager.linked import all_out
from kiwi_core.pager.ports import Stop, refusal
from kiwi_core.pager.together import Together, in_parts
from kiwi_core.states import MovedBy, Reason, Residency
from kiwi_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kiwi_core.config import Config
    from kiwi_core.gpu.processes import ProcessRef
    from kiwi_core.pager.api import Moved, Observation, Outcome, ProcessMemory, Target
    from kiwi_core.pager.checkpoint import CheckpointPager
    from kiwi_core.pager.linked import Linked, Links, Told
    from kiwi_core.pager.room import Room
    from kiwi_core.units import SessionId

SCRUBBED_NS = NS_PER_S // 2
"""Memory that was just freed shows up as free within this time; who still lacks room then lacks it
for another reason."""

WORST_FIRST = (Residency.LOST, Residency.PAGED_OUT, Residency.LOCKED, Residency.RESIDENT)


class InProcessPager:
    """``checkpoint`` moves what is not linked; ``room`` is the one that it checks, too.
    Thread-safe; calls for one session wait for each other."""

    def __init__(
        self, checkpoint: CheckpointPager, links: Links, room: Room, config: Config = DEFAULTS
    ) -> None:
        self._checkpoint = checkpoint
        self._links = links
        self._room = room
        self._config = config
        self._lock = threading.Lock()
        self._busy: dict[SessionId, threading.Lock] = {}
        self._moved_by: dict[SessionId, MovedBy] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("inprocess", partial=True, room_on_demand=True, exact_leases=True)

    def moved_by(self, session: SessionId) -> MovedBy:
        """As it was when the session was last looked at."""
        return self._moved_by.get(session, MovedBy.CHECKPOINT)

    # --- the pager ------------------------------------------------------------------------------

    def suspend(self, target: Target, deadline_ns: int) -> Outcome:
        return self._run(target, deadline_ns, self._checkpoint.suspend, Together.suspend)

    def resume(self, target: Target, deadline_ns: int) -> Outcome:
        return self._run(target, deadline_ns, self._checkpoint.resume, Together.resume)

    def page_out(self, target: Target, deadline_ns: int, at_least_bytes: int = 0) -> Outcome:
        def together(one: Together) -> Moved:
            return one.page_out(at_least_bytes)

        return self._run(target, deadline_ns, self._checkpoint.page_out, together)

    def page_in(self, target: Target, deadline_ns: int) -> Outcome:
        """Where room is lacking, and other sessions that are out have left something in the GPU,
        that goes first."""
        patience_ns = self._config.room_wait_ns
        if any(other.session != target.session for other in self._links.paged_out()):
            outcome = self._page_in(target, deadline_ns, min(patience_ns, SCRUBBED_NS))
            if not isinstance(outcome, Refused) or outcome.reason is not Reason.NO_ROOM:
                return outcome
            self._clear_residues(target, deadline_ns)
        return self._page_in(target, deadline_ns, patience_ns)

    def _page_in(self, target: Target, deadline_ns: int, room_wait_ns: int) -> Outcome:
        def alone(target: Target, deadline_ns: int) -> Outcome:
            return self._checkpoint.page_in(target, deadline_ns, room_wait_ns)

        def together(one: Together) -> Moved:
            return one.page_in(room_wait_ns)

        return self._run(target, deadline_ns, alone, together)

    def observe(self, target: Target) -> Observation:
        """Raises ``GpuError`` only where the driver or NVML as a whole cannot be asked."""
        seen = self._checkpoint.observe(target)
        links = self._living(target)
        linked = {link.ref: link.told for link in links}
        if not seen.alive:
            with self._lock:
                self._moved_by.pop(target.session, None)
                self._busy.pop(target.session, None)
        if not linked:
            self._moved_by.pop(target.session, None)
            return seen
        told = tuple(linked.values())
        parts = tuple(_with_word(memory, linked.get(memory.ref)) for memory in seen.processes)
        self._moved_by[target.session] = self._who_moves(parts, linked)
        partial = self._moved_by[target.session] is MovedBy.INPROCESS
        partial = partial and in_parts(links, seen.processes)
        residencies = {seen.residency, *(word.residency for word in told)}
        in_gpu = {memory.ref: memory.resident_bytes for memory in seen.processes}
        out_bytes = sum(_still_out_bytes(link, in_gpu.get(link.ref, 0)) for link in links)
        return replace(
            seen,
            residency=next(one for one in WORST_FIRST if one in residencies),
            paged_out_bytes=seen.paged_out_bytes + out_bytes,
            processes=parts,
            partial=partial,
        )

    def export_footprints(self, target: Target | None = None) -> dict[ProcessRef, int]:
        sizes = dict(self._checkpoint.export_footprints(target))
        links = self._links.everybody() if target is None else self._links.of(target.session)
        for ref, size_bytes in _out_bytes(links).items():
            sizes[ref] = sizes.get(ref, 0) + size_bytes
        return sizes

    def import_footprints(self, footprints: Mapping[ProcessRef, int]) -> None:
        """What the libraries have out they tell themselves; the rest is the driver's."""
        ours = _out_bytes(self._links.everybody())
        rest = {ref: size - ours.get(ref, 0) for ref, size in footprints.items()}
        self._checkpoint.import_footprints({ref: size for ref, size in rest.items() if size > 0})

    # --- inside ---------------------------------------------------------------------------------

    def _living(self, target: Target) -> list[Linked]:
        """Linked processes of the session that live and can be moved by their library. One that
        cannot be reached, but has its memory in the GPU, is the checkpoint's; not so in the moment
        in which it reconnects, or the driver might take it in the middle of its library's work."""
        return [
            link
            for link in self._links.of(target.session)
            if (link.connected or link.expected or link.told.residency is not Residency.RESIDENT)
            and link.ref not in target.without
            and processes.alive(link.ref)
        ]

    def _run(
        self,
        target: Target,
        deadline_ns: int,
        alone: Callable[[Target, int], Outcome],
        together: Callable[[Together], Moved],
    ) -> Outcome:
        busy = self._lock_of(target.session)
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / NS_PER_S)
        if not busy.acquire(timeout=left_s):
            detail = "Another operation on this session is still under way."
            return Refused(Reason.LOCK_TIMEOUT, detail)
        try:
            if not self._living(target):
                return alone(target, deadline_ns)
            return together(
                Together(
                    self._checkpoint, self._links, self._room, self._config, target, deadline_ns,
                    self._living,
                )
            )  # fmt: skip
        except Stop as stop:
            return stop.outcome
        except GpuError as error:
            return refusal(error, target.root.pid)
        finally:
            busy.release()

    def _lock_of(self, session: SessionId) -> threading.Lock:
        with self._lock:
            return self._busy.setdefault(session, threading.Lock())

    def _clear_residues(self, target: Target, deadline_ns: int) -> None:
        """The last resort: what sessions that are out have left in the GPU goes, too. One that the
        driver cannot move stays; so does one of which the library has a part in the GPU, since only
        the library can move that."""
        for other in self._links.paged_out():
            busy = self._lock_of(other.session)
            if other.session == target.session or not busy.acquire(blocking=False):
                continue
            try:
                if not all(map(all_out, self._living(other))):
                    continue  # it came back just now, or may be on its way
                self._checkpoint.page_out(other, deadline_ns)
            except GpuError:
                continue
            finally:
                busy.release()

    def _who_moves(
        self, parts: tuple[ProcessMemory, ...], linked: Mapping[ProcessRef, Told]
    ) -> MovedBy:
        most_bytes = self._config.unowned_left_bytes
        mixed = any(memory.ref not in linked for memory in parts)
        mixed = mixed or any(told.unowned_bytes > most_bytes for told in linked.values())
        return MovedBy.BOTH if mixed else MovedBy.INPROCESS


def _still_out_bytes(link: Linked, in_gpu_bytes: int) -> int:
    """Of one that is out as far as was heard, and cannot be asked: it may be on its way in, begun
    under an earlier daemon. What it has in the GPU must not count twice."""
    if link.told.residency is not Residency.PAGED_OUT:
        return 0
    said_bytes = link.told.paged_out_bytes
    return said_bytes if link.connected else max(0, said_bytes - in_gpu_bytes)


def _out_bytes(links: tuple[Linked, ...]) -> dict[ProcessRef, int]:
    return {
        link.ref: link.told.paged_out_bytes
        for link in links
        if link.told.residency is Residency.PAGED_OUT and processes.alive(link.ref)
    }


def _with_word(memory: ProcessMemory, told: Told | None) -> ProcessMemory:
    """Of a linked process the worse of what driver and library say."""
    if told is None:
        return memory
    both = (memory.residency, told.residency)
    return replace(memory, residency=next(one for one in WORST_FIRST if one in both))
