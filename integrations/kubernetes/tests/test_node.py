"""Tests of the device plugin on a node: registration, places, what pods get, and failures."""

from __future__ import annotations

import json
import re
import socket
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest
from fake_kubelet import AdmissionError
from kubernetes_node import REPLICAS
from patience import PATIENCE_S, wait_until

from kiwi_core.cli.checks import kubernetes
from kiwi_core.cli.checks.finding import Level
from kiwi_core.client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from daemon import Daemon
    from fake_kubelet import FakeKubelet
    from kubernetes_node import Node, Plugin

Ready = tuple["FakeKubelet", "Plugin"]


def uuid(daemon: Daemon, index: int) -> str:
    return daemon.status(index).uuid


@pytest.fixture
def busy(daemon: Daemon) -> Iterator[str]:
    """Let a program use GPU 0; return its UUID."""
    with Client(daemon.directory / f"{uuid(daemon, 0)}.sock", name="busy") as client:
        client.connect()
        client.acquire(timeout_s=PATIENCE_S)
        yield uuid(daemon, 0)
        client.end_burst()


# --- what a node offers, and what a pod gets ------------------------------------------------------


def test_a_pod_gets_a_gpu_and_the_sockets(daemon: Daemon, node: Node, ready: Ready) -> None:
    kubelet, plugin = ready
    assert kubelet.resource == "kiwi-jupyter/gpu"
    assert sorted(kubelet.health) == sorted(
        f"{uuid(daemon, index)}::{n}" for index in (0, 1) for n in range(REPLICAS)
    )
    given = kubelet.admit()
    assert given.envs == {"KIWI_GPU": given.gpu}
    assert given.places[0].startswith(f"{given.gpu}::")
    spec = json.loads((node.cdi_dir / "kiwi.json").read_text())
    (device,) = spec["devices"]
    assert given.cdi == [f"nvidia.com/gpu={given.gpu}", f"{spec['kind']}={device['name']}"]
    assert given.cdi[1] == "kiwi-jupyter/socket=all"
    (mount,) = device["containerEdits"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == (str(node.sockets), "/run/kiwi")
    assert (node.cdi_dir / "kiwi.json").stat().st_mode & 0o777 == 0o644
    assert node.socket().stat().st_mode & 0o777 == 0o700
    assert plugin.terminate() == 0
    assert not node.socket().exists()
    assert (node.cdi_dir / "kiwi.json").exists()  # running pods may be started again


def test_pods_spread_over_idle_gpus(daemon: Daemon, ready: Ready) -> None:
    kubelet, _ = ready
    given = [kubelet.admit().gpu for _ in range(2 * REPLICAS)]
    assert set(given[:2]) == {uuid(daemon, 0), uuid(daemon, 1)}
    assert not kubelet.free()


def test_the_daemon_expects_the_program_of_a_pod(daemon: Daemon, ready: Ready) -> None:
    kubelet, _ = ready
    given = [kubelet.admit().gpu for _ in range(4)]
    for index in (0, 1):
        assert daemon.status(index).expected == given.count(uuid(daemon, index)) == 2


def test_pods_avoid_a_busy_gpu(daemon: Daemon, ready: Ready, busy: str) -> None:
    kubelet, _ = ready
    assert kubelet.admit().gpu == uuid(daemon, 1)
    must = [f"{busy}::1"]
    assert kubelet.prefer(1, must) == must


def test_two_places_for_one_container_are_refused(ready: Ready) -> None:
    kubelet, _ = ready
    with pytest.raises(AdmissionError, match=r"2 are asked for\..*Ask for 1"):
        kubelet.admit(2)
    assert kubelet.admit(1)


def test_a_place_that_does_not_exist_is_refused(ready: Ready) -> None:
    kubelet, _ = ready
    with pytest.raises(AdmissionError, match="GPU-none cannot be had now: no Kiwi daemon"):
        kubelet.allocate(["GPU-none::0"])


def test_garbage_on_its_socket_does_no_harm(node: Node, ready: Ready) -> None:
    kubelet, plugin = ready
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(node.socket()))
        stranger.sendall(b"\0\xff" * 4096)
    assert kubelet.call_with("Allocate", b"\xff\xff") is not grpc.StatusCode.OK
    assert kubelet.call_with("Shutdown", b"") is grpc.StatusCode.UNIMPLEMENTED
    assert kubelet.call_with("PreStartContainer", b"") is grpc.StatusCode.OK
    with pytest.raises(AdmissionError, match="0 are asked for"):
        kubelet.allocate([])
    assert kubelet.admit()
    assert plugin.process.poll() is None


