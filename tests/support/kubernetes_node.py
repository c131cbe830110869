"""A node of Kubernetes: its directories, a fake kubelet, and the real ``kiwi device-plugin``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fake_kubelet import FakeKubelet
from patience import PATIENCE_S, die_with_the_test, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

REPLICAS = 4

PATIENT = """
import sys
from kiwi_core.cli import main
from kiwi_core.client import gpu_placement
gpu_placement.WITHIN_S = {}
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Plugin:
    """``kiwi device-plugin`` in a process of its own."""

    process: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text()

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the log's entries of one kind."""
        entries = [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == event]

    def wait_event(self, event: str, count: int = 1) -> dict[str, Any]:
        wait_until(lambda: len(self.events(event)) >= count, f"{event!r} in the log")
        return self.events(event)[-1]

    def ended(self) -> int:
        return self.process.wait(PATIENCE_S)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.ended()


@dataclass
class Node:
    """The directories of a node, below ``root``."""

    root: Path
    sockets: Path
    plugins: list[Plugin] = field(default_factory=list)
    kubelets: list[FakeKubelet] = field(default_factory=list)

    @property
    def kubelet_dir(self) -> Path:
        return self.root / "k"

    @property
    def cdi_dir(self) -> Path:
        return self.root / "cdi"

    @property
    def features_dir(self) -> Path:
        return self.root / "features.d"

    def socket(self, resource: str = "kiwi-jupyter_gpu") -> Path:
        return self.kubelet_dir / f"kiwi-{resource}.sock"

    def start_kubelet(self, refuse: str = "", *, clears: bool = True) -> FakeKubelet:
        self.kubelets.append(FakeKubelet(self.kubelet_dir, refuse, clears=clears))
        return self.kubelets[-1]

    def start_plugin(self, *args: str, answers_within_s: float | None = None) -> Plugin:
        """Start a plugin. ``answers_within_s``: how long it waits for the daemons' answers, instead
        of two seconds."""
        command = ["-m", "kiwi_core.cli"]
        if answers_within_s is not None:
            command = ["-c", PATIENT.format(answers_within_s)]
        log_path = self.root / f"plugin-{len(self.plugins)}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command, "device-plugin", "--log-json",
                 "--socket-dir", str(self.sockets), "--kubelet-dir", str(self.kubelet_dir),
                 "--cdi-dir", str(self.cdi_dir), "--features-dir", str(self.features_dir),
                 *(args or ("--replicas", str(REPLICAS)))],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                preexec_fn=die_with_the_test, env=dict(os.environ),
            )  # fmt: skip
        self.plugins.append(Plugin(process, log_path))
        return self.plugins[-1]

    def stop(self) -> None:
        for plugin in self.plugins:
            if plugin.process.poll() is None:
                plugin.process.kill()
            plugin.ended()
        for kubelet in self.kubelets:
            kubelet.stop()


@contextmanager
def running_node(root: Path, sockets: Path) -> Iterator[Node]:
    node = Node(root, sockets)
    try:
        yield node
    finally:
        node.stop()
