"""The check of a node of Kubernetes: whether Kiwi's device plugin is the only one for its GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kiwi_core.cli.checks.finding import Finding, ok, warn
from kiwi_kubernetes import others

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def check(directory: Path = others.DIRECTORY) -> Iterator[Finding]:
    """Yield a finding where Kiwi's device plugin runs. ``directory`` is the kubelet's."""
    if not any(map(others.served, directory.glob("kiwi-*.sock"))):
        return
    if found := others.of_nvidia(directory):
        text = f"Another device plugin hands out GPUs of this node, too: {', '.join(found)}."
        remedy = "Remove it from the node: its pods use the GPUs without Kiwi, and cannot be moved."
        yield warn("Kubernetes", text, remedy)
    else:
        yield ok("Kubernetes", "Kiwi's device plugin runs, and no other one of NVIDIA's GPUs")
