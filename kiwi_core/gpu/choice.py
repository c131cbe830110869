"""Finds the GPU that a user names by index, UUID, or the beginning of a UUID."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.errors import CallerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kiwi_core.gpu.nvml import GpuInfo


def one(gpus: Sequence[GpuInfo], word: str) -> GpuInfo:
    """Return the GPU that ``word`` names. Raise ``CallerError``, which lists all GPUs."""
    matches = [gpu for gpu in gpus if word in (str(gpu.index), gpu.uuid)]
    matches = matches or [gpu for gpu in gpus if _begins(gpu.uuid, word)]
    if len(matches) != 1:
        known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
        problem = "is no GPU" if not matches else "means several GPUs"
        raise CallerError("no-such-gpu", f"{word!r} {problem}.", f"There are: {known}.")
    return matches[0]


def _begins(uuid: str, word: str) -> bool:
    """Return whether ``word`` begins ``uuid``. A number of few digits always means an index."""
    few_digits = word.isdigit() and len(word) < 4
    return not few_digits and uuid.removeprefix("GPU-").startswith(word.removeprefix("GPU-"))
