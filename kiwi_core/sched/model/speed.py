"""The speed of moves, learned from the moves that have ended."""

from __future__ import annotations

from typing import Final

KEEP: Final = 0.7
"""Weight of the past at each new move: about the last three decide, a single outlier does not."""


class _Rate:
    """Decayed time over decayed bytes. This weighs moves by size, so a tiny move (all fixed cost)
    does not spoil the estimate for a big one, as a mean of rates would."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._ns = 0.0

    def learn(self, moved_bytes: int, elapsed_ns: int) -> float:
        """Take account of a move; return the nanoseconds that a byte takes."""
        self._bytes = KEEP * self._bytes + moved_bytes
        self._ns = KEEP * self._ns + elapsed_ns
        return self._ns / self._bytes


GUESS_OUT_NS_PER_BYTE: Final = 1 / 2
GUESS_IN_NS_PER_BYTE: Final = 1 / 4
"""2 GB/s out and 4 GB/s in, used in the waits shown to users before the first measurement. An H200
with driver 580.159 moved 3 to 18 GB at 1.8 to 2.3 GB/s out and at 3.5 to 6.1 GB/s in, and 1 GB at
2 GB/s each way."""


class SwapSpeed:
    """The speeds of page-outs and page-ins. Until one direction has been measured, the speed of
    the other one stands for it."""

    def __init__(self) -> None:
        self._out = _Rate()
        self._in = _Rate()
        self.known = False
        self.out_ns_per_byte = 0.0
        self.in_ns_per_byte = 0.0
        self.round_trip_ns_per_byte = 0.0

    def learn_out(self, moved_bytes: int, elapsed_ns: int) -> None:
        if moved_bytes > 0:
            self.out_ns_per_byte = self._out.learn(moved_bytes, elapsed_ns)
            self.in_ns_per_byte = self.in_ns_per_byte or self.out_ns_per_byte
            self._learned()

    def learn_in(self, moved_bytes: int, elapsed_ns: int) -> None:
        if moved_bytes > 0:
            self.in_ns_per_byte = self._in.learn(moved_bytes, elapsed_ns)
            self.out_ns_per_byte = self.out_ns_per_byte or self.in_ns_per_byte
            self._learned()

    def _learned(self) -> None:
        self.known = True
        self.round_trip_ns_per_byte = self.out_ns_per_byte + self.in_ns_per_byte

    def out_ns(self, size_bytes: int) -> int:
        """Return the time of a page-out as shown to users; a guess before the first move."""
        return int(size_bytes * (self.out_ns_per_byte or GUESS_OUT_NS_PER_BYTE))

    def in_ns(self, size_bytes: int) -> int:
        return int(size_bytes * (self.in_ns_per_byte or GUESS_IN_NS_PER_BYTE))

    def round_trip_ns(self, size_bytes: int) -> int:
        """Return the measured time of a page-out and a page-in; 0 before the first move."""
        return int(size_bytes * self.round_trip_ns_per_byte)
