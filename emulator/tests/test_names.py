"""Tests that every name of the driver's interface exists, and that the rest refuses."""

from __future__ import annotations

import re
import subprocess

import pytest

from kiwi_core import compiled
from kiwi_core.compiled import Unavailable
from kiwi_core.preload._build import find_header
from kiwi_emulator import _build

FETCH = (
    "import ctypes; cuda = ctypes.CDLL('libcuda.so.1')\n"
    "def fetch(name, version=13000):\n"
    "    at, found = ctypes.c_void_p(), ctypes.c_int()\n"
    "    rc = cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(at), version, "
    "ctypes.c_uint64(0), ctypes.byref(found))\n"
    "    return rc, found.value, at.value"
)


def _names():
    text = (_build.SOURCES / "names.def").read_text()
    return re.findall(r'^N\((\w+), "(\w+)", (\d+)\)$', text, re.MULTILINE)


@pytest.fixture
def worker(machine):
    worker = machine.worker()
    worker.do(FETCH)
    return worker


def test_each_name_can_be_fetched_and_is_exported(worker):
    assert len(_names()) > 500
    missing = [
        symbol
        for symbol, name, since in _names()
        if int(since) <= 13000
        and not worker.get(f"hasattr(cuda, '{symbol}') and fetch('{name}', {since})[0] == 0")
    ]
    assert missing == []


def test_what_is_not_emulated_refuses_by_either_way(worker):
    for name in ("cuMemAllocManaged", "cuIpcGetMemHandle", "cuTexRefCreate", "cuProfilerStart"):
        assert worker.get(f"cuda.{name}()") == 801
        assert worker.get(f"ctypes.CFUNCTYPE(ctypes.c_int)(fetch('{name}')[2])()") == 801
    assert worker.get("name_of(driver.cuMemAllocManaged, 4096, 1)") == "CUDA_ERROR_NOT_SUPPORTED"


def test_a_name_that_is_newer_than_the_driver_or_no_name_is_not_found(worker):
    assert worker.get("fetch('cuCheckpointOperationComplete', 13040)[:2]") == [500, 2]
    assert worker.get("fetch('cuNoSuchThing')[:2]") == [500, 1]


def test_the_first_form_of_cugetprocaddress(worker):
    worker.do("at = ctypes.c_void_p()")
    call = "cuda.cuGetProcAddress(b'cuMemAlloc', ctypes.byref(at), 12000, ctypes.c_uint64(0))"
    assert worker.get(call) == 0
    assert worker.get("at.value == fetch('cuMemAlloc')[2]")


