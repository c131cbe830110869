"""The examples: pods, what KubeSpawner makes of the settings for the hub, and the CDI device."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import jsonschema
import yaml
from kubernetes_asyncio.client import ApiClient
from kubespawner import KubeSpawner
from objects import PACKAGING, REPOSITORY, VERSIONS, Object, complaints, read
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7
from traitlets.config import Config

from kiwi_jupyterhub.page import CHOICE

if TYPE_CHECKING:
    from verdict import Verdict

WITH_CLAIMS: Final = VERSIONS[VERSIONS.index("1.34") :]
"""Versions that have resource.k8s.io/v1."""

NODE: Final = "gpu-node-2"
TRAITS: Final = {
    "image.name": "image",
    "extraResource.limits": "extra_resource_limits",
    "memory.limit": "mem_limit",
    "memory.guarantee": "mem_guarantee",
    "extraNodeAffinity.preferred": "node_affinity_preferred",
}
"""What Zero to JupyterHub makes of the values below ``singleuser`` (its jupyterhub_config.py)."""


def check_pods(verdict: Verdict) -> None:
    (pod,) = read(PACKAGING / "pod.yaml")
    _judge(verdict, "the example pod", pod)
    _judge(verdict, "the same with user ids of its own", _with_own_users(pod))
    template, by_claim = read(PACKAGING / "dra.yaml")
    _judge(verdict, "the pod with a claim", by_claim)
    _judge(verdict, "the template of its claim", template, WITH_CLAIMS)
    older = [version for version in VERSIONS if version not in WITH_CLAIMS]
    lack = complaints(template, older)
    verdict.judge(f"{', '.join(older)} have no claims of this version", len(lack) == len(older))


def _with_own_users(pod: Object) -> Object:
    return {**pod, "spec": {**pod["spec"], "hostUsers": False}}


def check_spawned(verdict: Verdict) -> None:
    for what, config in {
        "kube.py": _of_kube_py(),
        "zero-to-jupyterhub.yaml": _of_values(),
    }.items():
        for node in ("", NODE):
            pod = _manifest(config, node)
            where = f"on {node}" if node else "anywhere"
            _judge(verdict, f"KubeSpawner with {what}, {where}", pod)
            _judge_pod(verdict, f"{what}, {where}", pod["spec"], node)


def _judge_pod(verdict: Verdict, what: str, spec: Object, node: str) -> None:
    limits = spec["containers"][0]["resources"]["limits"]
    verdict.judge(f"{what}: the place on a GPU", limits["kiwi-jupyter/gpu"] == "1", limits)
    gib = int(limits["memory"]) / 2**30
    verdict.judge(f"{what}: RAM for what is moved out", gib == 96, limits)
    text = json.dumps(spec["affinity"]["nodeAffinity"])
    verdict.judge(f"{what}: short waits are preferred", "kiwi-jupyter/wait-s" in text, text)
    chosen = (spec.get("nodeSelector") or {}).get("kubernetes.io/hostname", "")
    verdict.judge(f"{what}: the node that was chosen", chosen == node, chosen)


def _of_kube_py() -> Config:
    config = Config()
    source = (REPOSITORY / "integrations/jupyterhub/spawners/kube.py").read_text()
    exec(compile(source, "kube.py", "exec"), {"get_config": lambda: config})
    return config


def _of_values() -> Config:
    values = yaml.safe_load((PACKAGING / "zero-to-jupyterhub.yaml").read_text())
    config = Config()
    for path, trait in TRAITS.items():
        found = values["singleuser"]
        for name in path.split("."):
            found = found[name]
        config.KubeSpawner[trait] = found
    for source in values["hub"]["extraConfig"].values():
        exec(compile(source, "extraConfig", "exec"), {"c": config})
    return config


def _manifest(config: Config, node: str) -> Object:
    return asyncio.run(_spawned(config, node))


async def _spawned(config: Config, node: str) -> Object:
    """Return the pod that the hub would make for a user who has chosen ``node``."""
    config = Config({**config, "KubeSpawner": {**config.KubeSpawner, "namespace": "jhub"}})
    user = SimpleNamespace(name="ada", id=1, url="/user/ada/", escaped_name="ada", settings={})
    hub = SimpleNamespace(api_url="http://hub:8081/hub/api", public_host="", base_url="/hub/")
    spawner = KubeSpawner(config=config, user=user, hub=hub, orm_spawner=None, _mock=True)
    spawner.api_token, spawner.user_options = "token", {CHOICE: node} if node else {}
    page = config.Spawner.pre_spawn_hook.__self__
    page._waits = lambda: [SimpleNamespace(key=NODE)]  # no node answers here
    await page.before_spawn(spawner)
    async with ApiClient() as client, spawner.api.api_client:
        found = client.sanitize_for_serialization(await spawner.get_pod_manifest())
    assert isinstance(found, dict)
    return found


def check_cdi(verdict: Verdict) -> None:
    """Check the file of the Container Device Interface against the schema of its own project."""
    folder = Path(os.environ["CDI_SCHEMA"])
    schema, definitions = (
        json.loads((folder / name).read_text()) for name in ("schema.json", "defs.json")
    )
    shared = Resource.from_contents(definitions, default_specification=DRAFT7)
    registry: Any = Registry().with_resource("defs.json", shared)
    validator = jsonschema.Draft7Validator(schema, registry=registry)
    command = [sys.executable, "-m", "kiwi_core.cli", "doctor", "--print", "cdi"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed)
    against = "\n".join(map(str, validator.iter_errors(found)))
    verdict.judge("CDI's schema takes what kiwi doctor --print cdi prints", not against, against)
    found["devices"][0]["containerEdits"]["mounts"][0]["options"] = "ro"
    verdict.judge("and refuses options that are no list", not validator.is_valid(found), found)


def _judge(verdict: Verdict, what: str, found: Object, versions: list[str] | None = None) -> None:
    versions = versions or VERSIONS
    against = complaints(found, versions)
    text = f"{what}: {versions[0]} to {versions[-1]} take it"
    verdict.judge(text, not against, "\n".join(against))
