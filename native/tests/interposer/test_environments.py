"""Tests that programs started in unusual ways run, with or without the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from preload_world import MIB, World, compile_c, run
from sanitizers import need_sanitizers

from kiwi_core.compiled import find_compiler

USE = f"""
import ctypes, json, os, sys
from cuda.bindings import driver
def ck(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) > 1 else None
def use():
    ck(driver.cuInit(0))
    ck(driver.cuCtxSetCurrent(ck(driver.cuDevicePrimaryCtxRetain(ck(driver.cuDeviceGet(0))))))
    pointer = ck(driver.cuMemAlloc({MIB}))
    ck(driver.cuMemsetD8(pointer, 7, {MIB}))
    back = bytearray({MIB})
    ck(driver.cuMemcpyDtoH(back, pointer, {MIB}))
    ck(driver.cuMemFree(pointer))
    return hasattr(ctypes.CDLL(None), "kiwi_preload_version"), set(back) == {{7}}
"""
ALONE = USE + "print(json.dumps(use()))"
CHILDREN = {
    "subprocess": """
import subprocess
print(subprocess.run([sys.executable, "-c", os.environ["ALONE"]], stdout=-1, text=True).stdout)
""",
    "spawn": """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps(pool.apply(use)))
""",
    "fork": """
import multiprocessing
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(json.dumps(pool.apply(use)))
""",
    "stripped": """
import subprocess
bare = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
command = [sys.executable, "-c", os.environ["ALONE"]]
print(subprocess.run(command, env=bare, stdout=-1, text=True).stdout)
""",
}


def told(done: subprocess.CompletedProcess[str]) -> tuple[bool, bool]:
    """Return whether the library was loaded, and whether the GPU's results are right."""
    assert done.returncode == 0, done.stderr
    there, right = json.loads(done.stdout.strip().splitlines()[-1])
    return there, right


@pytest.mark.parametrize("how", CHILDREN)
def test_children(world: World, tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"  # a spawned child imports it
    program.write_text(USE + CHILDREN[how])
    done = world.run(sys.executable, program, ALONE=ALONE)
    assert told(done) == (how != "stripped", True)


def test_beside_another_preloaded_library(world: World, tmp_path: Path) -> None:
    source, other = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text("int other_library_is_here(void) { return 1; }\n")
    subprocess.run([*find_compiler(), "-shared", "-fPIC", "-o", other, source], check=True)
    for order in ((world.library, other), (other, world.library)):
        preloaded = ":".join(map(str, order))
        assert told(world.run(sys.executable, "-c", ALONE, LD_PRELOAD=preloaded)) == (True, True)


@pytest.mark.parametrize("content", [None, b"\x7fELF of another machine", b""])
def test_a_library_that_cannot_be_loaded(
    world: World, tmp_path: Path, content: bytes | None
) -> None:
    """The dynamic linker prints an error, and the program runs without Kiwi."""
    library = tmp_path / "libkiwi_preload.so"
    if content is not None:
        library.write_bytes(content)
    done = world.run(sys.executable, "-c", ALONE, LD_PRELOAD=str(library))
    assert told(done) == (False, True)
    assert "cannot be preloaded" in done.stderr


def test_a_program_with_the_address_sanitizer(world: World, tmp_path: Path) -> None:
    """Its runtime is a library that insists on coming first."""
    need_sanitizers(find_compiler(), "address", tmp_path)
    cuda = world.libraries.libcuda
    program = compile_c("linked.c", tmp_path / "linked", cuda, "-fsanitize=address")
    done = world.run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "passed 3\n", "")


def test_an_interpreter_that_never_uses_the_gpu(world: World) -> None:
    """The library prints nothing and starts no thread: most programs of a session are like this."""
    code = "import os; print(len(os.listdir('/proc/self/task')))"
    done = world.run(sys.executable, "-S", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_static_program(world: World, tmp_path: Path) -> None:
    source, program = tmp_path / "static.c", tmp_path / "static"
    source.write_text('#include <stdio.h>\nint main(void) { puts("fine"); return 0; }\n')
    subprocess.run([*find_compiler(), "-static", "-o", program, source], check=True)
    done = run(program, environment=world.environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
