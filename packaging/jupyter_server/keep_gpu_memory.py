"""A jupyter_server_config.py that ends idle kernels, but keeps those with GPU memory for longer.

An idle kernel whose memory is paged out costs the GPU nothing, and ending it loses that memory. The
server also counts as active meanwhile, so that JupyterHub's idle culler does not end it.
"""

import asyncio
from datetime import timedelta

from jupyter_server._tz import utcnow
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

from kiwi_core import config
from kiwi_core.client import discover
from kiwi_core.client.gpu_placement import WITHIN_S, statuses

KEPT_FOR = timedelta(days=3)
"""How long an idle kernel with GPU memory is kept."""


class KeepingKernelManager(AsyncMappingKernelManager):
    async def cull_kernel_if_idle(self, kernel_id):
        kernel = self._kernels[kernel_id]
        now = utcnow()
        if now - kernel.last_activity < KEPT_FOR and kernel_id in await asyncio.to_thread(holders):
            self.last_kernel_activity = now
        else:
            await super().cull_kernel_if_idle(kernel_id)


def holders():
    """Return the ids of the kernels that have GPU memory, in the GPU or paged out."""
    gpus = statuses(discover(config.socket_dir(), None), WITHIN_S)
    return {
        session.kernel_id
        for gpu in gpus
        for session in gpu.sessions
        if session.resident_bytes or session.paged_out_bytes
    }


c = get_config()  # noqa: F821
c.ServerApp.kernel_manager_class = KeepingKernelManager
c.MappingKernelManager.cull_idle_timeout = 3600
