"""``kiwi device-plugin``: offer this node's GPUs to Kubernetes."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kiwi_core.cli import admin_files
from kiwi_core.cli.common import add_socket_dir, directory_of
from kiwi_core.cli.numbers import whole
from kiwi_core.errors import CallerError
from kiwi_kubernetes import REPLICAS_MAX, others

DESCRIPTION = """\
Offers the GPUs of this node's Kiwi daemons to Kubernetes, several places on each: a device plugin
of the kubelet. A pod with a place gets the GPU and Kiwi's sockets, and shares the GPU with the
pods in the other places. Stays in the foreground; Ctrl-C or SIGTERM ends it."""
EPILOG = """\
examples:
  kiwi device-plugin                       8 places on each GPU: kiwi-jupyter/gpu
  kiwi device-plugin --replicas 20         20 places
  kiwi device-plugin --config config.yaml  resource and places from a file for NVIDIA's device
                                           plugin (sharing.timeSlicing)

Needs the daemons' sockets and two directories of the node, and no access to the cluster's API.
Install it with: pip install 'kiwi-jupyter[kubernetes]'

It waits for a kubelet or a daemon that is not there yet, or restarts. A GPU whose daemon does not
answer, or that has MIG or MPS on, is offered as unhealthy, and the log says why.
"""

PACKAGES: Final = {"grpc": "grpcio", "google.protobuf": "protobuf", "yaml": "PyYAML"}
"""The packages of the extra, by the module that shows that they are installed."""

_CDI_DIR: Final = Path("/var/run/cdi")
_LABEL: Final = r"[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_RESOURCE: Final = re.compile(rf"(?=.{{3,253}}$)[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?/{_LABEL}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_socket_dir(parser)
    parser.add_argument(
        "--kubelet-dir",
        metavar="DIR",
        type=Path,
        default=others.DIRECTORY,
        help=f"where the kubelet's socket for device plugins is (default: {others.DIRECTORY})",
    )
    parser.add_argument(
        "--cdi-dir",
        metavar="DIR",
        type=Path,
        default=_CDI_DIR,
        help="where the container engine looks for CDI devices; the one for Kiwi's sockets is "
        f"written there (default: {_CDI_DIR})",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="a configuration file of NVIDIA's device plugin; its sharing.timeSlicing is read",
    )
    parser.add_argument(
        "--replicas",
        metavar="N",
        type=whole(1, REPLICAS_MAX),
        help="places on each GPU (default: what --config says, else 8)",
    )
    parser.add_argument(
        "--resource",
        metavar="NAME",
        type=_resource,
        help="what pods ask for (default: what --config says, else kiwi-jupyter/gpu)",
    )
    parser.add_argument(
        "--features-dir",
        metavar="DIR",
        type=Path,
        help="features.d of Node Feature Discovery: label the node with the shortest wait, "
        "kiwi-jupyter/wait-s (default: no label)",
    )
    parser.add_argument(
        "--log-json", action="store_true", help="log JSON lines instead of text for people"
    )


def run(args: argparse.Namespace) -> int:
    missing = []
    for module, package in PACKAGES.items():
        try:
            there = find_spec(module) is not None
        except ModuleNotFoundError:  # no package that the module would be in
            there = False
        if not there:
            missing.append(package)
    if missing:
        raise CallerError(
            "no-kubernetes",
            f"kiwi device-plugin needs {', '.join(missing)}: "
            "pip install 'kiwi-jupyter[kubernetes]'",
        )

    from kiwi_kubernetes import process

    return process.main(
        process.Options(
            socket_dir=directory_of(args).absolute(),
            kubelet_dir=args.kubelet_dir.absolute(),
            cdi_dir=args.cdi_dir,
            cdi_spec=admin_files.read("cdi"),
            config=args.config,
            resource=args.resource,
            replicas=args.replicas,
            features_dir=args.features_dir,
            log_json=args.log_json,
        )
    )


def _resource(text: str) -> str:
    if _RESOURCE.fullmatch(text) is None or "kubernetes.io/" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a resource; write for example kiwi-jupyter/gpu"
        )
    return text
