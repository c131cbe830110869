"""Tests of the chart and the examples for Kubernetes, without helm and Kubernetes' schemas.

``make cluster`` has those (tests/cluster/kubernetes).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from traitlets.config import Config

import kiwi_core

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integrations/kubernetes"
CHART = FOLDER / "kiwi"
DAEMON_SET = (CHART / "templates/daemonset.yaml").read_text()
RESOURCE, LABEL = "kiwi-jupyter/gpu", "kiwi-jupyter/wait-s"


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_the_schema_takes_the_values_and_knows_no_others() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.validate(values(), schema(), jsonschema.Draft7Validator)
    assert {*schema()["properties"]} == {*values(), "global"}  # helm adds `global` to a subchart


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("image", "digest"), "7"),
        (("daemon", "resources", "limits"), {"memory": "1Gi"}),
        (("daemon", "options"), ["--metrics=:9402"]),
        (("daemon", "options"), "--tq 20"),
        (("devicePlugin", "resource"), "gpu"),
        (("devicePlugin", "resource"), "kubernetes.io/gpu"),
        (("devicePlugin", "replicas"), 0),
        (("config", "map"), {"default": {"version": "v1"}}),
        (("metrics", "hostPort"), 70000),
        (("stateDirectory",), "var/lib/kiwi"),
        (("unknown",), 1),
    ],
)
def test_the_schema_refuses_what_cannot_work(path: tuple[str, ...], value: Any) -> None:
    wrong = place = values()
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema(), jsonschema.Draft7Validator)


def test_every_value_that_the_templates_use_exists() -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    assert len(used) > 20
    for name in used:
        found: Any = values()
        for step in name.split("."):
            assert step in found, name
            found = found[step]


def test_the_charts_version_is_kiwis() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == kiwi_core.__version__


def test_the_daemon_has_three_capabilities_and_the_plugin_none() -> None:
    assert re.findall(r"add: \[(.*)\]", DAEMON_SET) == ["SYS_PTRACE, KILL, DAC_READ_SEARCH"]
    assert DAEMON_SET.count("drop: [ALL]") == 2
    assert "privileged" not in DAEMON_SET


def test_helm_leaves_as_much_time_for_moving_memory_as_systemd() -> None:
    unit = (ROOT / "integrations/systemd/kiwi.service").read_text()
    (minutes,) = re.findall(r"^TimeoutStopSec=(\d+)min$", unit, re.MULTILINE)
    assert values()["daemon"]["terminationGracePeriodSeconds"] == 60 * int(minutes)


@pytest.mark.parametrize("name", ["pod.yaml", "dra.yaml"])
def test_pods_of_users_need_no_privilege(name: str) -> None:
    """They meet the Pod Security Standard "restricted". With DRA the socket is a ``hostPath``,
    which this standard forbids."""
    (pod,) = [one["spec"] for one in objects(name) if one["kind"] == "Pod"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert rights == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    mounts = [volume["hostPath"]["path"] for volume in pod.get("volumes", [])]
    assert mounts == ([] if name == "pod.yaml" else ["/run/kiwi"])
    read_only = [one["readOnly"] for one in pod["containers"][0].get("volumeMounts", [])]
    assert all(read_only)
    assert len(read_only) == len(mounts)


def kube_py() -> Config:
    config = Config()
    source = (ROOT / "integrations/jupyterhub/spawners/kube.py").read_text()
    exec(compile(source, "kube.py", "exec"), {"get_config": lambda: config})
    return config


def test_both_examples_for_hubs_have_the_same_settings() -> None:
    spawner = kube_py().KubeSpawner
    (of_values,) = objects("zero-to-jupyterhub.yaml")
    server = of_values["singleuser"]
    assert server["extraResource"]["limits"] == spawner.extra_resource_limits == {RESOURCE: "1"}
    assert server["memory"] == {"limit": spawner.mem_limit, "guarantee": spawner.mem_guarantee}
    preferred = server["extraNodeAffinity"]["preferred"]
    assert preferred == spawner.node_affinity_preferred
    (pod,) = objects("pod.yaml")
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    assert affinity == {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    keys = {e["key"] for one in preferred for e in one["preference"]["matchExpressions"]}
    assert keys == {LABEL}


def test_the_options_page_of_the_values_is_installed() -> None:
    (of_values,) = objects("zero-to-jupyterhub.yaml")
    config = Config()
    for source in of_values["hub"]["extraConfig"].values():
        exec(compile(source, "extraConfig", "exec"), {"c": config})
    assert config.Spawner.options_from_form({"kiwi_place": ["x"]}) == {"kiwi_place": "x"}


def test_the_page_explains_the_chart() -> None:
    page = (ROOT / "integrations/kubernetes/README.md").read_text()
    for name in (RESOURCE, LABEL, "SYS_PTRACE", "KILL", "DAC_READ_SEARCH"):
        assert f"`{name}`" in page
    for example in yaml.safe_load_all("---\n".join(re.findall(r"```yaml\n(.*?)```", page, re.S))):
        assert isinstance(example, dict)
