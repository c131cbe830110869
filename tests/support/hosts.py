"""Emulated hosts that a test took down: on ``595-open``, by killing a restored, live program."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_told: set[Path] = set()


def record() -> None:
    """Record all emulated machines that this process and its programs make."""
    from kiwi_emulator import ENV_RECORD

    directory = Path(tempfile.mkdtemp(prefix="kiwi-emulated-hosts-"))
    directory.chmod(0o711)  # programs of other users also write into the file
    made = directory / "made"
    made.touch()
    made.chmod(0o666)
    os.environ[ENV_RECORD] = str(made)


def fallen() -> dict[Path, int]:
    """Return machines that are down and were not returned before, each with the killed pid."""
    import kiwi_emulator as emulator

    try:
        made = Path(os.environ.get(emulator.ENV_RECORD, "")).read_text().splitlines()
    except OSError:
        return {}  # none was made
    down = {}
    for path in {Path(line) for line in made} - _told:
        pid = emulator.host_down(path) if path.exists() else 0
        if pid:
            down[path] = pid
    _told.update(down)
    return down
