"""Let the programs of this kernel see the GPU, and the driver, of the daemon that it shares."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from kiwi_core.wire.messages import Emulation, Welcome
    from kiwi_jupyter.kernel.driver_gate import DriverGate


def show_only(welcome: Welcome) -> None:
    """Let CUDA see only the GPU that this kernel shares, since it would use the first one. Do
    nothing if the user has set the variable to several GPUs or to none, or if CUDA is loaded: it
    has read the variable then."""
    from kiwi_core.client.connection import loaded_cuda_library
    from kiwi_core.client.own_gpus import ENV_VISIBLE, only_visible

    theirs = ENV_VISIBLE in os.environ and not only_visible(os.environ)
    if not theirs and not loaded_cuda_library():
        os.environ[ENV_VISIBLE] = welcome.gpu_uuid


def mixes_drivers(emulation: Emulation) -> CallerError | None:
    """Return the error for a process that has loaded another driver than the daemon's."""
    from kiwi_core.client.connection import loaded_cuda_library

    loaded = loaded_cuda_library()
    if not loaded or _same_file(loaded, emulation.libcuda):
        return None
    return CallerError(
        "mixed-drivers",
        f"This kernel has loaded the CUDA driver {loaded}, but the daemon emulates GPUs:"
        " the two cannot be mixed.",
        "Restart the kernel, or stop the emulating daemon.",
    )


def use_emulated(emulation: Emulation, driver_gate: DriverGate) -> None:
    """Load the daemon's emulated driver. A kernel that was started where it is found by name
    reaches it as it would a real one: nothing is loaded. Raise ``CallerError``."""
    import kiwi_emulator

    os.environ.update(emulation.env)
    # Children (`!python train.py`) load it by name.
    os.environ["LD_LIBRARY_PATH"] = kiwi_emulator.library_path(
        emulation.libcuda, emulation.libnvml, before=os.environ.get("LD_LIBRARY_PATH", "")
    )
    try:
        if not _same_file(driver_gate.real, emulation.libcuda):
            gated = driver_gate.before_driver(emulation.libcuda)
            kiwi_emulator.load(None if gated else emulation.libcuda, emulation.libnvml)
    except OSError as error:
        raise CallerError(
            "no-emulator",
            f"The emulated driver could not be loaded: {error}.",
            "Restart the daemon; `kiwi doctor` says what this machine lacks.",
        ) from error


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
