"""Kiwi's errors: three families, each error with a code, a sentence and a remedy.

``CallerError``  the caller asked for something that cannot be done (a bad setting, no right).
``PeerError``    the other end of a socket broke the protocol or went away.
``GpuError``     the driver, NVML or the GPU refused or failed.

A code is stable and machine-readable; the sentence and the remedy are for users.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

NO_MORE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""The system has no descriptor or no memory left for the moment. A call that fails with one of
these errors says nothing about its object."""

_FULL = frozenset({"too-many-connections", "too-many-sessions", "too-much-unread", "silent"})


class KiwiError(Exception):
    """What happened (``message``), in one sentence, and what to do about it (``remedy``)."""

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip()


class CallerError(KiwiError):
    """The caller asked for something that is forbidden or meaningless. Nothing changed."""


class PeerError(KiwiError):
    """The other end sent a message out of turn, sent garbage, or is gone."""


class SilentDaemonError(PeerError):
    """A daemon listens at ``path`` and does not answer: it is stopped, its machine is busy, or it
    hangs. No other one can be started meanwhile."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            "no-daemon",
            f"The Kiwi daemon at {path} runs but {why}.",
            "It may be stopped, or its machine too busy. If it hangs, stop it and start it again.",
        )
        self.path = path


class GpuError(KiwiError):
    """The driver or NVML refused, failed or did not answer in time.

    ``driver_code`` is the numeric ``CUresult`` or ``nvmlReturn_t``, where there is one.
    """

    def __init__(
        self, code: str, message: str, remedy: str = "", *, driver_code: int | None = None
    ) -> None:
        super().__init__(code, message, remedy)
        self.driver_code = driver_code


def is_full(error: Exception) -> bool:
    """Return whether a daemon runs but accepts no connection now: it, or the user's share, is full.

    The caller waits and tries again. If it went on without a daemon, it would use the GPU beside
    the sessions that the daemon protects from each other.
    """
    return isinstance(error, PeerError) and error.code in _FULL
