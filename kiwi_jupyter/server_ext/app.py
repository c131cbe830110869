"""The extension's application: its settings, and what it adds to the server."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_server.extension.application import ExtensionApp
from traitlets import Bool, Enum, Float, List, Unicode, Union

from kiwi_core import config
from kiwi_jupyter.server_ext import metrics, preloading
from kiwi_jupyter.server_ext.bare_kernels import BareKernels
from kiwi_jupyter.server_ext.documents import Documents
from kiwi_jupyter.server_ext.provisioner import install
from kiwi_jupyter.server_ext.routes import ROUTES
from kiwi_jupyter.server_ext.scrapes import Scrapes
from kiwi_jupyter.server_ext.service import KiwiService


class KiwiServerApp(ExtensionApp):
    """Who shares the GPU, and how long the wait is: REST interface and stream for the sidebar."""

    name = "kiwi_jupyter"
    extension_url = "/lab"
    load_other_extensions = True

    socket_dir = Unicode(
        "",
        help="Where the daemons' sockets are. Empty: KIWI_SOCKET_DIR, or the machine's usual"
        " place. What is set here also holds for the kernels that this server starts.",
    ).tag(config=True)

    autostart = Bool(
        True,
        help="Start a daemon when somebody opens the sidebar (or asks for the status) and none"
        " answers. Never at the server's start, and only where there is an NVIDIA driver or"
        " KIWI_DAEMON_ARGS is set.",
    ).tag(config=True)

    may_change_settings: Union = Union(
        [Bool(), List(Unicode())],
        default_value=True,
        help="Who may change a GPU's time quantum and mode through this server: True (everybody"
        " whom the server's Authorizer allows to write), False (nobody), or a list of user names."
        " The daemon decides, too: it obeys its owner, root and its admin group only.",
    ).tag(config=True)

    stream_interval_s = Float(
        0.1,
        min=0.0,
        max=10.0,
        help="Least time between two messages of the stream, in seconds. Longer saves processor"
        " time with many sessions; a change after a quiet time is always said at once.",
    ).tag(config=True)

    history_s = Float(
        1800.0,
        min=0.0,
        max=86_400.0,
        help="How far back the timeline reaches, in seconds, as far as the daemon remembers (an"
        " hour). 0: no timeline.",
    ).tag(config=True)

    bring_back = Bool(
        True,
        help="Pass hints on to the daemon that a notebook is about to be used, so that its memory"
        " is back in an idle GPU before its next cell is run.",
    ).tag(config=True)

    place_kernels = Bool(
        True,
        help="On a machine with several GPUs, place each kernel that this server starts on the one"
        " with the shortest expected wait, by CUDA_VISIBLE_DEVICES; unless that or KIWI_GPU is set"
        " in the server's environment or the kernelspec's.",
    ).tag(config=True)

    pager = Enum(
        list(config.PAGERS),
        default_value=config.AUTO,
        help="What moves the GPU memory of the kernels that this server starts. auto: Kiwi's"
        " library in the kernel, where the machine has proven itself for it, else the driver."
        " checkpoint: the driver, from outside. inprocess: the library, proven or not."
        " KIWI_PAGER in a kernelspec's or the server's environment goes first.",
    ).tag(config=True)

    service: KiwiService
    scrapes: Scrapes

    def may_change(self, user: str) -> bool:
        """Return whether ``may_change_settings`` allows one user."""
        allowed = self.may_change_settings
        return bool(allowed) if isinstance(allowed, bool) else user in allowed

    # --- called by Jupyter Server, in this order ------------------------------------------------

    def initialize_settings(self) -> None:
        assert self.serverapp is not None
        if self.socket_dir:
            os.environ[config.ENV_SOCKET_DIR] = os.path.abspath(self.socket_dir)
        directory = Path(os.path.abspath(config.socket_dir()))
        self.service = KiwiService(
            directory,
            Documents(self.serverapp.session_manager),
            BareKernels(self.serverapp.kernel_manager),
            self.log,
            autostarts=self.autostart,
            may_set=self.may_change_settings not in (False, []),
            interval_s=self.stream_interval_s,
            history_s=self.history_s,
            disabled=config.is_disabled(os.environ),
        )
        self.scrapes = Scrapes(self.service)
        metrics.register(self.scrapes.readings)

        preloading.compile_ahead()
        install(self.serverapp, directory, places=self.place_kernels, pager=self.pager)

    def initialize_handlers(self) -> None:
        self.handlers.extend(ROUTES)

    async def stop_extension(self) -> None:
        metrics.unregister()
        self.scrapes.close()
        await self.service.close()
