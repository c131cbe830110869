"""Start kernels with Kiwi's library, which is loaded into them before anything else
(docs/preload.md).

The library is the gate in front of the driver and, on request, the owner of the kernel's GPU
memory, which it then moves from inside. If the library is not available, the kernel starts without
it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final

from kiwi_core import preload
from kiwi_core.config import ENV_PAGER, INPROCESS, is_disabled, pager_of
from kiwi_core.preload import ready

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path

log = logging.getLogger("kiwi.preload")

COMPILE_WITHIN_S: Final = 60.0
"""A kernel does not wait longer than this for a library that is compiled for the first time."""

_said: set[str] = set()
_compiling: threading.Thread | None = None
"""Tried once per server: a build that failed once fails again."""


async def add(env: MutableMapping[str, str], default: str) -> bool:
    """Add the library to the environment that a kernel gets; ``env`` itself, or else ``default``,
    says what moves its memory. Return false if the kernel starts without it.

    A kernel that asks for Kiwi's own pager waits while the library is compiled. For any other it is
    compiled meanwhile, and the kernel itself tries once more before it first uses the GPU.
    """
    if is_disabled(env):
        return False
    pager = env[ENV_PAGER] = pager_of(env, default)
    library = ready.find()
    if library is None and pager == INPROCESS:
        library = await _compiled()
    elif library is None:
        compile_ahead()
    if library is None:
        return False
    env.update(preload.environment(library, env))
    env[preload.ENV_OWN] = preload.OWN_BY_PAGER[pager]
    return True


def compile_ahead() -> None:
    """Compile the library if necessary. Called when a server starts, too."""
    global _compiling
    if _compiling is None and ready.find() is None:
        _compiling = threading.Thread(target=_compile, name="kiwi-compile", daemon=True)
        _compiling.start()


def _compile() -> None:
    try:
        ready.ensure()
    except preload.Unavailable as error:
        _say_once(f"{error.message} {error.remedy}")


async def _compiled() -> Path | None:
    """Compile the library. Return ``None``, and log it once, if it is not available."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(ready.ensure), COMPILE_WITHIN_S)
    except preload.Unavailable as error:
        _say_once(f"{error.message} {error.remedy}")
    except asyncio.TimeoutError:
        _say_once("It is still being compiled; kernels that are started later will have it.")
    return None


def _say_once(why: str) -> None:
    if why not in _said:
        _said.add(why)
        log.warning("kernels start without Kiwi's library (docs/preload.md): %s", why)
