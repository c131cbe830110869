"""Tests of graphs and captures that only the emulator can answer: kernels, limits, stale
handles."""

from __future__ import annotations

import pytest
from cuda_setups import GRAPHS

WRONG = "CUDA_ERROR_INVALID_VALUE"
KERNELS = """
p = alloc(4096)
add = ck(driver.cuModuleGetFunction(
    ck(driver.cuModuleLoadData(b"kiwi-emulated-module\\0")), b"add_u32"))
def words(n=1024):
    return list(memoryview(read(p, 4 * n)).cast("I"))
def kernel_params(at, n, more):
    p = driver.CUDA_KERNEL_NODE_PARAMS()
    types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
    p.func, p.kernelParams = add, ((at, n, more), types)
    p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1
    return p
"""


@pytest.fixture
def worker(machine):
    worker = machine.worker()
    worker.do(GRAPHS + KERNELS)
    return worker


def test_parameters_of_kernels_are_those_at_the_capture(worker):
    worker.do(
        "write(p, bytes(4096)); c = ctypes.c_uint32(5); values = (ctypes.c_void_p * 3)()\n"
        "at, n = ctypes.c_uint64(p), ctypes.c_uint64(1024)\n"
        "for i, v in enumerate((at, n, c)): values[i] = ctypes.addressof(v)\n"
        "begin(); where = ctypes.addressof(values)\n"
        "ck(driver.cuLaunchKernel(add, 1, 1, 1, 1, 1, 1, 0, s, where, 0))\n"
        "g = end(); c.value = 9; at.value = 0; e = instantiate(g)\n"
        "for _ in range(3): run(e)"
    )
    assert worker.get("types(g), set(words()) == {15}") == [["KERNEL"], True]


def test_kernels_and_host_functions_by_hand_in_their_order(worker):
    worker.do(
        "write(p, bytes(4096)); seen = []\n"
        "look = HOST_FUNCTION(lambda data: seen.append(ctypes.c_uint32.from_address(data).value))\n"
        "h = driver.CUDA_HOST_NODE_PARAMS(); h.userData = p\n"
        "h.fn = driver.CUhostFn(ctypes.cast(look, ctypes.c_void_p).value)\n"
        "g = ck(driver.cuGraphCreate(0))\n"
        "last = ck(driver.cuGraphAddHostNode(g, None, 0, h))\n"
        "first = ck(driver.cuGraphAddHostNode(g, None, 0, h))\n"
        "k = ck(driver.cuGraphAddKernelNode(g, [first], 1, kernel_params(p, 1024, 3)))\n"
        "ck(driver.cuGraphAddDependencies(g, [k], [last], None, 1))\n"
        "roots = [int(n) for n in ck(driver.cuGraphGetRootNodes(g, 3))[0]]\n"
        "e = instantiate(g); run(e); run(e)"
    )
    assert worker.get("seen") == [0, 3, 3, 6]
    assert worker.get("roots[0] == int(first)")
    assert worker.get("[int(n) for n in ck(driver.cuGraphNodeGetDependencies(k, 1))[0]]") == [
        worker.get("int(first)")
    ]
    assert worker.get("[int(n) for n in ck(driver.cuGraphNodeGetDependentNodes(k, 1))[0]]") == [
        worker.get("int(last)")
    ]


def test_nodes_of_the_generic_call(worker):
    worker.do(
        "def node(kind, **more):\n"
        "    x = driver.CUgraphNodeParams()\n"
        "    x.type = getattr(driver.CUgraphNodeType, 'CU_GRAPH_NODE_TYPE_' + kind)\n"
        "    return x\n"
        "x = node('MEMSET'); x.memset.dst = p; x.memset.value = 2; x.memset.elementSize = 4\n"
        "x.memset.width, x.memset.height = 1024, 1\n"
        "g = ck(driver.cuGraphCreate(0))\n"
        "a = ck(driver.cuGraphAddNode(g, None, None, 0, x))\n"
        "b2 = ck(driver.cuGraphAddNode(g, [a], None, 1, node('EMPTY')))\n"
        "run(instantiate(g))"
    )
    assert worker.get("types(g), edges(g), set(words()) == {2}") == [
        ["MEMSET", "EMPTY"],
        [[0, 1]],
        True,
    ]
    refused = worker.get("name_of(driver.cuGraphAddNode, g, None, None, 0, node('MEM_ALLOC'))")
    assert refused == "CUDA_ERROR_NOT_SUPPORTED"


