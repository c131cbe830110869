"""The settings of Kiwi in a kernel: ``c.Kiwi.… = …`` in ``ipython_kernel_config.py``."""

from __future__ import annotations

import os

from traitlets import Bool, Float, List, Unicode
from traitlets.config import Configurable

from kiwi_core.config import ENV_GPU


class Kiwi(Configurable):
    """Kiwi in this kernel: sharing the GPU with other notebooks."""

    enabled = Bool(
        True,
        help="Whether cells that use the GPU wait for their turn. `%kiwi on|off` changes it"
        " in a running kernel; the environment variable KIWI_DISABLE=1 switches Kiwi off too.",
    ).tag(config=True)

    gpu = Unicode(
        "",
        help="The GPU to use: a UUID, the beginning of one, or an index. Empty: KIWI_GPU, else the"
        " first that CUDA would show this kernel and that has a daemon.",
    ).tag(config=True)

    socket_dir = Unicode(
        "",
        help="Where the daemons' sockets are. Empty: KIWI_SOCKET_DIR, else /run/kiwi if it"
        " exists, else $XDG_RUNTIME_DIR/kiwi, else a private directory under the temp dir.",
    ).tag(config=True)

    autostart = Bool(
        True,
        help="Whether to start a daemon where there is none and the machine has a GPU."
        " KIWI_DAEMON_ARGS adds arguments to it.",
    ).tag(config=True)

    autostart_timeout_s = Float(
        60.0, min=0.0, help="Seconds to wait for a daemon that is being started."
    ).tag(config=True)

    waiting_line_delay_s = Float(
        0.3, min=0.0, help="Seconds of waiting before the line about it appears under the cell."
    ).tag(config=True)

    daemon_grace_s = Float(
        10.0,
        min=0.0,
        help="Seconds without a daemon after which a waiting cell runs without Kiwi; and how long"
        " the first GPU cell waits for a daemon that was here and may be restarting.",
    ).tag(config=True)

    turn_grace_s = Float(
        0.25,
        min=0.0,
        help="Seconds that a notebook keeps its turn after a GPU cell, so that the next one goes on"
        " in it: those that Run All has queued, or that a tool sends one after the other. The end"
        " of the quantum ends the turn all the same. 0: each cell is a turn of its own.",
    ).tag(config=True)

    cpu_modules = List(
        Unicode(),
        help="Top-level names of libraries that never use the GPU, beside those that Kiwi knows.",
    ).tag(config=True)

    gpu_modules = List(
        Unicode(),
        help="Top-level names of libraries whose functions use the GPU, beside those that Kiwi"
        " knows.",
    ).tag(config=True)

    gc_guard = Bool(
        True,
        help="Whether garbage from before the end of a GPU cell is left alone until the next GPU"
        " cell, so that a CPU cell never frees GPU memory by accident.",
    ).tag(config=True)

    def named_gpu(self) -> str:
        """Return the GPU that the user named to Kiwi (not to CUDA); "" for none."""
        return self.gpu or os.environ.get(ENV_GPU, "")
