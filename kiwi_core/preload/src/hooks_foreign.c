/* Calls that give memory which Kiwi cannot own, and their counterparts. */
#include "hooks.h"

#include "blocks.h"
#include "real.h"
#include "room.h"

static bool here(CUdevice device) { return __atomic_load_n(&kp_gpu.known, __ATOMIC_ACQUIRE) && device == kp_gpu.device; }

static bool current_is_here(void) {
    CUdevice device;
    return kp_real.cuCtxGetDevice(&device) == CUDA_SUCCESS && here(device);
}

/* `call` gives about so many bytes of the GPU's memory: where there is none, the daemon is asked for room, as
 * for owned memory. Not for a call from inside another: the driver holds locks of its own there. */
#define ROOMED(result, bytes_, here_, call)                                                          \
    do {                                                                                             \
        bool entered_ = kp_gate_enter();                                                             \
        struct kp_room room_ = {.bytes = (bytes_), .asks = entered_ && kp_owning()};                 \
        while ((result = (call)) == CUDA_ERROR_OUT_OF_MEMORY) {                                      \
            room_.elsewhere = !(here_);                                                              \
            if (!kp_room_again(&room_, result)) break;                                               \
        }                                                                                            \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

#define EACH(name)                                                                                   \
    KP_API CUresult name(CUdeviceptr *p, size_t bytes, CUstream stream) {                            \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        ROOMED(result, bytes, current_is_here(), real(p, bytes, stream));                            \
        if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_POOL, *p, bytes);                     \
        return result;                                                                               \
    }
EACH(cuMemAllocAsync)
EACH(cuMemAllocAsync_ptsz)
#undef EACH

#define EACH(name)                                                                                   \
    KP_API CUresult name(CUdeviceptr *p, size_t bytes, CUmemoryPool pool, CUstream stream) {         \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        ROOMED(result, bytes, current_is_here(), real(p, bytes, pool, stream));                      \
        if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_POOL, *p, bytes);                     \
        return result;                                                                               \
    }
EACH(cuMemAllocFromPoolAsync)
EACH(cuMemAllocFromPoolAsync_ptsz)
#undef EACH

/* Also frees what cuMemAlloc gave. Forgotten before the driver may hand the same address out again. */
#define EACH(name)                                                                                   \
    KP_API CUresult name(CUdeviceptr p, CUstream stream) {                                           \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        bool ours = kp_owning() && kp_own_has(p);                                                    \
        if (!ours) kp_foreign_gone(KP_FOREIGN_POOL, p);                                              \
        COUNTED(result, ours ? kp_own_free_async(p, stream) : real(p, stream));                      \
        return result;                                                                               \
    }
EACH(cuMemFreeAsync)
EACH(cuMemFreeAsync_ptsz)
#undef EACH

KP_API CUresult cuMemAllocManaged(CUdeviceptr *p, size_t bytes, unsigned flags) {
    DRIVER(cuMemAllocManaged);
    CUresult result;
    GATED(result, real(p, bytes, flags));
    if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_MANAGED, *p, bytes);
    return result;
}

/* ---- arrays ---- */

/* About: the driver pads, and packs what is compressed. */
static uint64_t array_bytes(size_t width, size_t height, size_t depth, CUarray_format format, unsigned channels) {
    unsigned element = 4;
    if (format == CU_AD_FORMAT_UNSIGNED_INT8 || format == CU_AD_FORMAT_SIGNED_INT8) element = 1;
    if (format == CU_AD_FORMAT_UNSIGNED_INT16 || format == CU_AD_FORMAT_SIGNED_INT16 || format == CU_AD_FORMAT_HALF)
        element = 2;
    return (uint64_t)width * (height ? height : 1) * (depth ? depth : 1) * element * (channels ? channels : 1);
}

static uint64_t bytes_2d(const CUDA_ARRAY_DESCRIPTOR *d) {
    return d ? array_bytes(d->Width, d->Height, 0, d->Format, d->NumChannels) : 0;
}

static uint64_t bytes_3d(const CUDA_ARRAY3D_DESCRIPTOR *d) {
    return d ? array_bytes(d->Width, d->Height, d->Depth, d->Format, d->NumChannels) : 0;
}

/* All levels together are at most a third more than the first. */
static uint64_t bytes_mipmapped(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels) {
    return bytes_3d(d) + (levels > 1 ? bytes_3d(d) / 3 : 0);
}

KP_API CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) {
    DRIVER(cuArrayCreate_v2);
    CUresult result;
    ROOMED(result, bytes_2d(d), current_is_here(), real(array, d));
    if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_ARRAY, (uintptr_t)*array, bytes_2d(d));
    return result;
}

KP_API CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    DRIVER(cuArray3DCreate_v2);
    CUresult result;
    ROOMED(result, bytes_3d(d), current_is_here(), real(array, d));
    if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_ARRAY, (uintptr_t)*array, bytes_3d(d));
    return result;
}

