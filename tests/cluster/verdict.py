"""Collect what the checks find, and print it line by line."""

from __future__ import annotations

import re
import sys


class Verdict:
    """``check`` prints ``ok`` or ``FAIL`` and continues; ``failed`` counts."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def check(self, what: str, found: str, pattern: str) -> bool:
        """Return whether ``pattern`` is in ``found``; show the end of it if not."""
        return self.judge(what, re.search(pattern, found, re.MULTILINE) is not None, found)

    def judge(self, what: str, good: bool, found: object = "") -> bool:
        print("ok   " if good else "FAIL ", what, sep="", flush=True)
        self.passed += good
        self.failed += not good
        if not good:
            for line in str(found).splitlines()[-25:]:
                print("       ", line, flush=True)
        return good

    def close(self) -> int:
        """Print the verdict; return the exit status."""
        print(f"\n{self.passed} checks hold, {self.failed} fail.", flush=True)
        return 1 if self.failed else 0


def say(text: str) -> None:
    print(f"---- {text}", file=sys.stdout, flush=True)
