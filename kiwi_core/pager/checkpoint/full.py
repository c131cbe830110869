"""A GPU that is so full that the driver cannot move memory out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kiwi_core.pager.api import Refused
from kiwi_core.pager.checkpoint.ports import Stop
from kiwi_core.states import Reason

if TYPE_CHECKING:
    from kiwi_core.config import Config

# The text has no figure: the user would get a notice at each change of it.
_FULL: Final = Refused(
    Reason.NO_ROOM,
    "The GPU is full to the last megabytes, and the driver needs some tens of MiB of free GPU "
    "memory to move a program's memory out. Free some GPU memory (in PyTorch: "
    "torch.cuda.empty_cache()), or end a program that uses the GPU; Kiwi tries again.",
)


def check_not_full(free_bytes: int, total_bytes: int, config: Config) -> None:
    """Raise ``Stop`` if hardly any GPU memory is free: a checkpoint could fail.

    With less than 2 MiB free, an H200 (driver 580.159.04) answered OUT_OF_MEMORY after 4 s. The
    program went on unharmed, but from then on each checkpoint of it was answered with UNKNOWN,
    however much was free. With about 65 MiB free it moved a process out.
    """
    share_bytes = total_bytes // config.checkpoint_room_share
    left_bytes = min(config.checkpoint_room_bytes, share_bytes)
    # Half of what the library leaves free: it measures in another way and rounds to blocks.
    if free_bytes < left_bytes // 2:
        raise Stop(_FULL)
