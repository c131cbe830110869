"""Starts local kernels as Jupyter does. It first chooses a GPU for kernels whose user chose none,
and adds Kiwi's gate, or its in-process pager on request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from kiwi_core.config import AUTO
from kiwi_jupyter.server_ext import leaving, preloading
from kiwi_jupyter.server_ext.placer import VISIBLE, Placer

if TYPE_CHECKING:
    from pathlib import Path

NAME: Final = "kiwi-provisioner"
"""Name of the entry point by which Jupyter finds ``KiwiProvisioner``."""

NOTEBOOK: Final = "JPY_SESSION_NAME"
"""Variable in which Jupyter Server tells a kernel the path of its notebook."""

_JUPYTERS_OWN: Final = "local-provisioner"

log = logging.getLogger("kiwi.placement")

_placer: Placer | None = None
"""One for the process, because Jupyter's factory makes provisioners without a way to pass them
anything.
"""

_places = True
_pager = AUTO
"""Default for kernels whose environment does not name a pager."""


def install(
    serverapp: Any, socket_dir: Path | None = None, *, places: bool = True, pager: str = AUTO
) -> bool:
    """Make ``KiwiProvisioner`` the default of this server. Called once, by the server extension.

    Return false, and change nothing, if another default has been chosen. Kernelspecs that name a
    provisioner are not affected by a default.
    """
    global _placer, _places, _pager
    factory = KernelProvisionerFactory.instance(parent=serverapp)
    if factory.default_provisioner_name not in (_JUPYTERS_OWN, NAME):
        log.info("kernels are started by %s: not placed", factory.default_provisioner_name)
        return False
    if not entry_points(group=KernelProvisionerFactory.GROUP_NAME, name=NAME):
        # With a default that Jupyter cannot find, no kernel would start at all.
        log.warning("kiwi-jupyter is not properly installed: kernels are not placed on GPUs")
        return False
    factory.default_provisioner_name = NAME
    _placer = Placer(socket_dir)
    _places, _pager = places, pager
    return True


def placer() -> Placer:
    """Return the placer of this process. It exists, too, if ``JUPYTER_DEFAULT_PROVISIONER_NAME``
    names the provisioner and no server extension runs.
    """
    global _placer
    if _placer is None:
        _placer = Placer()
    return _placer


class KiwiProvisioner(LocalProvisioner):
    """The provisioner of a kernel. It lives over the kernel's restarts, and chooses a GPU at each
    start.
    """

    _end_requested = False
    """True once a signal that ends it was sent to the kernel's process."""
    has_gate = False
    """Whether the kernel was started with Kiwi's library in front of the driver."""

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Prepare a start of the kernel. The result's ``env`` is what the kernel gets: the
        server's, the caller's and the kernelspec's. It is not kept for a restart.
        """
        launch = await super().pre_launch(**kwargs)
        self._end_requested = self.has_gate = False
        env = launch["env"]
        try:
            gpu = await placer().place(self.kernel_id, env) if _places else None
            if gpu is not None:
                env[VISIBLE] = gpu
            self.has_gate = await preloading.add(env, _pager)
        except Exception:  # the kernel must start, whatever is wrong with Kiwi
            log.exception("kernel %s is started as if there were no Kiwi", self.kernel_id)
        return launch

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Start the kernel. A daemon that expects it learns its process: the kernel may end, or
        belong to an environment without Kiwi, and then never says that it is there."""
        try:
            connection_info = await super().launch_kernel(cmd, **kwargs)
        except BaseException:
            await placer().ended(self.kernel_id)
            raise
        name = os.path.basename((kwargs.get("env") or {}).get(NOTEBOOK, ""))
        try:
            await placer().launched(self.kernel_id, self.pid or 0, name or f"kernel {self.pid}")
        except Exception:  # the kernel has started, whatever is wrong with Kiwi
            log.exception("kernel %s is not introduced", self.kernel_id)
        return connection_info

    async def send_signal(self, signum: int) -> None:
        """Move the kernel's memory out before a kill, if its driver needs that."""
        if signum in (signal.SIGTERM, signal.SIGKILL) and self.pid and leaving.needed():
            within_s = leaving.AGAIN_S if self._end_requested else leaving.WITHIN_S
            self._end_requested = True
            try:
                await asyncio.to_thread(leaving.move_out, self.pid, placer().socket_dir, within_s)
            except Exception:  # the kernel must end, whatever is wrong with Kiwi
                log.exception("kernel %s is ended as if there were no Kiwi", self.kernel_id)
        await super().send_signal(signum)

    async def cleanup(self, restart: bool = False) -> None:
        if not restart:
            await placer().ended(self.kernel_id)
        await super().cleanup(restart=restart)
