"""The result codes of the driver and of NVML for users: code, sentence, remedy."""

from __future__ import annotations

from typing import Final, NamedTuple

from kiwi_core.errors import GpuError


class _Meaning(NamedTuple):
    code: str
    sentence: str
    remedy: str = ""


INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
OPERATING_SYSTEM: Final = 304
NOT_READY: Final = 600
NOT_PERMITTED: Final = 800
NOT_SUPPORTED: Final = 801

_INSTALL: Final = (
    "Install NVIDIA's driver, or use the emulated one: kiwi daemon --emulate 1x512MiB."
)
UPGRADE: Final = "Kiwi needs driver 570 or newer (CUDA 12.8)."
_PERMISSION: Final = (
    "Run the daemon as the same user as the notebooks, or give it CAP_SYS_PTRACE, in the same PID "
    "namespace, and switch on persistence mode (nvidia-smi -pm 1)."
)
_PROCESS: Final = "See the limits of the driver's checkpoints: kiwi doctor."

_CUDA: Final[dict[int, _Meaning]] = {
    1: _Meaning("not-a-cuda-process", "the driver does not know this process as one using CUDA"),
    OUT_OF_MEMORY: _Meaning(
        "no-gpu-memory", "the GPU has not enough free memory", "Free GPU memory and try again."
    ),
    3: _Meaning("not-initialised", "the CUDA driver is not initialised"),
    34: _Meaning("no-driver", "only the stub of the CUDA driver was found", _INSTALL),
    46: _Meaning("gpu-unavailable", "the GPU is busy or set to exclusive use"),
    100: _Meaning("no-gpu", "the driver sees no GPU", "Check nvidia-smi and CUDA_VISIBLE_DEVICES."),
    201: _Meaning("bad-context", "the process's CUDA context is invalid"),
    OPERATING_SYSTEM: _Meaning(
        "os-call-failed",
        "the driver could not reach the process, or its restore has failed for good",
        _PERMISSION,
    ),
    401: _Meaning("illegal-state", "the process is in a state that does not allow this"),
    500: _Meaning("driver-too-old", "the driver has no checkpoint calls", UPGRADE),
    NOT_READY: _Meaning(
        "lock-timeout", "the process did not come to rest in time", "A long kernel may be running."
    ),
    NOT_PERMITTED: _Meaning("not-permitted", "the driver does not permit it", _PERMISSION),
    NOT_SUPPORTED: _Meaning(
        "unsupported", "the driver cannot checkpoint this process on this machine", _PROCESS
    ),
    802: _Meaning("driver-not-ready", "the driver is not ready", "Is nvidia-fabricmanager up?"),
    803: _Meaning(
        "driver-mismatch",
        "the driver's library and its kernel module are of different versions",
        "Reboot after a driver update.",
    ),
}

_NVML: Final[dict[int, _Meaning]] = {
    1: _Meaning("nvml-uninitialised", "NVML is not initialised"),
    3: _Meaning("nvml-unsupported", "NVML cannot do this on this GPU"),
    4: _Meaning(
        "nvml-not-permitted", "NVML does not permit this", "Run as root, or ask the admin."
    ),
    6: _Meaning(
        "nvml-not-found", "NVML knows no such GPU", "See the GPUs there are: nvidia-smi -L."
    ),
    9: _Meaning("nvml-no-driver", "NVIDIA's kernel driver is not loaded", _INSTALL),
    12: _Meaning("nvml-no-library", "libnvidia-ml.so.1 was not found", _INSTALL),
    13: _Meaning("nvml-driver-too-old", "this version of NVML lacks a function", UPGRADE),
    15: _Meaning("nvml-gpu-lost", "the GPU has fallen off the bus", "Reboot; check dmesg for Xid."),
    999: _Meaning(
        "nvml-unknown",
        "NVML reports an internal error",
        "See whether nvidia-smi works and dmesg shows an Xid; if it stays so, reload the driver.",
    ),
    18: _Meaning(
        "nvml-driver-mismatch",
        "the driver's library and its kernel module are of different versions",
        "Reboot after a driver update.",
    ),
}


def cuda_error(what: str, driver_code: int | None, words: str = "") -> GpuError:
    """Return the error of ``what`` (``"lock of process 12"``); ``words`` are the driver's own."""
    meaning = _CUDA.get(driver_code) if driver_code is not None else None
    if meaning is None:
        meaning = _Meaning("driver", words or "the driver failed")
    return _error(what, meaning, driver_code, f"CUDA error {driver_code}")


def nvml_error(what: str, nvml_code: int, words: str = "") -> GpuError:
    meaning = _NVML.get(nvml_code) or _Meaning("nvml-failed", words or "NVML failed")
    return _error(what, meaning, nvml_code, f"NVML error {nvml_code}")


def no_driver_error(words: str) -> GpuError:
    """Return the error for a CUDA library that could not be loaded."""
    return GpuError("no-driver", f"No CUDA driver could be loaded: {words.rstrip('.')}.", _INSTALL)


def binding_error(what: str, error: Exception, remedy: str) -> GpuError:
    """Return the error for a Python binding that raised something of its own, which is no result
    code: it does not fit the driver's library, or is broken."""
    sentence = f"{what[:1].upper()}{what[1:]} failed: the Python binding raised "
    words = f"{type(error).__name__}: {error}".rstrip(". ")
    return GpuError("binding", f"{sentence}{words}.", remedy)


def too_old_error(what: str) -> GpuError:
    meaning = _CUDA[500]
    return _error(what, meaning, 500, "CUDA error 500")


def _error(what: str, meaning: _Meaning, number: int | None, tag: str) -> GpuError:
    tail = f" ({tag})" if number is not None else ""
    sentence = f"{what[:1].upper()}{what[1:]} failed: {meaning.sentence}{tail}."
    return GpuError(meaning.code, sentence, meaning.remedy, driver_code=number)
