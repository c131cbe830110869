"""The name of this kernel, as other users' screens show it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONNECTION_FILE = re.compile(r"kernel-(.+)\.json\Z")


def notebook_name(user_ns: Mapping[str, Any]) -> str:
    """Return the notebook's file name; ``kernel <pid>`` if there is none."""
    path = _notebook_path(user_ns)
    return path.name if path else f"kernel {os.getpid()}"


def notebook_folder(user_ns: Mapping[str, Any]) -> str:
    """Return the folder that the notebook is in; "" if it is not known."""
    path = _notebook_path(user_ns)
    return "" if path is None or str(path.parent) == "." else str(path.parent)


def _notebook_path(user_ns: Mapping[str, Any]) -> Path | None:
    """Return what Jupyter Server or VS Code give. For a session without a name the server gives
    the folder of its kernel, with a slash behind it."""
    for named in (os.environ.get("JPY_SESSION_NAME"), user_ns.get("__vsc_ipynb_file__")):
        if type(named) is str and named and not named.endswith("/"):
            return Path(named)
    return None


def kernel_id() -> str:
    """Return Jupyter's id of this kernel, from its connection file; "" outside Jupyter."""
    module = sys.modules.get("ipykernel.kernelapp")
    if module is None or not module.IPKernelApp.initialized():
        return ""
    file = os.path.basename(str(module.IPKernelApp.instance().connection_file))
    found = _CONNECTION_FILE.match(file)
    return found[1] if found else ""
