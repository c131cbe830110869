"""Kernels that bring their own pager along: the library that is loaded into them before anything
else, and moves their GPU memory from inside (see docs/preload.md). Where it is not to be had, the
kernel starts without it and the driver's checkpoint moves its memory."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kiwi_core import preload
from kiwi_core.config import ENV_PAGER, INPROCESS
from kiwi_jupyter.server_ext.placer import is_disabled

if TYPE_CHECKING:
    from collections.abc import MutableMapping

log = logging.getLogger("kiwi.preload")

COMPILE_WITHIN_S: Final = 60.0
"""A kernel does not wait longer than this for a library that is compiled for the first time."""

_said: set[str] = set()


def wanted(env: MutableMapping[str, str], default: str) -> bool:
    """``env`` is what the kernel gets; ``default``: the server's setting."""
    return env.get(ENV_PAGER, default) == INPROCESS and not is_disabled(env)


async def add(env: MutableMapping[str, str]) -> bool:
    """Into what a kernel gets. False, and said once, where the library is not to be had."""
    try:
        library = await asyncio.wait_for(asyncio.to_thread(preload.library), COMPILE_WITHIN_S)
    except preload.Unavailable as error:
        _say_once(f"{error.message} {error.remedy}")
        return False
    except asyncio.TimeoutError:
        _say_once("It is still being compiled; kernels that are started later will have it.")
        return False
    env.update(preload.environment(library, env))
    return True


def _say_once(why: str) -> None:
    if why not in _said:
        _said.add(why)
        log.warning("kernels start without Kiwi's own pager (checkpoints move them): %s", why)
