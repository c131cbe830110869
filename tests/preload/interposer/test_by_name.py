"""The gate under the driver's own name: loaded by a Python process, and found by whoever looks for
the driver afterwards, whichever way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from preload_world import PATIENCE_S, World, compile_c

from kiwi_core import preload
from kiwi_core.preload import _build, _gate, _places

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
    "bindings-twice": "assert preload.load_gate(Path(os.environ['REAL'])) == gate\n" + USE,
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
    return library.with_name(_places.GATE_NAME)


@pytest.fixture
def python(world: World, gate: Path, tmp_path: Path) -> Callable[..., None]:
    """Runs code in a fresh interpreter that has the emulated driver, and no library preloaded."""
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
assert gate.driver == Path(os.environ["REAL"]) and not mapped(gate.driver)
cuda = ctypes.CDLL("libcuda.so.1"); assert not mapped(gate.driver)
assert cuda.cuInit(0) == 0 and mapped(gate.driver)
"""
    )


def test_it_owns_nothing_unless_it_is_asked_to(python: Callable[..., None]) -> None:
    books = "b = (ctypes.c_uint64 * 32)(); kiwi.kiwi_preload_test_books(ctypes.byref(b))\n"
    code = LOAD + USE + "q = ck(driver.cuMemAlloc(1 << 20))\n" + books
    python(code + "assert b[0] == 0")
    python(code + "assert b[0] >= 1 << 20", KIWI_PRELOAD_OWN="1")


@pytest.mark.parametrize("how", ["by name", "by path"])
def test_too_late(python: Callable[..., None], tmp_path: Path, how: str) -> None:
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
        "from kiwi_core import preload\ngate = preload.load_gate()\n"
        "assert gate.state is preload.GateState.LOADED and gate.driver is None, gate\n" + USE,
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


def test_no_driver_or_no_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_gate, "_loaded", lambda name: None)
    monkeypatch.setattr(_gate, "_candidates", lambda: iter([tmp_path / "libcuda.so.1"]))
    no_driver = preload.load_gate()
    assert no_driver.state is preload.GateState.UNAVAILABLE
    assert "no CUDA driver" in no_driver.reason
    (tmp_path / "libcuda.so.1").write_bytes(b"a driver")
    monkeypatch.setattr(_gate, "compiled_gate", lambda: None)
    assert "has not been compiled" in preload.load_gate().reason
    broken = tmp_path / "libkiwi_gate.so"
    broken.write_bytes(b"no library")
    unloadable = preload.load_gate(library=broken)
    assert unloadable.state is preload.GateState.UNAVAILABLE
    assert "cannot be loaded" in unloadable.reason


def test_the_driver_that_the_loader_would_find(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("stubs", "first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libcuda.so.1").touch()
    path = ":".join(str(tmp_path / name) for name in ("none", "stubs", "first", "second"))
    monkeypatch.setenv("LD_LIBRARY_PATH", path)
    assert _gate.find_driver() == tmp_path / "first" / "libcuda.so.1"


@pytest.mark.skipif(not Path("/etc/ld.so.cache").exists(), reason="the loader has no cache here")
def test_the_loaders_cache_is_read_as_ldconfig_does(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True)
    lines = [line.split() for line in listed.stdout.splitlines() if " => " in line]
    expected = [line[-1] for line in lines if line[0] == "libc.so.6" and "hwcap" not in line]
    monkeypatch.setattr(_gate, "DRIVER", "libc.so.6")
    found = list(map(str, _gate._in_cache()))
    assert found
    assert set(found) <= set(expected)


def test_the_compiled_one_is_found_without_its_sources(
    library: Path, gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cache" / "preload-x"
    place.mkdir(parents=True)
    for one in (library, gate):
        (place / one.name).write_bytes(one.read_bytes())
    assert preload.compiled_gate(tmp_path / "cache") is None
    _places.note_gate(tmp_path / "cache", place / library.name)
    assert preload.compiled_gate(tmp_path / "cache") == place / gate.name
    place.chmod(0o777)  # anybody could have put it there
    assert preload.compiled_gate(tmp_path / "cache") is None
    place.chmod(0o755)
    monkeypatch.setattr(_places, "_stamp", lambda: "other sources")
    assert preload.compiled_gate(tmp_path / "cache") is None


def test_it_exports_every_function_of_the_header(gate: Path) -> None:
    header = _build._generate.read_header(_build.find_compiler(), _build.find_header())
    done = subprocess.run(
        ["nm", "-D", "--defined-only", gate], capture_output=True, text=True, check=True
    )
    exported = {line.split()[2] for line in done.stdout.splitlines()}
    assert set(header.words) <= exported
    assert "dlsym" not in exported


def test_loading_it_imports_no_compiler(gate: Path) -> None:
    code = (
        "import sys; from kiwi_core import preload; preload.load_gate()\n"
        "print(*(m for m in sys.modules if m.startswith(('kiwi', 'subprocess', 'msgspec'))))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {"PYTHONPATH": str(Path(preload.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    allowed = {"kiwi_core", "kiwi_core.preload", "kiwi_core.preload._gate"}
    assert set(done.stdout.split()) <= allowed | {"kiwi_core.preload._places"}