def test_launches_of_one_graph_wait_for_each_other(worker):
    worker.do(
        "write(p, bytes(4096)); begin(); launch('spin_ns', 30_000_000, stream=s)\n"
        "launch('add_u32', p, 1024, 1, stream=s); e = instantiate(end())\n"
        "for stream in (s, b, s, b): ck(driver.cuGraphLaunch(e, stream))\n"
        "ck(driver.cuGraphExecDestroy(e)); sync()"
    )
    assert worker.get("set(words()) == {4}")


def test_a_kernel_that_fails_ends_the_graph_and_spoils_the_context(worker):
    worker.do(
        "g = ck(driver.cuGraphCreate(0)); c = ck(driver.cuCtxGetCurrent())\n"
        "bad = ck(driver.cuGraphAddKernelNode(g, None, 0, kernel_params(p, 1 << 30, 3)))\n"
        "calls = []; f = HOST_FUNCTION(lambda data: calls.append(data))\n"
        "h = driver.CUDA_HOST_NODE_PARAMS()\n"
        "h.fn = driver.CUhostFn(ctypes.cast(f, ctypes.c_void_p).value)\n"
        "ck(driver.cuGraphAddHostNode(g, [bad], 1, h)); ck(driver.cuGraphLaunch(instantiate(g), s))"
    )
    assert worker.get("name_of(driver.cuStreamSynchronize, s)") == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert worker.get("calls") == []


@pytest.mark.parametrize(
    "call",
    [
        "driver.cuGraphDestroy, g",
        "driver.cuGraphInstantiate, g, 0",
        "driver.cuGraphGetNodes, g",
        "driver.cuGraphNodeGetType, n",
        "driver.cuGraphDestroyNode, n",
        "driver.cuGraphAddEmptyNode, g, None, 0",
        "driver.cuGraphLaunch, e, s",
        "driver.cuGraphUpload, e, s",
        "driver.cuGraphExecDestroy, e",
        "driver.cuGraphAddEmptyNode, other, [n], 1",
        "driver.cuGraphAddEmptyNode, other, [m, m], 2",
        "driver.cuGraphAddDependencies, other, [m], [m], None, 1",
        "driver.cuGraphCreate, 1",
    ],
)
def test_wrong_and_stale_handles(worker, call):
    worker.do(
        "g = ck(driver.cuGraphCreate(0)); n = ck(driver.cuGraphAddEmptyNode(g, None, 0))\n"
        "e = instantiate(g); other = ck(driver.cuGraphCreate(0))\n"
        "m = ck(driver.cuGraphAddEmptyNode(other, None, 0))\n"
        "ck(driver.cuGraphDestroy(g)); ck(driver.cuGraphExecDestroy(e))"
    )
    assert worker.get(f"name_of({call})") == WRONG


def test_a_node_leaves_its_edges_behind(worker):
    worker.do(
        "g = ck(driver.cuGraphCreate(0)); a = ck(driver.cuGraphAddEmptyNode(g, None, 0))\n"
        "m = ck(driver.cuGraphAddEmptyNode(g, [a], 1))\n"
        "z = ck(driver.cuGraphAddEmptyNode(g, [a, m], 2)); twin = ck(driver.cuGraphClone(g))\n"
        "ck(driver.cuGraphDestroyNode(m)); before = edges(twin)"
    )
    assert worker.get("edges(g), before") == [[[0, 1]], [[0, 1], [0, 2], [1, 2]]]
    worker.do("ck(driver.cuGraphRemoveDependencies(g, [a], [z], None, 1))")
    assert worker.get("edges(g)") == []
    assert worker.get("name_of(driver.cuGraphRemoveDependencies, g, [a], [z], None, 1)") == WRONG


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("driver.cuMemAllocAsync, 64, s", "CUDA_ERROR_NOT_SUPPORTED"),
        ("driver.cuStreamAddCallback, s, f, 0, 0", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    ],
)
def test_what_cannot_be_captured_spoils_the_capture(worker, call, answer):
    worker.do("f = driver.CUstreamCallback(1); begin(mode=RELAXED)")
    assert worker.get(f"name_of({call})") == answer
    ended = worker.get("name_of(driver.cuStreamEndCapture, s)")
    assert ended == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


