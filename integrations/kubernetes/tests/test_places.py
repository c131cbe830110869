"""Tests of which places a container gets, with made-up statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from made_up_status import gpu, session

from kiwi_kubernetes.api import ContainerPreferredAllocationRequest, Device
from kiwi_kubernetes.places import Offer, devices, preferred, shared_gpu

if TYPE_CHECKING:
    from kiwi_core.wire.messages import GpuStatus


def chosen(available: str, *gpus: GpuStatus, size: int = 1, must: str = "") -> str:
    wanted = ContainerPreferredAllocationRequest(
        available_deviceIDs=[f"GPU-{place}" for place in available.split()],
        must_include_deviceIDs=[f"GPU-{place}" for place in must.split()],
        allocation_size=size,
    )
    return " ".join(preferred(wanted, gpus)).replace("GPU-", "")


def test_the_shortest_wait_comes_first_and_an_unknown_one_last() -> None:
    gpus = gpu(0, wait_s=None), gpu(1, wait_s=40.0), gpu(2, wait_s=9.0)
    available = "0::0 1::0 1::1 2::0 3::0"
    assert chosen(available, *gpus) == "2::0"
    assert chosen(available, *gpus, size=5) == "2::0 1::0 1::1 0::0 3::0"


def test_of_equal_waits_the_emptiest_gpu_is_taken() -> None:
    busy = gpu(1, session("a"), session("b"), wait_s=0.4)
    assert chosen("0::3 1::0 1::1", gpu(0, wait_s=0.0), busy) == "1::0"
    assert chosen("0::3 1::0", gpu(0, wait_s=0.0), busy) == "0::3"


def test_a_required_place_is_chosen_and_its_gpu_preferred() -> None:
    gpus = gpu(0, wait_s=0.0), gpu(1, wait_s=40.0)
    assert chosen("0::0 1::0 1::1", *gpus, must="1::1") == "1::1"
    assert chosen("0::0 1::0 1::1", *gpus, must="1::1", size=2) == "1::1 1::0"


def test_fewer_places_than_asked_for() -> None:
    assert chosen("0::0", gpu(0, wait_s=0.0), size=3) == "0::0"


def test_several_places_lead_to_the_gpu_of_most_of_them() -> None:
    assert shared_gpu(["GPU-a::0", "GPU-b::0", "GPU-b::1"]) == "GPU-b"
    assert shared_gpu(["GPU-b::0", "GPU-a::1"]) == "GPU-a"


def test_a_gpu_that_cannot_be_had_keeps_its_places() -> None:
    assert devices(Offer(replicas=2), {"GPU-b": "", "GPU-a": "silent"}) == [
        Device(ID="GPU-a::0", health="Unhealthy"),
        Device(ID="GPU-a::1", health="Unhealthy"),
        Device(ID="GPU-b::0", health="Healthy"),
        Device(ID="GPU-b::1", health="Healthy"),
    ]
