"""What the daemon of one GPU reports to its supervisor: exit statuses, and lines on standard
output.
"""

from __future__ import annotations

from typing import Final

EXIT_CANNOT: Final = 78
"""EX_CONFIG of sysexits.h: a restart would not help."""

EXIT_UNUSED: Final = 79
"""Nobody needs this daemon; not a code of sysexits.h."""

READY: Final = "ready"
"""The daemon serves its GPU."""

UNUSED: Final = "unused"
"""Nobody has needed this daemon for ``end_unused_after_s``."""

USED: Final = "used"
"""Somebody needs it again, after ``UNUSED``."""