@pytest.mark.parametrize(
    "call",
    [
        "driver.cuMemAlloc, 64",
        "driver.cuMemFree, p",
        "driver.cuMemHostAlloc, 64, 0",
        "driver.cuMemFreeHost, h",
        "driver.cuMemHostRegister, page, 4096, 0",
        "driver.cuMemcpyDtoH, bytearray(64), p, 64",
        "driver.cuStreamSynchronize, b",
        "driver.cuEventQuery, f",
        "driver.cuEventSynchronize, f",
    ],
)
def test_unsafe_calls(worker, call):
    """A capture in global mode forbids them, also to another thread, but not to a relaxed one."""
    worker.do(
        "h = int(ck(driver.cuMemHostAlloc(64, 0))); f = ck(driver.cuEventCreate(0))\n"
        "import mmap; m = mmap.mmap(-1, 4096)\n"
        "page = ctypes.addressof(ctypes.c_char.from_buffer(m)); begin()"
    )
    assert worker.get(f"elsewhere({call})") == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert worker.get("status()") == 2
    worker.do("name_of(driver.cuStreamEndCapture, s); begin()")
    worker.do("ck(driver.cuThreadExchangeStreamCaptureMode(RELAXED))")
    assert worker.get(f"name_of({call})") == "CUDA_SUCCESS"
    assert worker.get("status()") == 1


def test_the_graph_of_a_capture_is_the_captures(worker):
    worker.do(
        "begin(); put(p, 1, 64); g = ck(driver.cuStreamGetCaptureInfo(s))[2]; n = nodes(g)[0]"
    )
    assert worker.get("name_of(driver.cuGraphDestroy, g)") == WRONG
    assert worker.get("name_of(driver.cuGraphDestroyNode, n)") == WRONG
    worker.do("extra = ck(driver.cuGraphAddEmptyNode(g, [n], 1))")
    worker.do("ck(driver.cuStreamUpdateCaptureDependencies(s, [extra], None, 1, 1)); put(p, 2, 64)")
    assert worker.get("edges(end())") == [[0, 1], [1, 2]]


def test_streams_that_end_while_they_capture(worker):
    """A forked stream may end; its work must have been joined. The first stream ends its
    capture."""
    worker.do(
        "f, j = ck(driver.cuEventCreate(0)), ck(driver.cuEventCreate(0))\n"
        "def fork(join):\n"
        "    side = ck(driver.cuStreamCreate(1)); begin(); put(p, 1, 64)\n"
        "    ck(driver.cuEventRecord(f, s)); ck(driver.cuStreamWaitEvent(side, f, 0))\n"
        "    put(p, 2, 64, side); ck(driver.cuEventRecord(j, side))\n"
        "    if join: ck(driver.cuStreamWaitEvent(s, j, 0))\n"
        "    ck(driver.cuStreamDestroy(side)); return name_of(driver.cuStreamEndCapture, s)"
    )
    assert worker.get("[fork(True), fork(False)]") == [
        "CUDA_SUCCESS",
        "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
    ]
    worker.do("begin(b); ck(driver.cuStreamDestroy(b)); free(alloc(64))")


def test_a_context_that_is_destroyed_takes_its_captures_along(worker):
    worker.do(
        "c = ck(driver.cuCtxCreate(None, 0, ck(driver.cuDeviceGet(0))))\n"
        "begin(ck(driver.cuStreamCreate(1))); ck(driver.cuCtxDestroy(c)); free(alloc(64))"
    )


USER_OBJECTS = """
gone, flag = [], driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
bury = HOST_FUNCTION(lambda data: gone.append(data))
def thing(number):
    end = driver.CUhostFn(ctypes.cast(bury, ctypes.c_void_p).value)
    return ck(driver.cuUserObjectCreate(number, end, 1, flag))
"""


