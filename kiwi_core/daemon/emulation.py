"""Let a daemon run on emulated GPUs: build the libraries, make or take over the shared state."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import kiwi_emulator as emulator
from kiwi_core.errors import CallerError
from kiwi_core.wire.messages import Emulation


def prepare(sizes: str, directory: Path, copy_bytes_per_s: int | None) -> Emulation:
    """Build the emulated driver (on first use), make or take over the shared state in
    ``directory``, and load both into this process.

    Programs that outlived an earlier daemon keep their memory in the existing state. A state with
    the same GPUs is therefore taken over; one with other GPUs that is in use is an error.

    Emulated GPUs of root's daemon belong to all users of the machine, as real ones do.
    """
    try:
        specs, driver = emulator.parse_machine(sizes)
        libraries = emulator.build()
    except (ValueError, RuntimeError) as error:
        raise CallerError("emulator", str(error)) from error
    state = directory / "emulated-gpus"
    if not _can_take_over(state, [spec.total_bytes for spec in specs]):
        try:
            emulator.create_state(state, specs, driver, shared=_for_all())
        except OSError as error:
            raise CallerError(
                "emulator",
                f"The emulated GPUs' state cannot be written to {state}: {error.strerror}.",
                "Free some disk space, or name another directory with --socket-dir.",
            ) from error
    elif driver is not None:
        emulator.set_driver(state, driver)
    if copy_bytes_per_s is not None:
        emulator.set_copy_bandwidth(state, copy_bytes_per_s)
    emulator.activate(state, libraries)
    return Emulation(
        libcuda=str(libraries.libcuda.absolute()),
        libnvml=str(libraries.libnvml.absolute()),
        env={emulator.ENV_STATE: str(state)},
    )


def _for_all() -> bool:
    return os.getuid() == 0


def device_file(emulation: Emulation | None) -> str:
    """Return the file that each program with CUDA has open."""
    if emulation is None:
        return "/dev/nvidia-uvm"
    return os.path.realpath(emulation.env[emulator.ENV_STATE])


def hold_state(emulation: Emulation) -> str:
    """Open the state for as long as this process lives; return a name for it in /proc."""
    descriptor = os.open(emulation.env[emulator.ENV_STATE], os.O_RDWR | os.O_CLOEXEC)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def keep_state(emulation: Emulation, held: str) -> None:
    """Make the state's path lead to the one that is ``held`` again, if its directory was deleted or
    replaced. Real GPUs do not need this: their state is in the driver."""
    state = Path(emulation.env[emulator.ENV_STATE])
    if not os.path.exists(held):
        return  # the supervisor has ended, and this daemon is about to
    with suppress(OSError):
        if state.samefile(held):
            return
    with suppress(OSError):
        emulator.make_socket_dir(state, shared=_for_all())
        link = state.with_name(state.name + ".link")
        link.unlink(missing_ok=True)
        link.symlink_to(held)
        link.replace(state)


def _can_take_over(state: Path, sizes_bytes: list[int]) -> bool:
    if not state.exists():
        return False
    try:
        books = emulator.books(state)
    except emulator.StateError:
        return False  # damaged or of another version, so nobody can use it
    if [gpu.total_bytes for gpu in books.gpus] == sizes_bytes:
        return True
    # Processes without memory count, too: for example a daemon that serves these GPUs.
    if books.processes:
        raise CallerError(
            "emulated-gpus-in-use",
            f"Programs still use emulated GPUs of other sizes ({state}).",
            "End them, or start with the same --emulate, or name another --socket-dir.",
        )
    return False
