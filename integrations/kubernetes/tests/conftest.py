"""Fixtures: real daemons of two emulated GPUs, a fake kubelet, and the real device plugin."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from daemon import running_daemon
from kubernetes_node import REPLICAS, running_node
from leftovers import nothing_left

from kiwi_core.client import gpu_placement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon import Daemon
    from fake_kubelet import FakeKubelet
    from kubernetes_node import Node, Plugin


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemon]:
    """Run daemons of two GPUs for all tests of a module."""
    with (
        pytest.MonkeyPatch.context() as patch,
        nothing_left(patch),
        running_daemon("2x256MiB") as daemon,
    ):
        yield daemon


@pytest.fixture
def daemon(daemons: Daemon) -> Daemon:
    """Return the daemons, started again if a test has killed them."""
    assert daemons.process is not None
    if daemons.process.poll() is not None:
        daemons.start()
    return daemons


@pytest.fixture
def node(daemon: Daemon) -> Iterator[Node]:
    """Make a new node, whose directories have short paths (Unix sockets have a limit)."""
    root = Path(tempfile.mkdtemp(prefix="node-"))
    with running_node(root, daemon.directory) as node:
        yield node
    forget_pods(node)
    shutil.rmtree(root)


def forget_pods(node: Node) -> None:
    """Make the daemons forget this test's pods, whose programs they would expect in the next
    test."""
    for kubelet in node.kubelets:
        for place in kubelet.used:
            gpu_placement.expect(node.sockets / f"{place.split('::')[0]}.sock", place, 0)


@pytest.fixture
def ready(node: Node) -> tuple[FakeKubelet, Plugin]:
    """Return a kubelet that knows the healthy places of a plugin, and the plugin."""
    kubelet, plugin = node.start_kubelet(), node.start_plugin()
    kubelet.wait_healthy(2 * REPLICAS)
    return kubelet, plugin