def test_what_a_graph_keeps_alive_goes_with_the_last_that_holds_it(worker):
    worker.do(
        USER_OBJECTS + "g = ck(driver.cuGraphCreate(0)); x, y = thing(1), thing(2)\n"
        "keep = driver.cuGraphRetainUserObject; ck(keep(g, x, 1, 1)); ck(keep(g, y, 1, 0))\n"
        "ck(driver.cuUserObjectRelease(y, 1)); e = instantiate(g)\n"
        "twin = ck(driver.cuGraphClone(g)); ck(driver.cuGraphDestroy(g))"
    )
    assert worker.get("gone") == []
    worker.do("ck(driver.cuGraphReleaseUserObject(twin, x, 1)); ck(driver.cuGraphExecDestroy(e))")
    assert worker.get("gone") == [1]
    assert worker.get("name_of(driver.cuUserObjectRelease, x, 1)") == WRONG
    worker.do("ck(driver.cuGraphDestroy(twin))")
    assert worker.get("gone") == [1, 2]


def test_a_launch_under_way_keeps_what_its_graph_holds(worker):
    worker.do(
        USER_OBJECTS + "begin(); launch('spin_ns', 300_000_000, stream=s); g = end()\n"
        "ck(driver.cuGraphRetainUserObject(g, thing(1), 1, 1)); e = instantiate(g)\n"
        "ck(driver.cuGraphDestroy(g)); ck(driver.cuGraphLaunch(e, s))\n"
        "ck(driver.cuGraphExecDestroy(e))\n"
        "at_once = (list(gone), name_of(driver.cuStreamQuery, s)); sync()\n"
        "end_s = time.monotonic() + 60\n"
        "while not gone and time.monotonic() < end_s: time.sleep(0.01)"
    )
    assert worker.get("at_once") != [[1], "CUDA_ERROR_NOT_READY"]
    assert worker.get("gone") == [1]


def test_a_node_is_found_in_a_clone(worker):
    worker.do(
        "g = ck(driver.cuGraphCreate(0)); n = ck(driver.cuGraphAddEmptyNode(g, None, 0))\n"
        "m = ck(driver.cuGraphAddEmptyNode(g, [n], 1)); twin = ck(driver.cuGraphClone(g))\n"
        "found = ck(driver.cuGraphNodeFindInClone(m, twin))"
    )
    assert worker.get("[int(x) for x in nodes(twin)].index(int(found))") == 1
    assert worker.get("name_of(driver.cuGraphNodeFindInClone, found, twin)") == WRONG


PTX = (
    ".version 7.0\\n.target sm_50\\n.address_size 64\\n"
    ".visible .entry add_u32(.param .u64 x, .param .u64 n, .param .u32 more) { ret; }\\n"
)


def test_cuda_cores_graph_builder(worker):
    """The unmodified builder forks and joins by its own events and streams, and keeps objects alive
    by user objects."""
    worker.do(
        "from cuda.core import Device, LaunchConfig, ObjectCode, launch as start\n"
        "d = Device(0); d.set_current(); stream = d.create_stream()\n"
        "one = LaunchConfig(grid=1, block=1)\n"
        f'kernel = ObjectCode.from_ptx(b"{PTX}").get_kernel("add_u32")\n'
        "def add(to, at, n, more):\n"
        "    a, b, c = ctypes.c_uint64(at), ctypes.c_uint64(n), ctypes.c_uint32(more)\n"
        "    start(to, one, kernel, a, b, c)\n"
        "write(p, bytes(4096)); builder = stream.create_graph_builder(); builder.begin_building()\n"
        "add(builder, p, 1024, 5); left, right = builder.split(2)\n"
        "add(left, p, 512, 5); add(right, p + 2048, 512, 7)\n"
        "builder = type(builder).join(left, right); builder.end_building()\n"
        "graph = builder.complete(); graph.upload(stream)\n"
        "for _ in range(2): graph.launch(stream)\n"
        "stream.sync(); graph.close()"
    )
    assert worker.get("set(words()[:512]) == {20} and set(words()[512:]) == {24}")