# --- what may break -------------------------------------------------------------------------------


def test_a_kubelet_that_restarts_gets_a_new_registration(node: Node, ready: Ready) -> None:
    """The second time the plugin's socket survives, like one that was made just afterwards."""
    kubelet, _ = ready
    for clears in (True, False):
        kubelet.stop()
        kubelet = node.start_kubelet(clears=clears)
        kubelet.wait_healthy(2 * REPLICAS)
        assert kubelet.admit()


def test_a_directory_that_is_cleared_without_a_restart(node: Node, ready: Ready) -> None:
    kubelet, _ = ready
    node.socket().unlink()
    wait_until(lambda: kubelet.registrations == 2, "another registration")
    kubelet.wait_healthy(2 * REPLICAS)
    assert kubelet.admit()


def test_a_daemon_that_is_killed_makes_its_places_unhealthy(daemon: Daemon, ready: Ready) -> None:
    kubelet, plugin = ready
    daemon.kill_all()
    kubelet.wait_healthy(0)
    assert len(kubelet.health) == 2 * REPLICAS
    assert plugin.events("GPU is not offered")[0]["why"].startswith("its Kiwi daemon does not")
    with pytest.raises(AdmissionError, match="its Kiwi daemon does not answer"):
        kubelet.allocate([next(iter(kubelet.health))])
    daemon.start()
    kubelet.wait_healthy(2 * REPLICAS)
    assert kubelet.admit()


def test_a_daemon_that_hangs_costs_only_its_own_places(daemon: Daemon, ready: Ready) -> None:
    kubelet, _ = ready
    other = uuid(daemon, 1)
    hanging = psutil.Process(daemon.status(0).daemon_pid)
    hanging.suspend()
    try:
        kubelet.wait_healthy(REPLICAS)
        assert kubelet.admit().gpu == other
    finally:
        hanging.resume()
    kubelet.wait_healthy(2 * REPLICAS)


def test_the_plugin_waits_for_kubelet_and_daemons(daemon: Daemon, node: Node) -> None:
    daemon.kill_all()
    plugin = node.start_plugin()
    plugin.wait_event("waiting for the kubelet")
    kubelet = node.start_kubelet()
    plugin.wait_event("registered at the kubelet")
    assert kubelet.health == {}
    daemon.start()
    kubelet.wait_healthy(2 * REPLICAS)


def test_a_kubelet_that_refuses_is_quoted(node: Node) -> None:
    kubelet = node.start_kubelet(refuse="not wanted here")
    plugin = node.start_plugin()
    assert plugin.wait_event("the kubelet refuses the registration")["why"] == "not wanted here"
    wait_until(lambda: kubelet.refused > 2, "some more tries")
    kubelet.refuse = ""
    kubelet.wait_healthy(2 * REPLICAS)
    assert len(plugin.events("the kubelet refuses the registration")) == 1


def test_a_second_plugin_says_that_one_runs(node: Node, ready: Ready) -> None:
    kubelet, plugin = ready
    second = node.start_plugin()
    assert second.ended() == 1
    assert "Another device plugin offers kiwi-jupyter/gpu on this node" in second.log()
    assert "Traceback" not in second.log()
    kubelet.wait_healthy(2 * REPLICAS)
    assert kubelet.admit()
    assert plugin.process.poll() is None


def test_another_plugin_of_the_same_gpus_is_told_of(node: Node) -> None:
    kubelet = node.start_kubelet()
    with socket.socket(socket.AF_UNIX) as theirs, socket.socket(socket.AF_UNIX) as left_behind:
        theirs.bind(str(node.kubelet_dir / "nvidia-gpu.sock"))
        theirs.listen()
        left_behind.bind(str(node.kubelet_dir / "nvidia-mig.sock"))
        plugin = node.start_plugin()
        kubelet.wait_healthy(2 * REPLICAS)
        what = "another device plugin hands out GPUs of this node; remove it: its pods use them "
        what += "without Kiwi, and their memory cannot be moved"
        assert plugin.wait_event(what)["sockets"] == ["nvidia-gpu.sock"]
        (told,) = kubernetes.check(node.kubelet_dir)
        assert (told.level, told.area) == (Level.WARN, "Kubernetes")
        assert told.text.endswith("too: nvidia-gpu.sock.")
    (told,) = kubernetes.check(node.kubelet_dir)
    assert told.level is Level.OK
    assert plugin.terminate() == 0
    assert not list(kubernetes.check(node.kubelet_dir)), "not a node of Kiwi's plugin"


