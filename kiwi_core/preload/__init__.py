"""The library that is preloaded into programs, so that Kiwi owns and gates their GPU memory.

For whoever starts programs under Kiwi::

    program_env |= preload.environment(preload.library(), before=program_env)

docs/preload.md says what it does.  Imports nothing of Kiwi, and nothing but the standard library.
"""

from __future__ import annotations

from kiwi_core.preload._build import NAME, Unavailable, environment, find_compiler, library

__all__ = ["NAME", "Unavailable", "environment", "find_compiler", "library"]
