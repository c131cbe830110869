"""The blocking client of a Kiwi daemon. Importing this loads nothing until a name is used.

``Client`` is the connection of one process, ``Ticket`` is one wait for the GPU, and ``discover``
finds sockets. ``kiwi_core.client.autostart`` starts a daemon where none runs.
"""

from __future__ import annotations

TYPE_CHECKING = False  # does not load typing
if TYPE_CHECKING:
    from kiwi_core.client.client import Client, Ticket
    from kiwi_core.client.discovery import discover
    from kiwi_core.client.requests import LeaseCancelled

__all__ = ["Client", "LeaseCancelled", "Ticket", "discover"]

_HOMES = {
    "Client": "client",
    "LeaseCancelled": "requests",
    "Ticket": "client",
    "discover": "discovery",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