def test_no_name_of_the_real_header_is_missing(tmp_path):
    try:
        header = find_header()
    except Unavailable:
        pytest.skip("no cuda.h here to compare with")
    command = [*compiled.find_compiler(), "-E", "-P", "-x", "c", str(header)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", text))
    declared = set(re.findall(r"\bCUDAAPI\s+(cu\w+)\s*\(", header.read_text()))
    assert len(symbols) > 400
    plain = {name for name in symbols | declared if not name.endswith(("_ptsz", "_ptds"))}
    assert plain - {symbol for symbol, *_ in _names()} == set()


def test_limits_are_answered_and_remembered(worker):
    worker.do("def limit(n): return driver.cuCtxGetLimit(driver.CUlimit(n))")
    assert [worker.get(f"limit({n})[0].name") for n in range(10)] == ["CUDA_SUCCESS"] * 10
    worker.do("ck(driver.cuCtxSetLimit(driver.CUlimit(5), 32))")
    assert worker.get("limit(5)[1]") == 32
    assert worker.get("limit(10)[0].name") == "CUDA_ERROR_UNSUPPORTED_LIMIT"


def test_pinned_host_memory_can_be_filled(worker):
    worker.do(
        "h = int(ck(driver.cuMemHostAlloc(8192, 0))); s = ck(driver.cuStreamCreate(1))\n"
        "ck(driver.cuMemsetD32(h, 0x01020304, 4)); ck(driver.cuMemsetD8Async(h + 16, 9, 4, s))\n"
        "ck(driver.cuMemsetD2D16(h + 20, 4, 0x0506, 1, 2)); ck(driver.cuStreamSynchronize(s))"
    )
    assert worker.get("ctypes.string_at(h, 26).hex()") == "04030201" * 4 + "09" * 4 + "060500000605"
    assert worker.get("name_of(driver.cuMemsetD8, h + 8190, 1, 4)") == "CUDA_ERROR_INVALID_VALUE"


def test_newer_pointer_attributes(worker):
    worker.do(
        "p, h = alloc(5000), int(ck(driver.cuMemHostAlloc(4096, 0)))\n"
        "def ask(x, n):\n"
        "    out = (ctypes.c_uint64 * 2)()\n"
        "    rc = cuda.cuPointerGetAttribute(out, n, ctypes.c_uint64(x))\n"
        "    return [rc, out[0]]"
    )
    assert worker.get("ask(p, 15)") == [0, 0]
    assert worker.get("ask(p, 16)") == [0, 3]
    assert worker.get("ask(h, 16)") == [0, 3]
    assert worker.get("ask(p + 100, 18)") == [0, 8192]
    assert worker.get("ask(p + 100, 19) == [0, p]")
    assert worker.get("ask(p, 20)[0] == 0 and ask(p, 20) != ask(alloc(64), 20)")
    assert worker.get("ask(p, 21)") == [0, 0]
    assert worker.get("ask(p, 22)") == [0, 0xFFFFFFFF]
    assert worker.get("ask(p, 23)[0]") == 801
    for number in (15, 16, 18, 19, 20, 21, 22):
        assert worker.get(f"ask(id(p), {number})[0]") == 1


def test_unversioned_names_of_nvml(machine):
    machine.worker().do("p = alloc(4 * MIB)")
    looker = machine.worker(
        "import ctypes; nvml = ctypes.CDLL('libnvidia-ml.so.1'); nvml.nvmlInit()\n"
        "n, h = ctypes.c_uint(), ctypes.c_void_p()\n"
        "class Row(ctypes.Structure):\n"
        "    _fields_ = [('pid', ctypes.c_uint), ('used', ctypes.c_ulonglong)]\n"
        "rows = (Row * 4)()\n"
        "counted = nvml.nvmlDeviceGetCount(ctypes.byref(n))\n"
        "found = nvml.nvmlDeviceGetHandleByIndex(0, ctypes.byref(h))"
    )
    assert looker.get("[counted, n.value, found]") == [0, 1, 0]
    looker.do("n.value = 0; call = nvml.nvmlDeviceGetComputeRunningProcesses")
    assert looker.get("[call(h, ctypes.byref(n), None), n.value]") == [7, 1]
    looker.do("n.value = 4")
    assert looker.get("[call(h, ctypes.byref(n), rows), n.value, rows[0].used > 4 * MIB]") == [
        0,
        1,
        True,
    ]
    looker.do("n.value = 4; other = nvml.nvmlDeviceGetGraphicsRunningProcesses")
    assert looker.get("[other(h, ctypes.byref(n), None), n.value]") == [0, 0]


OLDER = (
    ("cuDeviceGetUuid", 9020), ("cuGraphAddDependencies", 10000), ("cuGraphAddNode", 12020),
    ("cuGraphGetEdges", 10000), ("cuGraphNodeGetDependencies", 10000),
    ("cuGraphNodeGetDependentNodes", 10000), ("cuGraphRemoveDependencies", 10000),
    ("cuStreamGetCaptureInfo", 10010), ("cuStreamUpdateCaptureDependencies", 11030),
)  # fmt: skip
"""The forms that cuda-bindings 12.9 ask for, beside the newest. (``make floor`` runs programs with
these bindings.)"""


@pytest.mark.parametrize(("name", "version"), OLDER)
def test_the_forms_that_older_bindings_ask_for_are_emulated(worker, name, version):
    """Each is the exported function without a suffix, and does not just refuse."""
    worker.do(f"at = ctypes.cast(cuda.{name}, ctypes.c_void_p).value")
    assert worker.get(f"fetch('{name}', {version})[2] == at")
    arguments = "None, None, ctypes.c_size_t(0), None, None"
    assert worker.get(f"cuda.{name}({arguments})") not in (0, 801)
