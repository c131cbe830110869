"""Decide which libraries own their program's GPU memory, and remember what programs did before.

A library asks once, before its program's first context (``decide``). What is learnt about a program
later counts from its next start on: ``remember``. A library that owns already, and must not any
more, *yields*: its memory stays where it is, and the driver moves it.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import __version__, clock
from kiwi_core.daemon.roster.roster import RosterObjection
from kiwi_core.gpu import ownable
from kiwi_core.gpu.ownable import OwnershipObjection
from kiwi_core.states import GateOnly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kiwi_core.daemon.links.link import Link
    from kiwi_core.daemon.roster.registry import SessionRecord
    from kiwi_core.wire.messages import Hello
    from kiwi_core.wire.pager import PagerState

log = structlog.get_logger(__name__)

PROGRAMS_MAX: Final = 256
"""Programs that are remembered; the oldest make room. Each takes some 100 bytes of the roster."""

REMEMBERED_S: Final = 30 * 86400.0

CRASH_WITHIN_S: Final = 10.0
"""A crash so soon after a move of the program's memory counts as caused by it."""

OTHER_GPU: Final = "gpu"
"""The library's word for memory of another GPU than the one that it owns memory of."""

UNASKED: Final = frozenset({GateOnly.NOT_ASKED, GateOnly.UNPROVEN, GateOnly.PROOF_FAILED})
"""Nothing in the program speaks against owning."""

_UNNAMED: Final = re.compile(r"process \d+")


@dataclass(eq=False, repr=False)
class Ownership:
    """``coherent``: on this machine no library may own. ``changed`` is called when something is
    remembered. ``default`` returns why the library of a program that asks for nothing does not own;
    ``None``: it does. ``facts`` reads what the kernel says about a process."""

    coherent: bool
    changed: Callable[[], None]
    default: Callable[[], GateOnly | None] = lambda: GateOnly.NOT_ASKED
    facts: Callable[[int], ownable.ProcessFacts | None] = ownable.facts
    _remembered: dict[str, RosterObjection] = field(default_factory=dict)
    """What is remembered against each program; the program remembered last comes last."""

    # --- deciding -------------------------------------------------------------------------------

    def decide(self, link: Link, record: SessionRecord | None, hello: Hello) -> None:
        """Decide whether the library of ``link`` owns. Sets ``owns`` and ``objection``."""
        link.program = program_of(link, record)
        before, link.owns = link.objection, hello.owns
        unasked = GateOnly.NOT_ASKED
        if hello.could_own and not hello.owns:
            why_not = self.default()
            link.owns, unasked = why_not is None, why_not or unasked
        if not link.owns:
            late = link.told_to_own and not hello.could_own
            link.objection = OwnershipObjection(GateOnly.LATE if late else unasked)
            if before is not None and not hello.could_own:
                link.objection = before  # it has connected again, and is what it was told to be
        elif before is not None and before.why in (GateOnly.DOUBTED, GateOnly.REFUSED):
            link.objection = before
        else:
            link.objection = self._objection(link)
        if hello.could_own and link.objection is not None:
            link.owns = False  # one that owns already cannot give that up: it yields
        link.told_to_own = link.owns
        if link.objection is not None and link.objection.why not in UNASKED:
            why, detail = link.objection
            log.info("not moved by its library", pid=link.ref.pid, why=why.value, detail=detail)

    def _objection(self, link: Link) -> OwnershipObjection | None:
        if (before := self._remembered.get(link.program)) is not None:
            old = time.time() - before.unix_s > REMEMBERED_S
            repaired = before.why is GateOnly.CRASHED and before.version != __version__
            if not (old or repaired):
                return OwnershipObjection(before.why)
        return ownable.why_not(self.facts(link.ref.pid), coherent=self.coherent)

    def before_a_move(self, links: Iterable[Link]) -> None:
        """Look for what can have come since a library began to own: another user of the memory."""
        for link in links:
            if not link.owns or link.yields:
                continue
            try:
                found = ownable.direct(ownable.open_files(link.ref.pid))
            except OSError:  # it has ended, most likely
                continue
            if found:
                link.objection = OwnershipObjection(GateOnly.DIRECT, found)
                log.info("yields", pid=link.ref.pid, device=found)

    # --- learning -------------------------------------------------------------------------------

    def heard(self, link: Link, state: PagerState) -> None:
        """Learn from a library's report what its program does that owned memory cannot."""
        if not link.owns:
            return
        if state.ipc_refused:
            self._remember(link, GateOnly.IPC)
        elif state.unowned.get(OTHER_GPU):
            self._remember(link, GateOnly.SEVERAL_GPUS)

    def died(self, link: Link) -> None:
        """Learn from the end of a process whether it crashed soon after its memory was moved."""
        moved_s = clock.now_s() - link.moved_s
        if not link.owns or moved_s > CRASH_WITHIN_S:
            return
        number = ownable.ended_by(link.ref, link.pidfd)
        if number in ownable.CRASHES:
            log.warning("crashed soon after a move", pid=link.ref.pid, signal=number, s=moved_s)
            self._remember(link, GateOnly.CRASHED)

    def _remember(self, link: Link, why: GateOnly) -> None:
        before = self._remembered.get(link.program)
        if before is not None and before.why is why and before.version == __version__:
            return
        self._remembered.pop(link.program, None)
        self._remembered[link.program] = RosterObjection(
            program=link.program, why=why, version=__version__, unix_s=time.time()
        )
        while len(self._remembered) > PROGRAMS_MAX:
            del self._remembered[next(iter(self._remembered))]
        log.info("remembered", program=link.program, why=why.value)
        self.changed()

    # --- over a restart -------------------------------------------------------------------------

    def roster(self) -> list[RosterObjection]:
        return list(self._remembered.values())

    def restore(self, those: Iterable[RosterObjection]) -> None:
        self._remembered = {one.program: one for one in list(those)[-PROGRAMS_MAX:]}


def program_of(link: Link, record: SessionRecord | None) -> str:
    """Return a digest that is the same each time a user starts the same program: a notebook by its
    name, anything else by its command."""
    name = ""
    if record is not None and record.ref == link.ref and not record.by_link:
        name = "" if _UNNAMED.fullmatch(record.name) else f"notebook {record.name}"
    words = name or ownable.command_line(link.ref.pid) or link.name
    return hashlib.blake2b(f"{link.uid} {words}".encode(), digest_size=10).hexdigest()
