"""A kubelet as a device plugin sees it, over real gRPC on real sockets.

Like ``pkg/kubelet/cm/devicemanager``, it clears its directory of sockets when it starts, calls back
while it answers a registration, watches the places, and asks the plugin for its preference before
it gives places to a container. It imports nothing of Kiwi: its messages are compiled from
``deviceplugin.proto``.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patience import PATIENCE_S, wait_until

# Tests start programs while this kubelet's threads run; the programs are new ones, not forks.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import grpc

if TYPE_CHECKING:
    from pathlib import Path

API, RPC = grpc.protos_and_services("deviceplugin.proto")

_EXTENDED = re.compile(r"(?!.*kubernetes\.io/)[a-z0-9.-]+/[A-Za-z0-9._-]+")


class AdmissionError(Exception):
    """The plugin refused a container; the text is what ``kubectl describe pod`` shows."""


@dataclass(frozen=True)
class Given:
    """The resources that the container engine has to give to a container."""

    places: list[str]
    envs: dict[str, str]
    cdi: list[str]

    @property
    def gpu(self) -> str:
        return self.envs["KIWI_GPU"]


class FakeKubelet:
    def __init__(self, directory: Path, refuse: str = "", *, clears: bool = True) -> None:
        self.directory = directory
        self.refuse = refuse
        """The reason why no plugin may register; empty if it may."""
        self.refused = 0
        self.resource = ""
        self.registrations = 0
        self.health: dict[str, str] = {}
        self.used: set[str] = set()
        self.lists: list[int] = []
        """The number of places in each list that the plugin has sent."""
        self._calls: Any = None
        self._channels: list[grpc.Channel] = []
        self._watchers: list[threading.Thread] = []
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        for path in directory.iterdir():
            if path.is_socket() and clears:
                path.unlink()
        self._server = grpc.server(ThreadPoolExecutor(4))
        RPC.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{directory / 'kubelet.sock'}")
        self._server.start()

    def Register(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if self.refuse:
            self.refused += 1
            context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        assert request.version == "v1beta1"
        assert _EXTENDED.fullmatch(request.resource_name)
        assert (self.directory / request.endpoint).parent == self.directory
        channel = grpc.insecure_channel(f"unix:{self.directory / request.endpoint}")
        calls = RPC.DevicePluginStub(channel)
        options = calls.GetDevicePluginOptions(API.Empty(), timeout=PATIENCE_S)
        assert options == request.options
        assert options.get_preferred_allocation_available
        self._channels.append(channel)
        self._calls, self.resource = calls, request.resource_name
        watcher = threading.Thread(target=self._watch, args=(calls,))
        self._watchers.append(watcher)
        watcher.start()
        self.registrations += 1
        return API.Empty()

    def _watch(self, calls: Any) -> None:
        try:
            for answer in calls.ListAndWatch(API.Empty()):
                self.health = {device.ID: device.health for device in answer.devices}
                self.lists.append(len(answer.devices))
        except grpc.RpcError:
            if calls is self._calls:
                self.health = dict.fromkeys(self.health, "Unhealthy")

    @property
    def healthy(self) -> list[str]:
        return sorted(place for place, health in self.health.items() if health == "Healthy")

    def free(self) -> Counter[str]:
        """Return how many places of each GPU a pod could get now."""
        return Counter(place.split("::")[0] for place in set(self.healthy) - self.used)

    def wait_healthy(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        wait_until(lambda: len(self.healthy) == count, f"{count} healthy places", timeout_s)

    def prefer(self, count: int, must: list[str] | None = None) -> list[str]:
        wanted = API.ContainerPreferredAllocationRequest(
            available_deviceIDs=sorted(set(self.healthy) - self.used),
            must_include_deviceIDs=must or [],
            allocation_size=count,
        )
        request = API.PreferredAllocationRequest(container_requests=[wanted])
        answer = self._calls.GetPreferredAllocation(request, timeout=PATIENCE_S)
        (one,) = answer.container_responses
        return list(one.deviceIDs)

    def admit(self, count: int = 1) -> Given:
        """Give ``count`` places to a container of a new pod."""
        assert len(set(self.healthy) - self.used) >= count, f"Insufficient {self.resource}"
        places = self.prefer(count)
        assert len(places) == count
        assert not set(places) & self.used
        given = self.allocate(places)
        self.used |= set(places)
        return given

    def allocate(self, places: list[str]) -> Given:
        wanted = API.ContainerAllocateRequest(devices_ids=places)
        request = API.AllocateRequest(container_requests=[wanted])
        try:
            answer = self._calls.Allocate(request, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            raise AdmissionError(error.details()) from error
        (one,) = answer.container_responses
        assert not one.mounts
        assert not one.devices
        return Given(places, dict(one.envs), [device.name for device in one.cdi_devices])

    def call_with(self, method: str, data: bytes) -> grpc.StatusCode:
        """Send bytes that may not be a message; return the plugin's code."""
        call = self._channels[-1].unary_unary(f"/v1beta1.DevicePlugin/{method}", None, None)
        try:
            call(data, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK

    def stop(self) -> None:
        """End like a kubelet: its socket disappears."""
        self._server.stop(None).wait()
        for channel in self._channels:
            channel.close()
        for watcher in self._watchers:
            watcher.join(PATIENCE_S)
