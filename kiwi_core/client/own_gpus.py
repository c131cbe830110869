"""Find the GPUs that this process may use: by its device cgroup and by CUDA_VISIBLE_DEVICES.

A batch system or a container opens some of a machine's GPUs to a process, and CUDA numbers those
from 0. A daemon knows the numbers of the whole machine, so an index means a UUID here first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kiwi_core.client.discovery import discover
from kiwi_core.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENV_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

ROOT = Path("/")
"""Where ``proc`` and ``dev`` are; tests use another tree."""

NOT_SHARED: Final = "not-shared"
"""Error code: this process has no GPU that Kiwi could share, and a daemon would not change that."""

_MIG: Final = "MIG-"


@dataclass(frozen=True)
class MachineGpu:
    """One GPU as NVIDIA's kernel module lists it. ``is_open``: this process may open its device."""

    uuid: str
    is_open: bool


def machine_gpus() -> list[MachineGpu]:
    """Return the machine's GPUs in the order of their PCI addresses, which is the order of NVML.

    The list is empty without NVIDIA's kernel module, and where the module does not know each UUID:
    it shows question marks until a program has used the GPU, which a daemon does when it starts.
    """
    found = []
    for place in sorted((ROOT / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            pairs = (line.partition(":") for line in place.read_text().splitlines())
        except OSError:
            return []
        facts = {name.strip(): value.strip() for name, _, value in pairs}
        uuid, minor = facts.get("GPU UUID", ""), facts.get("Device Minor", "")
        if not uuid.startswith("GPU-") or "?" in uuid:
            return []
        # Like ``open``, ``access`` makes the kernel ask the device cgroup (``inode_permission``).
        # Opening a GPU that nobody uses would start it, which takes seconds.
        is_open = os.access(ROOT / f"dev/nvidia{minor}", os.R_OK | os.W_OK)
        found.append(MachineGpu(uuid, is_open))
    return found


def visible_gpus(env: Mapping[str, str], machine: Sequence[MachineGpu] = ()) -> list[str] | None:
    """Return the GPUs that CUDA shows a process with ``env``, in CUDA's order: UUIDs, and indices
    where ``machine`` is not known. ``None``: nothing is known, so all GPUs.

    An empty list in the environment counts as no list: such a process uses no GPU, wherever it
    waits.
    """
    mine = [gpu.uuid for gpu in machine if gpu.is_open]
    words = [word.strip() for word in env.get(ENV_VISIBLE, "").split(",") if word.strip()]
    if not words:
        return mine if machine else None
    if not machine:
        return words
    found = []
    for word in words:
        if word.isdecimal():
            if int(word) >= len(mine):
                break  # CUDA ignores what follows an index that does not exist
            word = mine[int(word)]
        found.append(word)
    return found


def own_sockets(socket_dir: Path, env: Mapping[str, str] | None = None) -> list[Path]:
    """Return the sockets of this process's GPUs, in CUDA's order, or by name where that order is
    not known.
    """
    visible = visible_gpus(os.environ if env is None else env, _served(socket_dir))
    if visible is None:
        return discover(socket_dir)
    found = (path for gpu in visible for path in discover(socket_dir, gpu))
    return list(dict.fromkeys(found))


def only_visible(env: Mapping[str, str]) -> str:
    """Return the GPU that CUDA_VISIBLE_DEVICES names, if it names just one; else ""."""
    visible = [word.strip() for word in env.get(ENV_VISIBLE, "").split(",") if word.strip()]
    return visible[0] if len(visible) == 1 else ""


def no_daemon(socket_dir: Path, named: str = "", env: Mapping[str, str] | None = None) -> PeerError:
    """Return the error for a process that has found no socket: for the GPU that its user ``named``
    to Kiwi, else as ``own_sockets`` sees it.
    """
    from kiwi_core.client.directory import (
        ASK_ADMIN,
        may_start_in,
        why_no_sockets,
        why_stopped,
    )

    visible: list[str] | None = [named]
    if not named:
        visible = visible_gpus(os.environ if env is None else env, _served(socket_dir))
    if visible and visible[0].startswith(_MIG):
        return PeerError(
            NOT_SHARED,
            f"{visible[0]} is a MIG instance: a fixed part of a GPU, with memory of its own that"
            " the driver cannot move. Kiwi does not share it.",
            "Nothing needs to be done. To share a whole GPU, ask for one without MIG.",
        )
    if visible == []:
        return PeerError(
            NOT_SHARED,
            "This process may open none of this machine's GPUs: its job or container was given"
            " none, or CUDA_VISIBLE_DEVICES names one that it was not given.",
            "Ask for a GPU (Slurm: --gres=shard:1), or unset CUDA_VISIBLE_DEVICES.",
        )
    if (stopped := why_stopped(socket_dir)) is not None:
        return stopped
    which = f" for GPU {visible[0]}" if visible else ""
    return PeerError(
        "no-daemon",
        f"No Kiwi daemon{which} is running in {socket_dir}.{why_no_sockets(socket_dir)}",
        "Start one with `kiwi daemon`." if may_start_in(socket_dir) else ASK_ADMIN,
    )


def _served(socket_dir: Path) -> list[MachineGpu]:
    """Return the machine's GPUs, or none if no daemon serves one: it may serve emulated ones."""
    machine = machine_gpus()
    served = {path.stem for path in discover(socket_dir)} if machine else set()
    return machine if any(gpu.uuid in served for gpu in machine) else []
