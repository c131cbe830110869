"""Tests of the configuration file of NVIDIA's device plugin, and of what Kiwi offers from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fake_kubelet import AdmissionError

from kiwi_core.errors import CallerError
from kiwi_kubernetes import sharing

if TYPE_CHECKING:
    from pathlib import Path

    from kubernetes_node import Node

TIME_SLICING = """\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 3
"""

STRICT = """\
version: v1
flags:
  migStrategy: none
  plugin:
    passDeviceSpecs: false
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: gpu
      rename: nvidia.com/many
      devices: [0, "1", GPU-b1028956-cfa2-0990-bf4a-5da9abb51763]
      replicas: 2
"""


def write(path: Path, text: str) -> Path:
    file = path / "config.yaml"
    file.write_text(text)
    return file


def test_a_usual_time_slicing_config_is_read(tmp_path: Path) -> None:
    told = sharing.read(write(tmp_path, TIME_SLICING))
    assert told == sharing.Sharing("nvidia.com/gpu", 3, one_only=False)


def test_every_key(tmp_path: Path) -> None:
    told = sharing.read(write(tmp_path, STRICT))
    ignored = (
        "flags.plugin", "sharing.timeSlicing.resources.rename",
        "sharing.timeSlicing.resources.devices",
    )  # fmt: skip
    assert told == sharing.Sharing("nvidia.com/gpu.shared", 2, one_only=True, ignored=ignored)


@pytest.mark.parametrize(
    "text", ["version: v1", "flags: {migStrategy: none}", "sharing: {}", '{"version": "v1"}']
)
def test_a_file_that_says_nothing_of_sharing(tmp_path: Path, text: str) -> None:
    assert sharing.read(write(tmp_path, text)) is None


def resources(entries: str) -> str:
    return f"sharing: {{timeSlicing: {{resources: {entries}}}}}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: v2", "config.yaml: version: 'v2' is not known. Write v1."),
        ("sharing: [", "config.yaml: this is neither YAML nor JSON"),
        ("- 1", "config.yaml: Expected `object`, got `array`."),
        ("", "config.yaml: Expected `object`, got `null`."),
        (resources("[]"), "config.yaml: sharing.timeSlicing.resources: Expected `array`"),
        (resources("[{name: gpu}]"), "missing required field `replicas`"),
        (resources("[{name: gpu, replicas: 0}]"), "].replicas: Expected `int` >= 1"),
        (resources("[{name: gpu, replicas: many}]"), "].replicas: Expected `int`, got `str`"),
        (resources("[{name: gpu, replicas: 2, devices: some}]"), "[0].devices: 'some'"),
        (
            resources("[{name: gpu, replicas: 2}, {name: tpu, replicas: 2}]"),
            "there are several (gpu, tpu); Kiwi offers one. Keep one entry",
        ),
        (
            resources("[{name: nvidia.com/mig-1g.5gb, replicas: 2}]"),
            "resources[0]: 'nvidia.com/mig-1g.5gb' is MIG. Kiwi shares whole GPUs",
        ),
        (resources('[{name: gpu, replicas: 2, devices: ["0:1"]}]'), "'0:1' is MIG"),
        ("flags: {migStrategy: mixed}", "flags.migStrategy: 'mixed': Kiwi shares whole GPUs"),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}", "sharing.mps: the driver can"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CallerError) as caught:
        sharing.read(write(tmp_path, text))
    assert said in str(caught.value)
    assert str(tmp_path) in caught.value.message
    assert caught.value.remedy


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match=r"nowhere\.yaml cannot be read: No such file"):
        sharing.read(tmp_path / "nowhere.yaml")


# --- on a node -----------------------------------------------------------------------------------


def test_a_node_offers_what_the_file_says(node: Node) -> None:
    kubelet = node.start_kubelet()
    plugin = node.start_plugin("--config", str(write(node.root, STRICT)))
    kubelet.wait_healthy(4)
    assert kubelet.resource == "nvidia.com/gpu.shared"
    assert "flags.plugin" in plugin.events("keys without a meaning here")[0]["keys"]
    with pytest.raises(AdmissionError, match=r"nvidia\.com/gpu\.shared: 2 are asked for"):
        kubelet.admit(2)


def test_several_places_are_one_gpu_where_the_file_allows_them(node: Node) -> None:
    """NVIDIA allows this unless ``failRequestsGreaterThanOne`` is set. A program shares one GPU."""
    kubelet = node.start_kubelet()
    node.start_plugin("--config", str(write(node.root, TIME_SLICING)))
    kubelet.wait_healthy(6)
    given = kubelet.admit(2)
    assert {place.split("::")[0] for place in given.places} == {given.gpu}
    assert kubelet.free()[given.gpu] == 1
    across = kubelet.allocate([f"{uuid}::2" for uuid in kubelet.free()])
    assert [name for name in across.cdi if name.startswith("nvidia.com")] == [
        f"nvidia.com/gpu={across.gpu}"
    ]


def test_the_command_line_decides(node: Node) -> None:
    kubelet = node.start_kubelet()
    config = str(write(node.root, TIME_SLICING))
    node.start_plugin("--config", config, "--resource", "kiwi-jupyter/gpu", "--replicas", "1")
    kubelet.wait_healthy(2)
    assert kubelet.resource == "kiwi-jupyter/gpu"


def test_a_wrong_file_ends_the_plugin_with_words(node: Node) -> None:
    plugin = node.start_plugin("--config", str(write(node.root, "flags: {migStrategy: single}")))
    assert plugin.ended() == 1
    assert "config.yaml: flags.migStrategy: 'single'" in plugin.log()
    assert "Traceback" not in plugin.log()
