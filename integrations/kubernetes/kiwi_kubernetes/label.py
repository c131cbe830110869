"""The node's label ``kiwi-jupyter/wait-s``, by a feature file of Node Feature Discovery.

Its worker reads ``features.d`` each minute, and its master labels the node (customization guide,
"Local feature source"). So Kiwi needs no access to the cluster's API. A label that is not renewed
expires.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Final

from kiwi_core.errors import CallerError
from kiwi_kubernetes import files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kiwi_core.wire.messages import GpuStatus

LABEL: Final = "kiwi-jupyter/wait-s"
"""A whole number, so that an affinity can compare it (``Gt``, ``Lt``)."""

FILE: Final = "kiwi"

EXPIRES_S: Final = 300.0
"""A label that was not renewed for this long expires: this process was killed."""

RENEW_S: Final = 60.0
"""Time after which an unchanged label is renewed: as often as the worker reads it."""

NOTICEABLE_S: Final = 5.0
NOTICEABLE_SHARE: Final = 0.2
"""A wait that differs by less than both makes no difference for placing pods; each change of a
label costs a request to the cluster's API.
"""


class Label:
    """Keeps the feature file in ``directory``. ``clock_s`` is seconds since 1970."""

    def __init__(self, directory: Path, clock_s: Callable[[], float] = time.time) -> None:
        self._path = directory / FILE
        self._clock_s = clock_s
        self._told: tuple[int, float] | None = None
        """The wait in the file, and when it was written."""

    def update(self, gpus: Iterable[GpuStatus]) -> None:
        """Write the shortest wait of these GPUs, if it has changed noticeably. If no wait is known,
        remove the label: a node without the label satisfies no bound. Raises ``CallerError``.
        """
        waits_s = [gpu.newcomer_wait_s for gpu in gpus if gpu.newcomer_wait_s is not None]
        if not waits_s:
            self.remove()
            return
        wait_s, now_s = round(min(waits_s)), self._clock_s()
        if self._told is not None:
            told_s, written_s = self._told
            if not noticeable(told_s, wait_s):
                if now_s - written_s < RENEW_S:
                    return
                wait_s = told_s
        files.replace(self._path, _text(wait_s, now_s + EXPIRES_S))
        self._told = wait_s, now_s

    def remove(self) -> None:
        """Remove the file, and with it the label. Raises ``CallerError``."""
        self._told = None
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise CallerError(
                "cannot-remove",
                f"{self._path} cannot be removed: {error.strerror}.",
                f"The label {LABEL} expires within {EXPIRES_S / 60:.0f} minutes.",
            ) from error


def noticeable(told_s: int, wait_s: int) -> bool:
    """Return whether a wait of ``wait_s`` differs noticeably from ``told_s``; no wait always
    does.
    """
    if not told_s or not wait_s:
        return told_s != wait_s
    return abs(wait_s - told_s) >= max(NOTICEABLE_S, NOTICEABLE_SHARE * told_s)


def _text(wait_s: int, expires_s: float) -> str:
    expires = datetime.fromtimestamp(0, timezone.utc) + timedelta(seconds=int(expires_s))
    return f"# +expiry-time={expires:%Y-%m-%dT%H:%M:%SZ}\n{LABEL}={wait_s}\n"