KP_API CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d,
                                       unsigned levels) {
    DRIVER(cuMipmappedArrayCreate);
    CUresult result;
    ROOMED(result, bytes_mipmapped(d, levels), current_is_here(), real(array, d, levels));
    if (result == CUDA_SUCCESS)
        kp_foreign_came(KP_FOREIGN_ARRAY, (uintptr_t)*array, bytes_mipmapped(d, levels));
    return result;
}

KP_API CUresult cuArrayDestroy(CUarray array) {
    DRIVER(cuArrayDestroy);
    kp_foreign_gone(KP_FOREIGN_ARRAY, (uintptr_t)array);
    CUresult result;
    COUNTED(result, real(array));
    return result;
}

KP_API CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    DRIVER(cuMipmappedArrayDestroy);
    kp_foreign_gone(KP_FOREIGN_ARRAY, (uintptr_t)array);
    CUresult result;
    COUNTED(result, real(array));
    return result;
}

/* ---- the program's own virtual memory management ---- */

KP_API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *prop, unsigned long long flags) {
    DRIVER(cuMemCreate);
    CUresult result;
    ROOMED(result, bytes, prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && here(prop->location.id),
           real(handle, bytes, prop, flags));
    if (result == CUDA_SUCCESS && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        kp_foreign_came(KP_FOREIGN_VMM, *handle, bytes);
    return result;
}

/* A handle of memory that is mapped, for handing on to other processes: what Kiwi owns must not be moved from
 * behind it. */
KP_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    DRIVER(cuMemRetainAllocationHandle);
    CUresult result;
    GATED(result, real(handle, address));
    if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_IPC, *handle, 1);
    return result;
}

/* The memory goes with its last mapping, which as a rule has been undone by now. */
KP_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    DRIVER(cuMemRelease);
    if (!kp_foreign_gone(KP_FOREIGN_IPC, handle)) kp_foreign_gone(KP_FOREIGN_VMM, handle);
    CUresult result;
    COUNTED(result, real(handle));
    return result;
}

/* ---- from elsewhere ---- */

/* What Kiwi owns cannot be lent: programs take the driver's "not supported" for an answer. */
KP_API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr p) {
    DRIVER(cuIpcGetMemHandle);
    CUresult result;
    bool entered = kp_gate_enter();
    if (kp_owning() && kp_own_has(p)) {
        result = kp_own_ipc_handle(handle, p);
    } else {
        result = real(handle, p);
        if (result == CUDA_SUCCESS) kp_own_seen_foreign(KP_FOREIGN_IPC, 1);
    }
    kp_gate_leave(entered);
    return result;
}

/* Another process' memory: counted as one, for its bytes are on that process' books. */
#define EACH(name)                                                                                   \
    KP_API CUresult name(CUdeviceptr *p, CUipcMemHandle handle, unsigned flags) {                    \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        GATED(result, real(p, handle, flags));                                                       \
        if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_IPC, *p, 1);                          \
        return result;                                                                               \
    }
EACH(cuIpcOpenMemHandle)
EACH(cuIpcOpenMemHandle_v2)
#undef EACH

KP_API CUresult cuIpcCloseMemHandle(CUdeviceptr p) {
    DRIVER(cuIpcCloseMemHandle);
    kp_foreign_gone(KP_FOREIGN_IPC, p);
    CUresult result;
    COUNTED(result, real(p));
    return result;
}

KP_API CUresult cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *d) {
    DRIVER(cuImportExternalMemory);
    CUresult result;
    GATED(result, real(memory, d));
    if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_EXTERNAL, (uintptr_t)*memory, d->size);
    return result;
}

KP_API CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    DRIVER(cuDestroyExternalMemory);
    kp_foreign_gone(KP_FOREIGN_EXTERNAL, (uintptr_t)memory);
    CUresult result;
    COUNTED(result, real(memory));
    return result;
}

/* ---- no memory, but arguments that a typeless wrapper cannot hand on ---- */

KP_API CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle) {
    DRIVER(cuIpcOpenEventHandle);
    CUresult result;
    COUNTED(result, real(event, handle));
    return result;
}

KP_API CUresult cuParamSetf(CUfunction function, int offset, float value) {
    DRIVER(cuParamSetf);
    CUresult result;
    COUNTED(result, real(function, offset, value));
    return result;
}

KP_API CUresult cuTexRefSetMipmapLevelBias(CUtexref texture, float bias) {
    DRIVER(cuTexRefSetMipmapLevelBias);
    CUresult result;
    COUNTED(result, real(texture, bias));
    return result;
}

KP_API CUresult cuTexRefSetMipmapLevelClamp(CUtexref texture, float least, float most) {
    DRIVER(cuTexRefSetMipmapLevelClamp);
    CUresult result;
    COUNTED(result, real(texture, least, most));
    return result;
}
