"""Objects of Kubernetes: where they come from, and whether a version of Kubernetes takes them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

REPOSITORY = Path(__file__).parents[3]
PACKAGING = REPOSITORY / "integrations/kubernetes"
CHART = PACKAGING / "kiwi"
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]

Object = dict[str, Any]


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *words], capture_output=True, text=True, timeout=60)


def rendered(values: Object, *words: str) -> list[Object]:
    """Return the chart's objects with these values. Raises ``ValueError`` with helm's words."""
    done = subprocess.run(
        ["helm", "template", "kiwi", CHART, "--values", "-", *words],
        input=yaml.safe_dump(values), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if done.returncode != 0:
        raise ValueError(done.stderr)
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def daemon_set(values: Object) -> Object:
    (found,) = [one for one in rendered(values) if one["kind"] == "DaemonSet"]
    return found


def containers(values: Object) -> dict[str, Object]:
    """Return the containers of the chart's pods, by name."""
    pod = daemon_set(values)["spec"]["template"]["spec"]
    return {one["name"]: one for one in pod["containers"]}


def read(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text()))


def complaints(found: Object, versions: list[str] = VERSIONS) -> list[str]:
    """Return what the strict schemas of these versions say against an object."""
    return [text for version in versions if (text := _complaint(found, version))]


def _complaint(found: Object, version: str) -> str:
    kind = f"{found['kind']} ({found['apiVersion']}) in {version}"
    try:
        used = kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{kind}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        return f"{kind}: there is no such kind"
    return "" if used == version else f"{kind}: there is no schema; {used} was taken"
