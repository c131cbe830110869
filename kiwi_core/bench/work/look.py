"""The role that looks at the machine, as a daemon does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kiwi_core.gpu import driver, host, nvml


class Look:
    ENDS_WITHIN_S = 5.0

    def gpus(self) -> list[dict[str, Any]]:
        return [asdict(gpu) for gpu in nvml.gpus()]

    def memory(self, uuid: str) -> dict[str, Any]:
        """Return the free bytes of the GPU and of the host, and how much others use."""
        gpu = nvml.memory(uuid)
        return {
            "total_bytes": gpu.total_bytes,
            "free_bytes": gpu.free_bytes,
            "used_bytes": gpu.used_bytes,
            "users": len(nvml.processes(uuid)),
            "host_available_bytes": host.available_host_bytes(),
        }

    def why_no_checkpoint(self) -> str:
        """Return why there are no checkpoint calls; empty if the driver has them."""
        return driver.capabilities().why_not

    def close(self) -> None:
        """Nothing is held."""
