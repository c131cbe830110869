"""The places of GPUs, and which of them a container gets. Pure.

A place of a GPU is a device for the kubelet, which counts devices and gives each to one container.
All places of a GPU lead to the same GPU, so a container needs one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kiwi_core.client.gpu_placement import rank
from kiwi_kubernetes.api import HEALTHY, UNHEALTHY, Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kiwi_core.wire.messages import GpuStatus
    from kiwi_kubernetes.api import ContainerPreferredAllocationRequest

RESOURCE: Final = "kiwi-jupyter/gpu"
"""The resource that pods ask for, unless the admin names another."""

REPLICAS: Final = 8
"""Places on each GPU. More programs than that wait long, even if each works a tenth of its time."""

_BETWEEN: Final = "::"


@dataclass(frozen=True)
class Offer:
    """What a node offers: ``replicas`` places on each GPU. ``one_only``: refuse a container that
    asks for more than one place, which would get it nothing."""

    resource: str = RESOURCE
    replicas: int = REPLICAS
    one_only: bool = True


def gpu_of(place: str) -> str:
    """Return the UUID of the place's GPU."""
    return place.partition(_BETWEEN)[0]


def devices(offer: Offer, why_not: Mapping[str, str]) -> list[Device]:
    """Return all places of the GPUs in ``why_not``, which says why a GPU is not available now
    (empty: it is).
    """
    return [
        Device(ID=f"{uuid}{_BETWEEN}{n}", health=UNHEALTHY if why else HEALTHY)
        for uuid, why in sorted(why_not.items())
        for n in range(offer.replicas)
    ]


def preferred(
    wanted: ContainerPreferredAllocationRequest, statuses: Iterable[GpuStatus]
) -> list[str]:
    """Return the places that a container should get: those it must have, then those of the GPU with
    the shortest wait (unknown: last), of equal ones the emptiest. Several places are of one GPU, as
    far as it has enough.
    """
    must = list(wanted.must_include_deviceIDs)
    having = Counter(map(gpu_of, must))
    free = Counter(map(gpu_of, wanted.available_deviceIDs))
    ranks = {gpu.uuid: rank(gpu) for gpu in statuses}

    def order(place: str) -> tuple[object, ...]:
        uuid = gpu_of(place)
        felt_s, *others = ranks.get(uuid, (math.inf, math.inf))
        return -having[uuid], felt_s, uuid not in ranks, -free[uuid], *others, uuid, place

    rest = sorted(set(wanted.available_deviceIDs) - set(must), key=order)
    return (must + rest)[: wanted.allocation_size]


def shared_gpu(places: Iterable[str]) -> str:
    """Return the UUID of the one GPU that a container with these places gets: that of most of
    them."""
    counted = Counter(map(gpu_of, places))
    return min(counted, key=lambda uuid: (-counted[uuid], uuid))
