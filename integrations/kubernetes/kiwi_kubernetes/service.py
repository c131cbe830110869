"""Answers the kubelet's calls to a device plugin."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog

from kiwi_core.client import gpu_placement
from kiwi_core.config import ENV_GPU
from kiwi_kubernetes import api, places

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kiwi_kubernetes.places import Offer
    from kiwi_kubernetes.watch import Watch

log = structlog.get_logger()

OPTIONS: Final = api.DevicePluginOptions(get_preferred_allocation_available=True)

EXPECTED_FOR_S: Final = 30.0
"""How long a daemon expects the program of a pod that was admitted: as long as a pod takes to
start. It is not known which session is the pod's, so the daemon cannot stop expecting it earlier.
The kubelet still knows afterwards whose place is taken.
"""


class DevicePluginService:
    """``cdi_name`` is the full name of the CDI device that brings the sockets in ``sockets`` into a
    container."""

    def __init__(self, offer: Offer, watch: Watch, sockets: Path, cdi_name: str) -> None:
        self._offer = offer
        self._watch = watch
        self._sockets = sockets
        self._cdi_name = cdi_name

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return what a gRPC server needs to serve this."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        rows: list[tuple[str, Any, Any, type[api.KubeletMessage]]] = [
            ("GetDevicePluginOptions", unary, self.get_options, api.Empty),
            ("ListAndWatch", stream, self.list_and_watch, api.Empty),
            ("GetPreferredAllocation", unary, self.prefer, api.PreferredAllocationRequest),
            ("Allocate", unary, self.allocate, api.AllocateRequest),
            ("PreStartContainer", unary, self.pre_start, api.PreStartContainerRequest),
        ]
        return grpc.method_handlers_generic_handler(
            api.DEVICE_PLUGIN,
            {
                name: kind(method, api.decoder(request), api.encode)
                for name, kind, method, request in rows
            },
        )

    async def get_options(self, _request: api.Empty, _context: Any) -> api.DevicePluginOptions:
        return OPTIONS

    async def list_and_watch(
        self, _request: api.Empty, _context: Any
    ) -> AsyncIterator[api.ListAndWatchResponse]:
        """Yield all places now, and after each change of their health, as long as the kubelet
        listens."""
        async for why_not in self._watch.changes():
            yield api.ListAndWatchResponse(devices=places.devices(self._offer, why_not))

    async def prefer(
        self, request: api.PreferredAllocationRequest, _context: Any
    ) -> api.PreferredAllocationResponse:
        statuses = await self._watch.look()
        return api.PreferredAllocationResponse(
            container_responses=[
                api.ContainerPreferredAllocationResponse(
                    deviceIDs=places.preferred(wanted, statuses)
                )
                for wanted in request.container_requests
            ]
        )

    async def allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:
        """Name what each container gets. Aborts the call, which ends the pod with the text as its
        reason, if a container asks for something that it cannot have.
        """
        wanted = [one.devices_ids for one in request.container_requests]
        for ids in wanted:
            await self._check(ids, context)
        await asyncio.gather(*(asyncio.to_thread(self._expect, ids) for ids in wanted))
        return api.AllocateResponse(container_responses=[self._allocated(ids) for ids in wanted])

    async def pre_start(
        self, _request: api.PreStartContainerRequest, _context: Any
    ) -> api.PreStartContainerResponse:
        return api.PreStartContainerResponse()

    async def _check(self, ids: list[str], context: Any) -> None:
        if not ids or (self._offer.one_only and len(ids) > 1):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{self._offer.resource}: {len(ids)} are asked for. A container shares one GPU, "
                "with all of its memory, and more places get it nothing. Ask for 1.",
            )
        for uuid in dict.fromkeys(map(places.gpu_of, ids)):
            why = self._watch.why_not.get(uuid, "no Kiwi daemon of this node serves it")
            if why:
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    f"{self._offer.resource}: GPU {uuid} cannot be had now: {why}",
                )

    def _expect(self, ids: list[str]) -> None:
        socket = self._sockets / f"{places.shared_gpu(ids)}.sock"
        gpu_placement.expect(socket, ids[0], EXPECTED_FOR_S)

    def _allocated(self, ids: list[str]) -> api.ContainerAllocateResponse:
        uuid = places.shared_gpu(ids)
        log.info("place is given to a container", gpu=uuid, places=len(ids))
        return api.ContainerAllocateResponse(
            envs=[api.Env(key=ENV_GPU, value=uuid)],
            cdi_devices=[
                api.CDIDevice(name=f"nvidia.com/gpu={uuid}"),
                api.CDIDevice(name=self._cdi_name),
            ],
        )
