"""Custom storage, as documented for CUDA 13.4: the caller copies a process's memory itself.

On a real GPU these need driver 13.4 or newer.  What happens when the caller is killed before it
completes is documented nowhere and not tried here: it may cost the machine (see the ADR).
"""

from __future__ import annotations

import pytest
from cuda_processes import wait_until
from cuda_setups import CUSTOM, VMM

from kiwi_core import emulator

MIB = 1 << 20
ILLEGAL = "CUDA_ERROR_ILLEGAL_STATE"


@pytest.fixture
def caller(platform, tmp_path):
    state = tmp_path / "gpus"
    if state.exists():  # emulated: before any process asks for its functions
        emulator.set_driver_version(state, 13040)
    caller = platform.worker("init()\n" + CUSTOM)
    version = caller.get("ck(driver.cuDriverGetVersion())")
    if version < 13040:
        pytest.skip(f"custom storage needs a driver for CUDA 13.4; this one is for {version}")
    return caller


@pytest.fixture
def target(caller, platform):
    return platform.worker()


def state(caller, target):
    return caller.get(f"int(ck(driver.cuCheckpointProcessGetState({target.pid})))")


def call(caller, target, what):
    return caller.get(f"name_of(driver.cuCheckpointProcess{what}, {target.pid}, None)")


def test_the_states_in_order(caller, target):
    target.do("p = alloc(64 * MIB)")
    expected = target.get("fill(p, 7, 64 * MIB)")
    assert call(caller, target, "Lock") == "CUDA_SUCCESS"
    seen = [state(caller, target)]
    for kind, copy in (
        ("Checkpoint", "images = copy_out(info)"),
        ("Restore", "copy_in(info, images)"),
    ):
        caller.do(f"info = custom({kind!r}, {target.pid})")
        seen.append(state(caller, target))
        caller.do(f"{copy}; complete(info.handle)")
        seen.append(state(caller, target))
    assert seen == [1, 4, 2, 5, 1]
    assert call(caller, target, "Unlock") == "CUDA_SUCCESS"
    assert target.get("digest(p, 64 * MIB)") == expected


def test_same_addresses_same_bytes_for_every_kind_of_memory(caller, target):
    target.do(
        VMM + "h = ck(driver.cuMemCreate(size, prop, 0)); v = int(ck(driver.cuMemAddressReserve("
        "size, 0, 0, 0)))\nck(driver.cuMemMap(v, size, 0, h, 0))\n"
        "ck(driver.cuMemSetAccess(v, size, [desc], 1))\n"
        "s = ck(driver.cuStreamCreate(1)); a = int(ck(driver.cuMemAllocAsync(16 * MIB, s)))\n"
        "ck(driver.cuStreamSynchronize(s)); p = alloc(16 * MIB); small = alloc(100)\n"
        "blocks = ((v, size), (a, 16 * MIB), (p, 16 * MIB), (small, 100))\n"
        "expected = [fill(at, i, n) for i, (at, n) in enumerate(blocks)]"
    )
    for _ in range(2):
        assert call(caller, target, "Lock") == "CUDA_SUCCESS"
        caller.do(f"images = take_out({target.pid}); bring_in({target.pid}, images)")
        assert call(caller, target, "Unlock") == "CUDA_SUCCESS"
        assert target.get("[digest(at, n) for at, n in blocks] == expected")


def test_what_is_mapped_is_the_targets_memory(caller, target):
    target.do("p = alloc(8 * MIB); fill(p, 5, 8 * MIB)")
    assert call(caller, target, "Lock") == "CUDA_SUCCESS"
    caller.do(f"images = take_out({target.pid})")
    assert caller.get("any(pattern(5, 8 * MIB)[: 2 * MIB] in image for image in images)")
    caller.do(f"bring_in({target.pid}, images)")
    assert call(caller, target, "Unlock") == "CUDA_SUCCESS"


def test_the_gpu_is_free_when_it_is_complete(caller, target):
    target.do("p = alloc(128 * MIB)")
    before = caller.get("used()")
    assert call(caller, target, "Lock") == "CUDA_SUCCESS"
    caller.do(f"images = take_out({target.pid})")
    wait_until(lambda: before - caller.get("used()") >= 128 * MIB, "the memory is free again")
    caller.do(f"bring_in({target.pid}, images)")
    assert call(caller, target, "Unlock") == "CUDA_SUCCESS"


def test_nothing_else_is_legal_until_it_is_complete(caller, target):
    target.do("p = alloc(MIB)")
    assert call(caller, target, "Lock") == "CUDA_SUCCESS"
    for kind, copy in (
        ("Checkpoint", "images = copy_out(info)"),
        ("Restore", "copy_in(info, images)"),
    ):
        caller.do(f"info = custom({kind!r}, {target.pid})")
        for wrong in ("Lock", "Checkpoint", "Restore", "Unlock"):
            assert call(caller, target, wrong) == ILLEGAL
        caller.do(f"{copy}; complete(info.handle)")
    assert call(caller, target, "Unlock") == "CUDA_SUCCESS"


def test_the_caller_needs_a_primary_context(caller, target, platform):
    bare = platform.worker("ck(driver.cuInit(0))\n" + CUSTOM)
    assert call(bare, target, "Lock") == "CUDA_SUCCESS"
    assert bare.fails(f"custom('Checkpoint', {target.pid})") == "CUDA_ERROR_INVALID_CONTEXT"
    assert state(bare, target) == 1
    assert call(bare, target, "Unlock") == "CUDA_SUCCESS"
