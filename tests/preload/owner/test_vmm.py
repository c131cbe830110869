"""Tests of memory that programs take by ``cuMemCreate``: it is owned, and moves like memory of
``cuMemAlloc``."""

from __future__ import annotations

import pytest

from kiwi_core import emulator

MIB = 1 << 20


def on_gpu(world, p):
    return emulator.books(world.state).process(p.pid).device_bytes.get(0, 0)


@pytest.fixture
def program(program):
    def start(**environment):
        p = program(**environment)
        p.do("from vmm_calls import *")
        return p

    return start


def test_as_jax_calls(program, world):
    p = program()
    p.do("held = [xla(2 * MIB, 1), xla(6 * MIB, 2)]; plain = make(3 * MIB, 3)")
    assert p.get("books()['owned']") == 12 * MIB
    assert p.get("sum(books()['unowned_' + kind] for kind in KINDS)") == 0
    for _ in range(3):
        assert p.get("out()") == "moved"
        assert on_gpu(world, p) == 0
        assert p.get("back()") == "moved"
        p.do("same(*held, plain); check()")
    p.do("xla_free(held.pop(0)); swap(); same(*held, plain)")
    assert p.get("books()['owned']") == 10 * MIB
    p.do("xla_free(held.pop(0)); drop(plain); check()")
    assert p.get("books()['owned']") == 0
    assert on_gpu(world, p) == 0
