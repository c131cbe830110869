"""The chart: helm renders it, every version of Kubernetes takes it, and it refuses what cannot
work."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any, Final

from objects import CHART, VERSIONS, complaints, containers, daemon_set, helm, rendered

from kiwi_core.cli.app import _parser

if TYPE_CHECKING:
    from verdict import Verdict

IMAGE: Final = {"image": {"repository": "registry.example.org/kiwi"}}
SLICES: Final = """\
version: v1
flags:
  migStrategy: none
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: true
    resources:
      - name: nvidia.com/gpu
        replicas: 4
"""
VALUES: Final[dict[str, dict[str, Any]]] = {
    "as it is": IMAGE,
    "with everything": {
        "image": {
            **IMAGE["image"],
            "tag": "7",
            "pullPolicy": "Always",
            "digest": f"sha256:{7:064x}",
        },
        "imagePullSecrets": [{"name": "ours"}],
        "daemon": {"options": ["--tq", "20", "--host-budget", "64GiB"]},
        "devicePlugin": {"resource": "example.org/gpu", "replicas": 4},
        "nodeFeatureDiscovery": {"enabled": True},
        "metrics": {"hostPort": 9402, "podMonitor": {"enabled": True, "labels": {"a": "b"}}},
        "podAnnotations": {"a": "b"},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
                    ]
                }
            }
        },
    },
    "with NVIDIA's configuration": {**IMAGE, "config": {"map": {"default": SLICES, "more": "{}"}}},
    "with a ConfigMap that exists": {**IMAGE, "config": {"name": "theirs", "default": "all"}},
    "without the device plugin": {**IMAGE, "devicePlugin": {"enabled": False}},
    "with nothing that may be left out": {
        **IMAGE,
        "runtimeClassName": None,
        "priorityClassName": None,
        "nodeSelector": None,
        "tolerations": [],
    },
}
OF_OTHERS: Final = {"PodMonitor"}
"""Kinds that do not belong to Kubernetes, and have no schema there."""

REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "no image": ({}, "image.repository is not set"),
    "a limit of memory for the daemon": (
        {**IMAGE, "daemon": {"resources": {"limits": {"memory": "1Gi"}}}},
        "/daemon/resources/limits/memory",
    ),
    "an option that the chart sets itself": (
        {**IMAGE, "daemon": {"options": ["--metrics=:1"]}},
        "/daemon/options/0",
    ),
    "a value that does not exist": ({**IMAGE, "replicas": 3}, "additional properties 'replicas'"),
    "MPS": (
        {**IMAGE, "config": {"map": {"a": SLICES.replace("timeSlicing", "mps")}}},
        "sharing.mps",
    ),
    "MIG": (
        {**IMAGE, "config": {"map": {"a": SLICES.replace("none", "mixed")}}},
        "flags.migStrategy",
    ),
    "several files and no word which": (
        {**IMAGE, "config": {"map": {"a": SLICES, "b": SLICES}}},
        "config.default",
    ),
    "a file that does not exist": (
        {**IMAGE, "config": {"map": {"a": SLICES}, "default": "b"}},
        'config.default is "b"',
    ),
}


def check_schemas(verdict: Verdict) -> None:
    said = helm("lint", "--strict", str(CHART), "--set", "image.repository=r.example.org/kiwi")
    verdict.judge("helm lint finds nothing", said.returncode == 0, said.stdout + said.stderr)
    versions = f"{VERSIONS[0]} to {VERSIONS[-1]}"
    for how, values in VALUES.items():
        found = [one for one in rendered(values) if one["kind"] not in OF_OTHERS]
        kinds = ", ".join(one["kind"] for one in found)
        against = [text for one in found for text in complaints(one)]
        verdict.judge(f"the chart {how}: {versions} take {kinds}", not against, "\n".join(against))


def check_refusals(verdict: Verdict) -> None:
    for what, (values, words) in REFUSED.items():
        try:
            said = f"helm takes it: {rendered(values)}"
        except ValueError as error:
            said = str(error)
        verdict.judge(f"the chart refuses {what}", words in said, said)


def check_rights(verdict: Verdict) -> None:
    pod = daemon_set(IMAGE)["spec"]["template"]["spec"]
    verdict.judge("the pod sees the node's process ids", pod["hostPID"] is True)
    others = {name for name in ("hostNetwork", "hostIPC", "serviceAccountName") if name in pod}
    no_api = pod["automountServiceAccountToken"] is False and not others
    verdict.judge("the pod has no access to the cluster's API", no_api, pod)
    for name, capabilities in {
        "daemon": {"drop": ["ALL"], "add": ["SYS_PTRACE", "KILL", "DAC_READ_SEARCH"]},
        "device-plugin": {"drop": ["ALL"]},
    }.items():
        wanted = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": capabilities,
        }
        had = containers(IMAGE)[name]["securityContext"]
        verdict.judge(f"{name} has these capabilities: {capabilities}", had == wanted, had)


def check_options(verdict: Verdict) -> None:
    """Check that Kiwi's own parsers accept the command lines of the containers."""
    for how, values in VALUES.items():
        for name, container in containers(values).items():
            for words in _commands(container):
                said = _parsed(words)
                verdict.judge(f"{name}, {how}: {' '.join(words[:2])} takes its options",
                              not said, said)  # fmt: skip


def _commands(container: dict[str, Any]) -> list[list[str]]:
    probes = [container[name] for name in container if name.endswith("Probe")]
    own = container["command"] + container["args"]
    return [own, *(probe["exec"]["command"] for probe in probes)]


def _parsed(words: list[str]) -> str:
    assert words[0] == "kiwi"
    parser, _ = _parser(words[1])
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(words[1:])
    except SystemExit:
        return said.getvalue()
    return ""