def test_a_plugin_after_one_that_was_killed(node: Node, ready: Ready) -> None:
    kubelet, plugin = ready
    plugin.process.kill()
    plugin.ended()
    assert node.socket().exists()
    kubelet.wait_healthy(0)
    kubelet.lists.clear()
    node.start_plugin(answers_within_s=PATIENCE_S)
    kubelet.wait_healthy(2 * REPLICAS)
    assert set(kubelet.lists) == {2 * REPLICAS}  # in no list were the places missing


def test_a_directory_that_cannot_be_trusted_is_named(node: Node) -> None:
    node.sockets = node.root / "open-to-all"
    node.sockets.mkdir()
    node.sockets.chmod(0o777)
    kubelet, plugin = node.start_kubelet(), node.start_plugin()
    told = plugin.wait_event("no Kiwi daemon answers yet")
    assert (told["directory"], "can be written by others" in told["why"]) == (
        str(node.sockets),
        True,
    )
    wait_until(lambda: kubelet.lists, "a list")
    assert kubelet.lists == [0]


def test_other_files_in_the_directories_are_left_alone(node: Node) -> None:
    kubelet = node.start_kubelet()
    garbage = [
        node.kubelet_dir / "kubelet_internal_checkpoint",
        node.kubelet_dir / "other.sock",
        node.sockets / "no-socket.sock",
        node.cdi_dir / "nvidia.yaml",
    ]
    node.cdi_dir.mkdir()
    for path in garbage:
        path.write_text("?")
    node.socket().write_text("in the way")
    node.start_plugin()
    kubelet.wait_healthy(2 * REPLICAS)
    assert [path.read_text() for path in garbage] == ["?"] * 4
    assert sorted(path.name for path in node.cdi_dir.iterdir()) == ["kiwi.json", "nvidia.yaml"]


def test_what_cannot_be_written_is_named(node: Node) -> None:
    node.start_kubelet()
    node.cdi_dir.write_text("a file")
    plugin = node.start_plugin()
    assert plugin.ended() == 1
    assert f"{node.cdi_dir}/kiwi.json cannot be written" in plugin.log()


def test_what_is_in_the_way_is_named(node: Node) -> None:
    node.start_kubelet()
    node.socket().mkdir()
    plugin = node.start_plugin()
    assert plugin.ended() == 1
    assert f"{node.socket()} is in the way, and cannot be removed" in plugin.log()
    assert "Traceback" not in plugin.log()


# --- the label -----------------------------------------------------------------------------------


def label(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text()
    found = re.fullmatch(
        r"# \+expiry-time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\nkiwi-jupyter/wait-s=(\d+)\n", text
    )
    assert found, text
    return int(found[1])


def test_the_label_tells_the_shortest_wait(daemon: Daemon, node: Node, ready: Ready) -> None:
    file = node.features_dir / "kiwi"
    wait_until(lambda: label(file) == 0, "a label that says 0")
    clients = [Client(path, name="busy") for path in daemon.sockets()]
    for client in clients:
        client.connect()
        client.acquire(timeout_s=PATIENCE_S)
    wait_until(lambda: (label(file) or 0) > 1, "a label that says more")
    assert [path.name for path in node.features_dir.iterdir()] == ["kiwi"]
    for client in clients:
        client.close()
    wait_until(lambda: label(file) == 0, "a label that says 0 again")
    daemon.kill_all()
    wait_until(lambda: label(file) is None, "the end of the label")


def test_a_plugin_that_ends_takes_its_label_along(node: Node, ready: Ready) -> None:
    _, plugin = ready
    file = node.features_dir / "kiwi"
    wait_until(file.exists, "the label")
    assert plugin.terminate() == 0
    assert not file.exists()
