"""Lets a daemon run on emulated GPUs: the libraries, the shared state, and who uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core import emulator
from kiwi_core.errors import CallerError
from kiwi_core.wire.messages import Emulation

if TYPE_CHECKING:
    from pathlib import Path


def prepare(
    sizes: str, directory: Path, copy_bytes_per_s: int | None, driver_version: int | None = None
) -> Emulation:
    """Builds the emulated driver (first use), makes or takes over the shared state in
    ``directory``, and loads both into this process. ``driver_version``: 13040 is CUDA 13.4.

    Programs that outlived an earlier daemon keep their memory in the state that is there, so one
    with the same GPUs is taken over; one with other GPUs that is in use is an error.
    """
    try:
        specs = emulator.parse_gpus(sizes)
        libraries = emulator.build()
    except (ValueError, RuntimeError) as error:
        raise CallerError("emulator", str(error)) from error
    state = directory / "emulated-gpus"
    if not _can_take_over(state, [spec.total_bytes for spec in specs]):
        try:
            emulator.create_state(state, specs)
        except OSError as error:
            raise CallerError(
                "emulator",
                f"The emulated GPUs' state cannot be written to {state}: {error.strerror}.",
                "Free some disk space, or name another directory with --socket-dir.",
            ) from error
    if driver_version is not None:
        emulator.set_driver_version(state, driver_version)
    if copy_bytes_per_s is not None:
        emulator.set_copy_bandwidth(state, copy_bytes_per_s)
    emulator.activate(state, libraries)
    return Emulation(
        libcuda=str(libraries.libcuda.absolute()),
        libnvml=str(libraries.libnvml.absolute()),
        env={emulator.ENV_STATE: str(state)},
    )


def _can_take_over(state: Path, sizes_bytes: list[int]) -> bool:
    if not state.exists():
        return False
    try:
        books = emulator.books(state)
    except emulator.StateError:
        return False  # damaged, or of another version: nobody can use it
    if [gpu.total_bytes for gpu in books.gpus] == sizes_bytes:
        return True
    # Also those that hold nothing yet: a daemon that serves them, for one.
    if books.processes:
        raise CallerError(
            "emulated-gpus-in-use",
            f"Programs still use emulated GPUs of other sizes ({state}).",
            "End them, or start with the same --emulate, or name another --socket-dir.",
        )
    return False
