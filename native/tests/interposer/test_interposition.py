"""Tests that every look-up of a driver function returns Kiwi's wrapper, and no other does."""

from __future__ import annotations

import os
import sys

import pytest
from preload_world import compile_c, run


def lines(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_every_way_to_look_up(world, tmp_path):
    said = lines(world.run(compile_c("lookups.c", tmp_path / "lookups")))
    assert said == {
        "default-before": "none",
        "error-before": "told",
        "program-before": "none",
        "libc-no-such": "none",
        "libc-error": "told",
        "local": "kiwi",
        "local-data-free": "kiwi",
        "local-never": "kiwi",
        "local-wait": "kiwi",
        "local-no-such": "none",
        "default-after": "none",
        "libc": "other",
        "again-same": "yes",
        "deepbind": "kiwi",
        "get-proc": "kiwi",
        "proc-launch": "kiwi",
        "proc-alloc": "kiwi",
        "proc-never": "kiwi",
        "proc-proc-same": "yes",
        "proc-no-such": "none error",
    }


def test_switched_off_nothing_is_replaced(world, tmp_path):
    program = compile_c("lookups.c", tmp_path / "lookups")
    said = lines(world.run(program, KIWI_DISABLE="1"))
    assert "kiwi" not in said.values()
    assert said == lines(run(program, environment=world.plain))


def test_the_next_library_is_the_callers_next(world, tmp_path):
    shared = ("-shared", "-fPIC")
    first = compile_c("next.c", tmp_path / "libfirst.so", "-DFIRST", *shared)
    second = compile_c("next.c", tmp_path / "libsecond.so", "-DSECOND", *shared)
    flags = ("-Wl,--no-as-needed", first, second, f"-Wl,-rpath,{tmp_path}")
    program = compile_c("next.c", tmp_path / "next", *flags)
    done = world.run(program)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


@pytest.mark.parametrize("kiwi_first", [True, False])
def test_another_interposer_of_the_driver(world, tmp_path, kiwi_first):
    other = compile_c("next.c", tmp_path / "libother.so", "-DFIRST", "-shared", "-fPIC")
    cuda = world.libraries.libcuda
    program = compile_c("linked.c", tmp_path / "linked", cuda)
    order = [str(world.library), str(other)]
    done = world.run(program, LD_PRELOAD=":".join(order if kiwi_first else order[::-1]))
    assert (done.returncode, done.stdout) == (0, "passed 3\n"), done.stderr


def test_a_program_linked_with_the_driver(world, tmp_path):
    program = compile_c("linked.c", tmp_path / "linked", world.libraries.libcuda)
    done = world.run(program)
    # allocation, fill and copy pass the gate; waiting and freeing do not
    assert (done.returncode, done.stdout) == (0, "passed 3\n"), done.stderr
    done = run(program, environment=world.plain)
    assert (done.returncode, done.stdout) == (0, "passed -1\n"), done.stderr


SHARED = ("-shared", "-fPIC")


@pytest.mark.parametrize("kind", ["FUNCTIONS", "VARIABLES"])
@pytest.mark.parametrize("loaded", ["linked", "later"])
def test_a_library_with_names_of_the_driver_of_its_own(world, tmp_path, kind, loaded):
    own = compile_c("own_names.c", tmp_path / "libown.so", f"-D{kind}", *SHARED)
    flags = (own, f"-Wl,-rpath,{tmp_path}") if loaded == "linked" else ("-DLATER",)
    program = compile_c("own_names.c", tmp_path / "program", *flags)
    command = (program,) if loaded == "linked" else (program, own)
    for environment in (world.plain, world.environment):
        done = run(*command, environment=environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.parametrize("pie", ["-pie", "-no-pie"])
def test_a_program_that_uses_such_variables_itself(world, tmp_path, pie):
    """The variables move into the program then, with the value that the loader found first."""
    own = compile_c("own_names.c", tmp_path / "libown.so", "-DVARIABLES", *SHARED)
    flags = (
        "-DDIRECT",
        own,
        f"-Wl,-rpath,{tmp_path}",
        pie,
        "-fPIE" if pie == "-pie" else "-fno-pie",
    )
    done = world.run(compile_c("own_names.c", tmp_path / "program", *flags))
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n0 0\n", "")


def test_such_functions_without_a_driver(world, tmp_path):
    own = compile_c("own_names.c", tmp_path / "libown.so", "-DFUNCTIONS", *SHARED)
    program = compile_c("own_names.c", tmp_path / "program", own, f"-Wl,-rpath,{tmp_path}")
    done = world.run(program, LD_LIBRARY_PATH="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.parametrize("flags", [("-Wl,-z,now",), ("-Wl,-z,lazy", "-Wl,-z,norelro")])
@pytest.mark.parametrize("pie", ["-pie", "-no-pie"])
def test_a_program_that_is_linked_in_another_way(world, tmp_path, flags, pie):
    cuda = world.libraries.libcuda
    code = "-fPIE" if pie == "-pie" else "-fno-pie"
    program = compile_c("linked.c", tmp_path / "linked", cuda, *flags, pie, code)
    done = world.run(program)
    assert (done.returncode, done.stdout) == (0, "passed 3\n"), done.stderr


@pytest.mark.parametrize("binding", ["lazy", "now"])
def test_a_library_that_is_linked_with_the_driver_and_loaded_later(world, tmp_path, binding):
    plugin = compile_c("plugin.c", tmp_path / "libplugin.so", *SHARED, world.libraries.libcuda)
    program = compile_c("plugin.c", tmp_path / "program", "-DPROGRAM")
    said = lines(world.run(program, plugin, binding))
    assert said == dict.fromkeys(("address", "table", "default"), "kiwi") | {
        "early": "0",
        "call": "201",
    }
    plain = lines(run(program, plugin, binding, environment=world.plain))
    assert plain == said | dict.fromkeys(("address", "table", "default"), "driver")


def test_a_driver_with_oddities(odd):
    said = lines(run(odd.directory / "odd", environment=odd.environment))
    assert said == {
        "another-address": "kiwi 1000 right 1",
        "another-address-again": "same",
        "by-name-differs": "differs",
        "new-form": "kiwi right 1",
        "new-form-by-name": "same",
        "by-version": "same",
        "newer-program": "same",
        "new-call": "kiwi 0 right",
        "new-call-by-name": "kiwi",
        "old-elsewhere": "kiwi 0 right",
        "floats": "kiwi 0",
        "through-exported-name": "kiwi 0 1",
        "inside": "driver",
    }


def test_functions_newer_than_the_library_are_noted(odd, tmp_path):
    log = tmp_path / "log"
    done = run(odd.directory / "odd", environment=odd.environment | {"KIWI_PRELOAD_LOG": str(log)})
    assert done.stderr == ""
    said = log.read_text()
    newer = "(interface 99000) is newer than this library: it is held"
    assert f"cuBrandNewFunction {newer} only while the gate is shut" in said
    assert f"cuLaunchKernel {newer} at the closed gate" in said
    assert "cuProfilerStart" not in said, "it is old, and stands in another header"


def test_many_threads_are_the_first(odd):
    for _ in range(5):
        done = run(odd.directory / "race", environment=odd.environment)
        assert (done.returncode, done.stdout) == (0, "passed 800\n"), done.stderr


WHICH = """
import ctypes, sys
kiwi = ctypes.CDLL(None)
def wrapped(path):
    address = ctypes.cast(ctypes.CDLL(path).cuLaunchKernel, ctypes.c_void_p).value
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return line.rstrip().endswith("libkiwi_preload.so")
print(*(wrapped(path) for path in sys.argv[1:]))
"""


def test_only_the_first_of_two_drivers_is_wrapped(odd, tmp_path):
    """The toolkit's stub, which programs may look up first, does not count as a driver, wherever it
    has been copied to."""
    driver = (odd.directory / "libcuda.so.1").read_bytes()
    paths = [tmp_path / name / "libcuda.so.1" for name in ("stubs", "build", "one", "other")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(driver)
    compile_c("stub.c", paths[1], "-Wl,-soname,libcuda.so.1", *SHARED)
    done = run(sys.executable, "-c", WHICH, *paths, environment=os.environ | odd.environment)
    assert (done.returncode, done.stdout) == (0, "False False True False\n"), done.stderr
    assert done.stderr.count("second CUDA driver") == 1
