"""The command line: ``kiwi …``. Every command is one module, imported only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is without the program's name (default: ``sys.argv``).

    Return the exit code, and do not raise for faults of users or machines: 0 done, 1 failed (with
    a sentence on standard error), 2 not understood, 130 interrupted.
    """
    from kiwi_core.cli import app

    return app.run(argv)
