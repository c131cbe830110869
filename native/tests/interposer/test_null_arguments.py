"""Tests that no wrapper reads an argument before the driver has judged it."""

from __future__ import annotations

import re

from preload_world import compile_c, run

from kiwi_core.preload import _build


def hooked() -> list[str]:
    """Return the names of all functions that have a wrapper by hand."""
    listed = (_build.SOURCES / "hooks" / "calls.def").read_text()
    names = set(re.findall(r"^[^#].*", listed, re.MULTILINE))
    names = {name for line in names for name in re.findall(r"\bhook:(\w+)@", line)}
    # The emulated driver lacks the first versions of these two, which the wrappers do not need.
    return sorted(names - {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset"})


def test_a_call_with_nothing_but_nulls(world, tmp_path):
    program = compile_c("null.c", tmp_path / "null", "-w")
    names = hooked()
    assert len(names) > 40
    plain = run(program, *names, environment=world.plain)
    assert len(plain.stdout.splitlines()) == len(names)
    assert "killed" not in plain.stdout, "the emulated driver judges its arguments itself"
    assert "ended" not in plain.stdout, "each call was made"
    owning = world.run(program, *names)
    gate_only = world.run(program, *names, KIWI_PRELOAD_OWN="0")
    assert owning.stdout.splitlines() == plain.stdout.splitlines()
    assert gate_only.stdout.splitlines() == plain.stdout.splitlines()
