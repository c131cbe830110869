"""The kernels of this server whose environment has no Kiwi: what their users should know."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final

from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from kiwi_core.environments import loads_kiwi
from kiwi_jupyter.server_ext.model import BareKernel

if TYPE_CHECKING:
    from collections.abc import Mapping

_INSTALL: Final = (
    "Install Kiwi there (`{python} -m pip install .` in a checkout of it) and restart the kernel."
)
_GATED: Final = (
    "The environment of this kernel has no Kiwi. Its calls to the GPU take their turns all the "
    "same, but no cell shows that it waits."
)
_FREE: Final = (
    "The environment of this kernel has no Kiwi, so this notebook takes no part: it uses the GPU "
    "beside whoever has it, and either may run out of memory."
)
_NO_PYTHON: Final = "Kiwi's part in notebooks is for Python kernels; others only have its gate."


class BareKernels:
    """``kernels`` is the server's kernel manager."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._looked: dict[tuple[str, object], BareKernel | None] = {}
        """Findings by kernel id and process: a restart may find Kiwi installed."""
        self.found: Mapping[str, BareKernel] = {}
        """Kernels without Kiwi by id; a new object after each change."""

    def refresh(self) -> bool:
        """Look at kernels that have started since. Return whether anything changed."""
        there = {}
        for id_ in self._kernels.list_kernel_ids():
            manager = self._kernels.get_kernel(id_)
            key = (id_, getattr(_provisioner(manager), "pid", None))
            there[key] = self._looked[key] if key in self._looked else _look(manager)
        self._looked = there
        found = {id_: bare for (id_, _), bare in there.items() if bare is not None}
        if found == self.found:
            return False
        self.found = found
        return True


def _look(manager: Any) -> BareKernel | None:
    """Return what is to be said of a kernel; ``None`` if it has Kiwi, or if that is unknown."""
    provisioner = _provisioner(manager)
    if not isinstance(provisioner, LocalProvisioner):
        return None  # on another machine, perhaps: its files are not here
    spec = manager.kernel_spec
    python = _interpreter(spec.argv[0]) if spec is not None and spec.argv else ""
    is_python = spec is not None and spec.language.lower() == "python"
    if not python or (is_python and loads_kiwi(python) is not False):
        return None
    gated = bool(getattr(provisioner, "has_gate", False))
    remedy = _INSTALL.format(python=python) if is_python else _NO_PYTHON
    return BareKernel(takes_part=gated, text=f"{_GATED if gated else _FREE} {remedy}")


def _provisioner(manager: Any) -> object:
    return getattr(manager, "provisioner", None)


def _interpreter(word: str) -> str:
    """Return the program that Jupyter starts for the first word of a kernelspec's ``argv``."""
    if word in (
        "python",
        f"python{sys.version_info[0]}",
        f"python{sys.version_info[0]}.{sys.version_info[1]}",
    ):
        return sys.executable
    return word if os.path.isabs(word) else shutil.which(word) or ""
