"""``kiwi device-plugin``: puts the parts together, and ends them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from kiwi_core import log as logs
from kiwi_core.errors import KiwiError
from kiwi_kubernetes import files, sharing
from kiwi_kubernetes.kubelet import Kubelet
from kiwi_kubernetes.label import Label
from kiwi_kubernetes.places import REPLICAS, RESOURCE, Offer
from kiwi_kubernetes.service import DevicePluginService
from kiwi_kubernetes.watch import EVERY_S, Watch

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable
    from typing import Any

    from kiwi_core.wire.messages import GpuStatus

log = structlog.get_logger()

CDI_FILE: Final = "kiwi.json"
"""The name that ``kiwi doctor --print cdi`` proposes: two files in one directory that describe the
same device make the device unusable."""


@dataclass(frozen=True)
class Options:
    """``resource`` and ``replicas`` are ``None`` where the file decides, else the default.
    ``cdi_spec`` is the text of ``kiwi doctor --print cdi``."""

    socket_dir: Path
    kubelet_dir: Path
    cdi_dir: Path
    cdi_spec: str
    config: Path | None = None
    resource: str | None = None
    replicas: int | None = None
    features_dir: Path | None = None
    log_json: bool = False


def main(options: Options) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit status. Raises ``KiwiError`` for an error that
    somebody must fix.
    """
    logs.configure(as_json=options.log_json)
    os.umask(0o077)  # the socket is for root's kubelet; files for others get an explicit mode
    offer = _offer(options)
    spec = json.loads(options.cdi_spec)
    _mount(spec, options.socket_dir)
    files.replace(options.cdi_dir / CDI_FILE, json.dumps(spec, indent=2) + "\n")
    log.info(
        "device plugin starts",
        resource=offer.resource, replicas=offer.replicas, sockets=str(options.socket_dir),
    )  # fmt: skip
    watch = Watch(options.socket_dir, Path("/"))
    service = DevicePluginService(offer, watch, options.socket_dir, _name_of(spec))
    kubelet = Kubelet(options.kubelet_dir, offer.resource, service.handler())
    label = Label(options.features_dir) if options.features_dir is not None else None
    asyncio.run(_run_until_signal(_look(watch, label), kubelet.run()))
    if label is not None:
        label.remove()
    log.info("device plugin ends")
    return 0


def _offer(options: Options) -> Offer:
    """Combine the command line, which decides, with the file and the defaults."""
    shared = sharing.read(options.config) if options.config is not None else None
    if shared is None:
        return Offer(options.resource or RESOURCE, options.replicas or REPLICAS)
    if shared.ignored:
        log.warning("keys without a meaning here", file=str(options.config), keys=shared.ignored)
    return Offer(
        options.resource or shared.resource,
        options.replicas or shared.replicas,
        shared.one_only,
    )


def _mount(spec: dict[str, Any], sockets: Path) -> None:
    """Make the device mount ``sockets`` of the node at the usual place in containers."""
    ((mount,),) = (device["containerEdits"]["mounts"] for device in spec["devices"])
    mount["hostPath"] = str(sockets)


def _name_of(spec: dict[str, Any]) -> str:
    """Return the full name of the only CDI device in ``spec``."""
    (device,) = spec["devices"]
    return f"{spec['kind']}={device['name']}"


async def _look(watch: Watch, label: Label | None) -> None:
    complaint = ""
    while True:
        gpus = await watch.look()
        if label is not None:
            complaint = _tell(label, gpus, complaint)
        await asyncio.sleep(EVERY_S)


def _tell(label: Label, gpus: Iterable[GpuStatus], complaint: str) -> str:
    """Update the label. A full disk is no reason to stop: log and return the error."""
    try:
        label.update(gpus)
    except KiwiError as error:
        if str(error) != complaint:
            log.warning("no label for the wait", why=str(error))
        return str(error)
    return ""


async def _run_until_signal(*parts: Coroutine[Any, Any, None]) -> None:
    """Run ``parts`` until a signal comes, or one of them fails; then end all, in reverse order."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    tasks = [asyncio.create_task(part) for part in (*parts, _wait(signalled))]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in reversed(tasks):
        task.cancel()
        with suppress(asyncio.CancelledError, KiwiError):
            await task
    for task in done:
        task.result()


async def _wait(signalled: asyncio.Event) -> None:
    await signalled.wait()
