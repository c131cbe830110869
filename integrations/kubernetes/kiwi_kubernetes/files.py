"""Files for other programs to read, which are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import NoReturn


def replace(path: Path, text: str) -> None:
    """Put ``text`` into the file ``path``, which everybody may read; readers see the old text or
    the new one. The directory is made if it is missing. Raises ``CallerError``."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Hidden, because CDI and Node Feature Discovery read the other files of their directories.
        descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        _refuse(path, error)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        os.replace(new, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(new)
        _refuse(path, error)


def _refuse(path: Path, error: OSError) -> NoReturn:
    raise CallerError(
        "cannot-write",
        f"{path} cannot be written: {error.strerror}.",
        "Let this user write the directory, or mount it into the container for writing.",
    ) from error
