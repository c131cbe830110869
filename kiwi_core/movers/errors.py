"""The errors of a call that gets no answer."""

from __future__ import annotations

from typing import Final

from kiwi_core.errors import GpuError

MOVER_DIED: Final = "mover-died"
"""The code of a ``Hung`` whose mover died, although the time limit had not passed."""


class Hung(GpuError):  # noqa: N818 - the word for what happened
    """A call that began and was not answered: it passed its time limit, or its mover died. The
    driver may have done the work, may still do it, or may never do it: ask for the state."""


class Busy(GpuError):  # noqa: N818
    """A call that did not begin, since no mover became free in time. Nothing has changed."""


def hung(what: str, within_s: float) -> Hung:
    return Hung(
        "driver-hangs",
        f"The driver did not answer within {within_s:.3g} s ({what}).",
        "If it stays so, restart the program that the call was about.",
    )


def died(what: str) -> Hung:
    return Hung(MOVER_DIED, f"The process that asked the driver ended in mid-call ({what}).")


def busy(what: str, within_s: float) -> Busy:
    return Busy(
        "driver-busy",
        f"No mover was free within {within_s:.3g} s to ask the driver ({what}): others hang.",
    )
