"""Kiwi in an IPython kernel: ``load_ipython_extension`` is called at the start of every kernel.

Loading is cheap and never fails: if a part cannot be loaded, the kernel starts as if Kiwi were
absent. Nothing connects to a daemon before a cell needs the GPU.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kiwi_jupyter.kernel.extension import Extension

_log = logging.getLogger("kiwi.kernel")
_loaded: Extension | None = None


def load_ipython_extension(shell: Any) -> None:
    """Load Kiwi. IPython calls this, perhaps more than once."""
    global _loaded
    try:
        from kiwi_jupyter.kernel.extension import Extension

        if _loaded is None:
            extension = Extension(shell)
            extension.install()
            _loaded = extension
    except Exception:  # noqa: BLE001 - a kernel must start whatever is wrong with Kiwi
        _log.exception("Kiwi could not be loaded; this kernel runs without it")


def unload_ipython_extension(_shell: Any) -> None:
    """Give the GPU back and remove all traces (``%unload_ext``)."""
    global _loaded
    extension, _loaded = _loaded, None
    if extension is not None:
        extension.uninstall()
