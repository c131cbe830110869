"""Tests of the gate under the driver's name: later look-ups of the driver in a process find it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from preload_world import PATIENCE_S, World, compile_c

from kiwi_core import compiled, preload
from kiwi_core.preload import _build, _generate, ready

if TYPE_CHECKING:
    from collections.abc import Callable

LOAD = """
import ctypes, os, sys
from pathlib import Path
from kiwi_core import preload
gate = preload.load_gate(Path(os.environ["REAL"]), Path(os.environ["GATE"]))
kiwi = ctypes.CDLL(os.environ["GATE"], os.RTLD_NOLOAD)
passed = lambda: kiwi.kiwi_preload_test_passed()
def whose(function):
    address = ctypes.cast(function, ctypes.c_void_p).value
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return "gate" if line.rstrip().endswith("libkiwi_gate.so") else "driver"
def mapped(path):
    return os.path.realpath(path) in open("/proc/self/maps").read()
"""
USE = """
from cuda.bindings import driver
def ck(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) > 1 else None
ck(driver.cuInit(0))
ck(driver.cuCtxSetCurrent(ck(driver.cuDevicePrimaryCtxRetain(ck(driver.cuDeviceGet(0))))))
p = ck(driver.cuMemAlloc(4096)); ck(driver.cuMemsetD8(p, 7, 4096))
back = bytearray(4096); ck(driver.cuMemcpyDtoH(back, p, 4096)); ck(driver.cuMemFree(p))
assert set(back) == {7}
"""
WAYS = {
    "ctypes": """
cuda = ctypes.CDLL("libcuda.so.1")
assert whose(cuda.cuMemAlloc_v2) == whose(cuda.cuStreamSynchronize) == "gate"
assert cuda.cuInit(0) == 0
""",
    "no-load": """
cuda = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
assert whose(cuda.cuInit) == "gate" and cuda.cuInit(0) == 0
""",
    "without-version": """
cuda = ctypes.CDLL("libcuda.so", os.RTLD_NOW | os.RTLD_GLOBAL)
assert whose(cuda.cuInit) == "gate" and cuda.cuInit(0) == 0
""",
    "deepbind-lazy": """
cuda = ctypes.CDLL("libcuda.so.1", os.RTLD_LAZY | os.RTLD_DEEPBIND)
get, found, how = cuda.cuGetProcAddress_v2, ctypes.c_void_p(), ctypes.c_int()
assert cuda.cuInit(0) == 0
for name in (b"cuMemAlloc", b"cuCtxSynchronize", b"cuDeviceGetCount", b"cuGetProcAddress"):
    assert get(name, ctypes.byref(found), 12000, ctypes.c_uint64(0), ctypes.byref(how)) == 0
    assert whose(found) == "gate", name
""",
    "bindings": USE + "assert passed() >= 4, passed()",
    "bindings-twice": """
assert preload.load_gate(os.environ["REAL"], Path(os.environ["GATE"])) == gate
"""
    + USE,
    "linked": """
needs = ctypes.CDLL(os.environ["NEEDS"])
needs.needs_init.restype = ctypes.c_void_p
assert whose(ctypes.c_void_p(needs.needs_init())) == "gate"
assert needs.needs_version() > 12000
""",
    "child-by-fork": """
child = os.fork()
if child == 0:
    exec(os.environ["USE"]); os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
exec(os.environ["USE"])
""",
}


@pytest.fixture(scope="session")
def gate(library: Path) -> Path:
    return library.with_name(_build.GATE_NAME)


@pytest.fixture
def python(world: World, gate: Path, tmp_path: Path) -> Callable[..., None]:
    """Run code in a new interpreter that has the emulated driver, and no preloaded library."""
    needs = tmp_path / "libneeds.so"
    compile_c("needs.c", needs, "-shared", "-fPIC", world.libraries.libcuda)

    def run(code: str, **more: str) -> None:
        environment = world.plain | {"REAL": str(world.libraries.libcuda), "GATE": str(gate)}
        environment |= {"NEEDS": str(needs), "USE": USE} | more
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_find_the_driver_finds_the_gate(python: Callable[..., None], way: str) -> None:
    python(LOAD + "assert gate.state is preload.GateState.LOADED, gate\n" + WAYS[way])


def test_the_driver_is_loaded_when_it_is_needed(python: Callable[..., None]) -> None:
    python(
        LOAD
        + """
