"""Estimates of the GPU memory that a session takes while it runs.

There are two, because errors differ in cost. ``expected_bytes`` decides which sessions may run side
by side: too high a guess costs waiting. ``wish_bytes`` is the room that is made by paging *idle*
memory out, as far as possible: too high a guess costs one swap, too low a guess an out-of-memory
error.

A session of unknown need counts as needing the whole GPU. The first cells of a notebook often make
no more than a context (an import, a look at the device) and the next one loads the model. So a
need is known only once the session has held more than a small share of the GPU, or has stayed
small for some bursts in which the GPU worked for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from kiwi_core.units import MIB, NS_PER_S

SMALL_SHARE: Final = 20
"""Up to a twentieth of the GPU is hardly more than a context (0.3-0.6 GB of 16-140 GB)."""

CONTEXT_MAX_BYTES: Final = 640 * MIB
SMALL_SHARE_MAX: Final = 10
"""A context is more than a twentieth of a GPU of less than 12 GB. So ``CONTEXT_MAX_BYTES`` count
as small, too, but never more than a tenth of the GPU."""

QUIET_BURSTS: Final = 3
"""Bursts without growth after which a small session is expected to stay small."""

BELIEVED_NS: Final = 30 * NS_PER_S
"""GPU time in one burst after which the peak of this burst counts, too. The first burst of a
training may last hours: until its end the training would count as needing the whole GPU."""

NOISE_SHARE: Final = 64
"""Growth by less than this part of the GPU is the allocator's rounding, not a new phase."""


PEAKS_KEPT: Final = 8
"""Bursts whose peaks count for the expected need: the notebook's present phase only."""

DURATIONS_KEPT: Final = 20
"""Bursts whose lengths count for expected waits (the number that the simulations used)."""


@lru_cache(maxsize=8)  # a process has few GPUs; this is asked several times per event
def _small_bytes(total_bytes: int) -> int:
    usual = max(total_bytes // SMALL_SHARE, CONTEXT_MAX_BYTES)
    return min(usual, total_bytes // SMALL_SHARE_MAX)


@dataclass(eq=False)
class Needs:
    """The part of ``Session`` about the needs of its bursts. Only this module writes its fields."""

    __slots__ = tuple[str, ...]()  # ``Session`` has the slots

    burst_peak_bytes: int = 0
    """The most memory that it held in this burst."""
    peaks_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=PEAKS_KEPT))
    """The peaks of its last bursts."""
    peak_bytes: int = 0
    """The largest of ``peaks_bytes``, including this burst's peak once it has lasted long."""
    earlier_peak_bytes: int = 0
    """The largest of ``peaks_bytes`` before the last burst."""
    growth_bytes: int = 0
    """How far the last burst grew beyond ``earlier_peak_bytes``."""
    quiet_bursts: int = 0
    """Bursts since the last one that grew; all of them if none did. A burst in which the GPU did
    nothing (an import, a look at the device) says nothing and is left out, where that is known."""
    worked: bool = False
    """Whether the GPU was seen to work for it in this burst."""
    unjudged_bursts: int = 0
    """Bursts that have ended, and of which no observation since has said whether the GPU worked."""
    ended_ns: int = 0
    """When the last burst ended."""
    unsized: bool = False
    """Whether nobody can say what it has in the GPU: then it runs alone."""
    durations_ns: deque[int] = field(default_factory=lambda: deque(maxlen=DURATIONS_KEPT))
    """How long its last bursts held the lease."""

    def sees_size(self, known: bool) -> None:
        """Record whether a reading shows what the session has in the GPU."""
        self.unsized = not known

    def is_unknown(self, total_bytes: int) -> bool:
        if self.unsized:
            return True
        lively = self.quiet_bursts < QUIET_BURSTS
        return lively and self.peak_bytes <= _small_bytes(total_bytes)

    def expected_bytes(self, held_bytes: int, total_bytes: int) -> int:
        """Return the expected need without the margin: at most the whole GPU, and up to that no
        less than ``held_bytes``, what the session holds now and has asked for."""
        lively = self.unsized or self.quiet_bursts < QUIET_BURSTS
        if lively and self.is_unknown(total_bytes):
            return total_bytes
        need = held_bytes if held_bytes > self.peak_bytes else self.peak_bytes
        if need > total_bytes:
            return total_bytes
        return need or 1  # 0 would mean: not active

    def wish_bytes(self, need_bytes: int, total_bytes: int) -> int:
        """Return ``need_bytes`` plus the growth of the last burst; the whole GPU for a session that
        never held GPU memory, which may begin with any cell."""
        if self.unsized or not self.peak_bytes:
            return total_bytes
        wish_bytes = need_bytes + self.growth_bytes
        return wish_bytes if wish_bytes < total_bytes else total_bytes

    def learn_from_start(self, footprint_bytes: int) -> None:
        """Begin to learn from a burst."""
        self.burst_peak_bytes = footprint_bytes
        self.worked = False

    def learn_from_suspension(self, attained_ns: int) -> None:
        """Learn from a burst that was suspended in its middle, after its quantum was counted."""
        if attained_ns >= BELIEVED_NS and self.peak_bytes < self.burst_peak_bytes:
            self.peak_bytes = self.burst_peak_bytes

    def learn_from_end(self, attained_ns: int, total_bytes: int, now_ns: int) -> None:
        """Learn from a burst that has ended."""
        self.ended_ns = now_ns
        self.durations_ns.append(attained_ns)
        if self.unsized:
            return
        self.earlier_peak_bytes = max(self.peaks_bytes, default=0)
        self.peaks_bytes.append(self.burst_peak_bytes)
        if self.worked:
            self.quiet_bursts += 1
        else:
            self.unjudged_bursts += 1
        self._learn(total_bytes)

    def learn_from_use(self, busy: bool | None, began_ns: int) -> None:
        """Learn whether the GPU has worked for it since the observation before this one, which
        began at ``began_ns``. ``None``: nobody can tell, and every burst counts."""
        if busy:
            self.worked = True
        if busy is not False:
            self.quiet_bursts += self.unjudged_bursts
        elif began_ns < self.ended_ns:
            return  # it says nothing about the end of the last burst
        self.unjudged_bursts = 0

    def learn_from_reading(
        self, resident_bytes: int, total_bytes: int, in_burst: bool, of_last: bool = False
    ) -> None:
        """Learn from a reading of the session's memory. Memory that it holds after a burst counts
        as held in that burst: short bursts end before their memory is read. ``of_last``: this
        applies although the next burst has begun."""
        if in_burst and self.burst_peak_bytes < resident_bytes:
            self.burst_peak_bytes = resident_bytes
        if (of_last or not in_burst) and self.peaks_bytes and resident_bytes > self.peak_bytes:
            self.peaks_bytes[-1] = resident_bytes
            self._learn(total_bytes)

    def _learn(self, total_bytes: int) -> None:
        last_bytes, earlier_bytes = self.peaks_bytes[-1], self.earlier_peak_bytes
        self.growth_bytes = last_bytes - earlier_bytes if last_bytes > earlier_bytes else 0
        self.peak_bytes = max(self.peaks_bytes)
        if self.growth_bytes > total_bytes // NOISE_SHARE:
            self.quiet_bursts = self.unjudged_bursts = 0
