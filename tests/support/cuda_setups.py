"""Code that tests send to workers more than once."""

VMM = (
    "prop = driver.CUmemAllocationProp()\n"
    "prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED\n"
    "prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE\n"
    "prop.location.id = 0\n"
    "desc = driver.CUmemAccessDesc(); desc.location = prop.location\n"
    "desc.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE\n"
    "least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM\n"
    "g = ck(driver.cuMemGetAllocationGranularity(prop, least)); size = 8 * g\n"
)


# Stream captures and graphs: two streams, and short names for frequent operations.
GRAPHS = """
import ctypes
from cuda import bindings
GLOBAL, LOCAL, RELAXED = (
    getattr(driver.CUstreamCaptureMode, "CU_STREAM_CAPTURE_MODE_" + name)
    for name in ("GLOBAL", "THREAD_LOCAL", "RELAXED"))
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

s = b = None

def fresh():
    "Streams that nobody used, and no capture on those before."
    global s, b
    for used in (s, b):
        if used:
            ck(driver.cuStreamDestroy(used))
    s, b = ck(driver.cuStreamCreate(1)), ck(driver.cuStreamCreate(1))
    ck(driver.cuThreadExchangeStreamCaptureMode(GLOBAL))

def begin(stream=None, mode=GLOBAL):
    ck(driver.cuStreamBeginCapture(stream or s, mode))

def end(stream=None):
    return ck(driver.cuStreamEndCapture(stream or s))

def status(stream=None):
    return int(ck(driver.cuStreamIsCapturing(stream or s)))

def put(at, value, size, stream=None):
    ck(driver.cuMemsetD8Async(at, value, size, stream or s))

def instantiate(graph):
    return ck(driver.cuGraphInstantiate(graph, 0))

def run(executable, stream=None):
    "A copy from pageable memory may still be on its way: those streams do not wait for it."
    ck(driver.cuStreamSynchronize(0))
    ck(driver.cuGraphLaunch(executable, stream or s))
    ck(driver.cuStreamSynchronize(stream or s))

def nodes(graph):
    count = ck(driver.cuGraphGetNodes(graph))[1]
    return list(ck(driver.cuGraphGetNodes(graph, count))[0])

def types(graph):
    return [ck(driver.cuGraphNodeGetType(n)).name.rsplit("_", 1)[1] for n in nodes(graph)]

def edges(graph):
    count = ck(driver.cuGraphGetEdges(graph))[-1]
    place = {int(n): i for i, n in enumerate(nodes(graph))}
    before, after = ck(driver.cuGraphGetEdges(graph, count))[:2]
    return sorted((place[int(x)], place[int(y)]) for x, y in zip(before, after))

def add_edges(graph, before, after):
    # Before version 13 the bindings call the form of CUDA 10, which has no data of edges.
    data = [None] * (int(bindings.__version__.split(".")[0]) >= 13)
    return driver.cuGraphAddDependencies(graph, before, after, *data, len(before))

def memset_params(at, value, size):
    p = driver.CUDA_MEMSET_NODE_PARAMS()
    p.dst, p.value, p.elementSize, p.width, p.height = at, value, 1, size, 1
    return p

def copy_params(to, at, size):
    p = driver.CUDA_MEMCPY3D()
    p.srcMemoryType = p.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    p.srcDevice, p.dstDevice = driver.CUdeviceptr(at), driver.CUdeviceptr(to)
    p.WidthInBytes, p.Height, p.Depth = size, 1, 1
    return p

def elsewhere(call, *args):
    "The name of what another thread gets as an answer."
    said, context = [], ck(driver.cuCtxGetCurrent())
    def ask():
        ck(driver.cuCtxSetCurrent(context))
        said.append(name_of(call, *args))
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return said[0]

fresh()
"""
