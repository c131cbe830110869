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

# Custom storage (CUDA 13.4): the caller copies a process's memory itself.  The bindings give the
# driver's answer only as the address of a pointer.
CUSTOM = """
import ctypes

class PerDevice(ctypes.Structure):
    _fields_ = [("devPtr", ctypes.c_uint64), ("size", ctypes.c_size_t), ("stream", ctypes.c_void_p)]

class Info(ctypes.Structure):
    _fields_ = [("handle", ctypes.c_void_p), ("gpus", ctypes.POINTER(PerDevice)),
                ("deviceCount", ctypes.c_uint)]

def custom(kind, pid):
    slot = ctypes.c_void_p()
    args = getattr(driver, f"CUcheckpoint{kind}Args")()
    args.customStorageInfo_out = ctypes.addressof(slot)
    ck(getattr(driver, f"cuCheckpointProcess{kind}")(pid, args))
    return Info.from_address(slot.value)

def gpus(info):
    return [info.gpus[i] for i in range(info.deviceCount)]

def complete(handle):
    ck(driver.cuCheckpointOperationComplete(driver.CUcheckpointOperationHandle(handle)))

def copy_out(info):
    images = []
    for g in gpus(info):
        images.append(bytearray(g.size))
        copy = driver.cuMemcpyDtoHAsync
        ck(copy(images[-1], g.devPtr, g.size, driver.CUstream(g.stream)))
    return images

def copy_in(info, images):
    for g, image in zip(gpus(info), images, strict=True):
        ck(driver.cuMemcpyHtoDAsync(g.devPtr, bytes(image), g.size, driver.CUstream(g.stream)))

def take_out(pid):
    info = custom("Checkpoint", pid)
    images = copy_out(info)
    complete(info.handle)
    return images

def bring_in(pid, images):
    info = custom("Restore", pid)
    copy_in(info, images)
    complete(info.handle)
"""
