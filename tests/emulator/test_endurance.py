"""Tests of several programs, swapped at random on a device that holds two of them."""

from __future__ import annotations

import random

import pytest

MIB = 1 << 20
WORKERS = 5
SWAPS = 100


@pytest.mark.timeout(240)
def test_many_swaps_lose_no_byte(boot):
    machine = boot("1x64MiB")
    dice = random.Random(20)
    controller = machine.worker("ck(driver.cuInit(0))")
    workers = []
    for _ in range(WORKERS):
        worker = machine.worker("init(); loop = Loop(alloc(24 * MIB), 64 << 10)")
        controller.do(f"suspend({worker.pid})")
        workers.append(worker)
    resident, paged_out, swaps = [], list(workers), 0
    while swaps < SWAPS:
        if len(resident) == 2:
            victim = resident.pop(dice.randrange(2))
            controller.do(f"suspend({victim.pid})")
            paged_out.append(victim)
        chosen = paged_out.pop(dice.randrange(len(paged_out) - 1) if len(paged_out) > 1 else 0)
        controller.do(f"resume({chosen.pid})")
        resident.append(chosen)
        swaps += 1
        assert machine.used() == len(resident) * 26 * MIB
    for worker in workers:
        while worker in paged_out:
            victim = resident.pop(0) if len(resident) == 2 else None
            if victim:
                controller.do(f"suspend({victim.pid})")
                paged_out.append(victim)
            controller.do(f"resume({worker.pid})")
            paged_out.remove(worker)
            resident.append(worker)
        assert worker.get("loop.stop()") > 0
    assert sum(machine.books(w).restores for w in workers) >= swaps
