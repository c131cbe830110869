"""Tests of how pages of new host memory come: by several threads, ahead of the copies."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from cramped import limited

import kiwi_emulator as emulator

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuda_processes import Worker
    from preload_world import World

HOST_RESERVE_BYTES = 256 << 20
"""RAM that the arena leaves to others (arena.c)."""
HELD = "held = [make(size, seed) for seed, size in enumerate((12 * MIB, 300_000, 20 * MIB))]"
RSS = (
    "import re\n"
    "def arena_rss():\n"
    "    maps = re.split(r'^[0-9a-f]+-[0-9a-f]+ ', open('/proc/self/smaps').read(), flags=re.M)\n"
    "    ours = [m for m in maps if re.search(r'^VmFlags:.* dc .*dd .*hg', m, re.M)]\n"
    "    return sum(int(re.search(r'^Rss: *([0-9]+) kB', m, re.M)[1]) << 10 for m in ours)\n"
)
"""The arena's mappings are not inherited, not in core files, and of huge pages if there are any."""


def no_populating(result: int) -> str:
    """Return code after which the kernel answers MADV_POPULATE_WRITE with an error, in this thread
    and in those that it starts: a seccomp filter."""
    return f"""
import struct
MADVISE, POPULATE_WRITE = {{"x86_64": 28, "aarch64": 233}}[os.uname().machine], 23
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000 | {result}
filter = [(LOAD, 0, 0, 0), (EQUAL, 0, 3, MADVISE), (LOAD, 0, 0, 32), (EQUAL, 0, 1, POPULATE_WRITE),
          (RETURN, 0, 0, ERROR), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filter))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filter), ctypes.addressof(code)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
"""


@pytest.mark.parametrize("skip", [0, 1, 2, 5])
def test_a_page_that_cannot_be_had_refuses_the_page_out(
    program: Callable[..., Worker], skip: int
) -> None:
    p = program()
    p.do(HELD)
    p.do(f"fault('pages', {skip}, -1)")
    assert p.get("out()").startswith("refused no-host-memory: ")
    p.do("fault('pages', 0, 0); same(*held); check(); assert arena()['used'] == 0")
    p.do("swap(); same(*held)")


def test_pages_that_could_not_be_had_are_asked_for_again(program: Callable[..., Worker]) -> None:
    """Their piece of the arena stays, and looks like room."""
    p = program()
    p.do(HELD)
    p.do("fault('pages', 0, -1)")
    for _ in range(3):
        assert p.get("out()").startswith("refused no-host-memory: ")
    p.do("fault('pages', 0, 0); same(*held); swap(); same(*held); check()")


def test_the_kernels_refusal_does_not_end_the_program(program: Callable[..., Worker]) -> None:
    """A thread that touched the page instead would be killed."""
    p = program()
    p.do("import ctypes, os")
    p.do(HELD)
    p.do(no_populating(errno.ENOMEM))
    assert p.get("out()").startswith("refused no-host-memory: ")
    p.do("same(*held); check()")


def test_nothing_is_pinned_whose_pages_cannot_be_had(program: Callable[..., Worker]) -> None:
    p = program()
    p.do("fault('pages', 0, -1); prepare()")
    p.do(HELD)
    p.do("until(lambda: arena()['refused'], 'nothing was tried')")
    assert p.get("arena()['pinned']") == 0
    p.do("fault('pages', 0, 0); swap(); same(*held); check()")


def test_a_kernel_that_does_not_know_how_has_its_pages_touched(
    program: Callable[..., Worker],
) -> None:
    p = program()
    p.do("import ctypes, os")
    p.do(HELD)
    p.do(no_populating(errno.EINVAL))
    p.do("swap(); same(*held)")


def test_only_pages_that_are_needed_are_faulted_in(
    program: Callable[..., Worker], world: World
) -> None:
    """A piece of the arena is larger than what a small program has. Its copies take so long that
    the threads have time for all of the piece."""
    p = program()
    p.do(RSS + "held = [make(2 * MIB, 1), make(2 * MIB, 2)]")
    emulator.set_copy_bandwidth(world.state, 32 << 20)
    assert p.get("out()") == "moved"
    emulator.set_copy_bandwidth(world.state, 0)
    assert p.get("arena()['pageable']") >= 8 << 20
    assert 4 << 20 <= p.get("arena_rss()") < 8 << 20
    assert p.get("back()") == "moved"
    p.do("same(*held); check()")


def test_a_job_with_too_little_ram_keeps_its_memory_in_the_gpu(
    program: Callable[..., Worker],
) -> None:
    """A group at its limit has a process killed that touches one more page."""
    p = program()
    p.do(HELD)
    with limited(p.pid, HOST_RESERVE_BYTES + (20 << 20)):
        assert p.get("out()").startswith("refused no-host-memory: ")
        p.do("same(*held); check()")
    with limited(p.pid, HOST_RESERVE_BYTES + (60 << 20)):
        p.do("swap(); same(*held)")
