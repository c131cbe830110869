"""Kiwi in Jupyter: the kernel side (``kernel``) and the server's side (``server_ext``)."""

from __future__ import annotations

TYPE_CHECKING = False  # kernels import this package, too: nothing is loaded here
if TYPE_CHECKING:
    from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Called by Jupyter Server when it loads the extension ``kiwi_jupyter``."""
    from kiwi_jupyter.server_ext.app import KiwiServerApp

    return [{"module": "kiwi_jupyter.server_ext.app", "app": KiwiServerApp}]
