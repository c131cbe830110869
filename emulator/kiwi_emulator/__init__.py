"""An emulated CUDA driver and NVML for machines without a GPU.

Two C libraries take the place of ``libcuda.so.1`` and ``libnvidia-ml.so.1``, so that the unmodified
``cuda-bindings``, ``cuda-core`` and ``nvidia-ml-py`` run against them, across processes. Device
memory is host memory; one shared *state file* records what each process holds. The emulator proves
control logic (states, quota, ordering, crash recovery, bytes preserved); it proves nothing about
speed, and it says everywhere that it is emulated.

For the daemon (``--emulate``), the kernel's loader and tests::

    libs = emulator.build()
    emulator.create_state(path, emulator.parse_gpus("2x512MiB"))
    subprocess.Popen(cmd, env=os.environ | emulator.environment(path, libs))

Of Kiwi the package imports only ``compiled``.
"""

from __future__ import annotations

from kiwi_emulator._build import EmulatedLibraries, build
from kiwi_emulator._faults import Fault, Faults, Operation
from kiwi_emulator._load import activate, environment, library_path, load, loaded_libcuda
from kiwi_emulator._quirks import DEFAULT_DRIVER, DRIVERS, ENV_DRIVER, QUIRKS
from kiwi_emulator._state import (
    ENV_RECORD,
    ENV_STATE,
    Books,
    GpuBooks,
    GpuSpec,
    ProcessBooks,
    StateError,
    books,
    create_state,
    has_quirk,
    host_down,
    lose_gpu,
    make_socket_dir,
    parse_gpus,
    parse_machine,
    set_context_bytes,
    set_copy_bandwidth,
    set_driver,
    set_driver_version,
    set_quirk,
)

MODULE_IMAGE = b"kiwi-emulated-module\0"
"""Image that ``cuModuleLoadData`` accepts: a module that holds every built-in kernel.

Parameters: ``fill_u32(u64 ptr, u64 n, u32 value)``, ``add_u32(u64 ptr, u64 n, u32 value)``,
``xorshift_u32(u64 ptr, u64 n, u32 seed)``, ``checksum_u64(u64 ptr, u64 n, u64 out)`` (the sum of
``x[i] * (i + 1)`` modulo 2**64 over n 32-bit words, written to the device address ``out``),
``spin_ns(u64 duration)``.
"""

__all__ = [
    "DEFAULT_DRIVER",
    "DRIVERS",
    "ENV_DRIVER",
    "ENV_RECORD",
    "ENV_STATE",
    "MODULE_IMAGE",
    "QUIRKS",
    "Books",
    "EmulatedLibraries",
    "Fault",
    "Faults",
    "GpuBooks",
    "GpuSpec",
    "Operation",
    "ProcessBooks",
    "StateError",
    "activate",
    "books",
    "build",
    "create_state",
    "environment",
    "has_quirk",
    "host_down",
    "library_path",
    "load",
    "loaded_libcuda",
    "lose_gpu",
    "make_socket_dir",
    "parse_gpus",
    "parse_machine",
    "set_context_bytes",
    "set_copy_bandwidth",
    "set_driver",
    "set_driver_version",
    "set_quirk",
]