assert not mapped(os.environ["REAL"]) and preload.guarded()
cuda = ctypes.CDLL("libcuda.so.1"); assert not mapped(os.environ["REAL"])
other = preload.load_gate("/elsewhere/libcuda.so.1", Path(os.environ["GATE"]))
assert other.state is preload.GateState.LOADED, "not loaded yet: it may still change"
gate = preload.load_gate(os.environ["REAL"], Path(os.environ["GATE"]))
assert cuda.cuInit(0) == 0 and mapped(os.environ["REAL"])
other = preload.load_gate("/elsewhere/libcuda.so.1", Path(os.environ["GATE"]))
assert other.state is preload.GateState.TOO_LATE
assert preload.load_gate(os.environ["REAL"], Path(os.environ["GATE"])) == gate
"""
    )


def test_it_owns_nothing_unless_it_is_asked_to(python: Callable[..., None]) -> None:
    books = "b = (ctypes.c_uint64 * 32)(); kiwi.kiwi_preload_test_books(ctypes.byref(b))\n"
    code = LOAD + USE + "q = ck(driver.cuMemAlloc(1 << 20))\n" + books
    python(code + "assert b[0] == 0")
    python(code + "assert b[0] >= 1 << 20", KIWI_PRELOAD_OWN="1")


@pytest.mark.parametrize("how", ["by name", "by path"])
def test_a_gate_is_too_late_once_the_driver_is_loaded(
    python: Callable[..., None], tmp_path: Path, how: str
) -> None:
    there = tmp_path / "libcuda.so"
    python(
        "import ctypes, os\nos.symlink(os.environ['REAL'], os.environ['THERE'])\n"
        "early = ctypes.CDLL(os.environ['EARLY'])\n"
        + LOAD.replace("kiwi = ", "kiwi = None # ")
        + "assert gate.state is preload.GateState.TOO_LATE and 'before' in gate.reason\n"
        + USE,
        THERE=str(there),
        EARLY=str(there) if how == "by path" else "libcuda.so.1",
    )


def test_a_program_under_the_preloaded_library_has_a_gate_already(
    python: Callable[..., None], library: Path
) -> None:
    python(
        "from kiwi_core import preload\ngate = preload.load_gate('/nowhere/libcuda.so.1')\n"
        "assert gate.state is preload.GateState.LOADED and preload.guarded(), gate\n" + USE,
        LD_PRELOAD=str(library),
    )


def test_a_driver_that_vanishes_is_a_machine_without_gpu(
    python: Callable[..., None], tmp_path: Path
) -> None:
    gone = tmp_path / "libcuda.so.1"
    gone.write_bytes(b"no driver at all")
    python(
        LOAD + "assert gate.state is preload.GateState.LOADED\n"
        "assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 100  # no device",
        REAL=str(gone),
    )


def test_no_gate(
    python: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ready, "find", lambda: None)
    missing = preload.load_gate(tmp_path / "libcuda.so.1")
    assert missing.state is preload.GateState.UNAVAILABLE
    assert "has not been compiled" in missing.reason
    broken = tmp_path / "libkiwi_gate.so"
    broken.write_bytes(b"no library")
    python(
        LOAD.replace("kiwi = ", "kiwi = None # ")
        + "assert gate.state is preload.GateState.UNAVAILABLE and not preload.guarded()\n"
        + "assert 'cannot be loaded' in gate.reason\n"
        + USE,
        GATE=str(broken),
    )


def test_it_exports_every_function_of_the_header(gate: Path) -> None:
    header = _generate.read_header(compiled.find_compiler(), _build.find_header())
    done = subprocess.run(
        ["nm", "-D", "--defined-only", gate], capture_output=True, text=True, check=True
    )
    exported = {line.split()[2] for line in done.stdout.splitlines()}
    assert set(header.words) <= exported
    assert "dlsym" not in exported


UNTOUCHED = """
find = preload.find_untouched
assert gate.state is preload.GateState.LOADED and find()() == 1
cuda = ctypes.CDLL("libcuda.so.1")
assert find()() == 1, "looking it up is no use of it"
cuda.cuGetErrorName(0, ctypes.byref(ctypes.c_char_p()))
assert mapped(os.environ["REAL"]) and find()() == 1, "nor is a call before cuInit"
assert cuda.cuInit(0) == 0
assert find()() == 0
child = os.fork()
if child == 0:
    os._exit(7 if find()() == 0 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_whether_the_driver_was_initialised(python: Callable[..., None]) -> None:
    python(LOAD + UNTOUCHED)


def test_a_driver_that_the_gate_does_not_see_counts_as_used(python: Callable[..., None]) -> None:
    ask = "ask = preload.find_untouched()\nassert ask() == ask() == 1\n"
    python(LOAD + ask + "ctypes.CDLL(os.environ['REAL'])\nassert ask() == ask() == 0")


def test_switched_off_the_gate_answers_for_nothing(python: Callable[..., None]) -> None:
    python(LOAD + "assert preload.find_untouched()() == 0", KIWI_DISABLE="1")


def test_without_a_gate_nobody_can_say(python: Callable[..., None]) -> None:
    python("from kiwi_core import preload\nassert preload.find_untouched() is None")


def test_a_preloaded_library_knows_it_too(world: World, library: Path) -> None:
    code = "from kiwi_core import preload\nask = preload.find_untouched()\nassert ask() == 1\n"
    code += USE + "assert ask() == 0"
    environment = world.plain | {"LD_PRELOAD": str(library), "KIWI_PRELOAD_OWN": "0"}
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=environment, timeout=PATIENCE_S, check=True)
