"""Close connections in the child when their process forks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from kiwi_core.client.channel import Channel

_channels: WeakSet[Channel] = WeakSet()


def let_go_in_children(channel: Channel) -> None:
    """Have forked children close their copy of the channel's socket from now on.

    Otherwise the daemon would not see the end of the parent while a child lives.
    """
    _channels.add(channel)


def _in_child() -> None:
    for channel in tuple(_channels):
        channel.let_go()


os.register_at_fork(after_in_child=_in_child)
