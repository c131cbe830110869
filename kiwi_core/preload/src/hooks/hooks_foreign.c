/* Calls that allocate memory which Kiwi cannot own, and their counterparts. */
#include "hooks/hooks.h"

#include "base/real.h"
#include "owner/blocks.h"
#include "owner/foreign.h"
#include "owner/room.h"
#include "owner/spare.h"

/* Counts memory for a generated wrapper, whose file includes no header with types. */
void kp_wrapped_foreign(int count) {
    static const enum kp_foreign kinds[] = KP_COUNTED;
    kp_own_seen_foreign(kinds[count], 1);
}

/* ---- the calls ---- */

static bool here(CUdevice device) { return __atomic_load_n(&kp_gpu.known, __ATOMIC_ACQUIRE) && device == kp_gpu.device; }

static bool current_is_here(void) {
    CUdevice device;
    return kp_real.cuCtxGetDevice(&device) == CUDA_SUCCESS && here(device);
}

/* Makes a `call` that takes about `bytes_` of GPU memory: if there is none, asks the daemon for room, as for owned
 * memory. A call from inside another does not ask: the driver holds locks of its own then. */
#define ROOMED(result, bytes_, here_, call)                                                          \
    do {                                                                                             \
        bool entered_ = kp_gate_enter();                                                             \
        struct kp_room room_ = {.asks = entered_ && kp_owning()};                                    \
        while ((result = (call)) == CUDA_ERROR_OUT_OF_MEMORY) {                                      \
            room_.bytes = (bytes_); /* read only now: the driver has judged the arguments */         \
            room_.elsewhere = !(here_);                                                              \
            if (!kp_room_again(&room_, result)) break;                                               \
        }                                                                                            \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

/* Defines the wrapper of an allocating call with the arguments `args`; the memory is recorded by `key`. */
#define CAME(name, params, args, kind, key, bytes)                                                   \
    KP_API CUresult name params {                                                                    \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        ROOMED(result, bytes, current_is_here(), real args);                                         \
        if (result == CUDA_SUCCESS) kp_foreign_added(KP_FOREIGN_##kind, (uint64_t)(key), bytes);     \
        if (result == CUDA_ERROR_OUT_OF_MEMORY) kp_need_lacked(bytes);                               \
        return result;                                                                               \
    }

/* Defines the wrapper of a freeing call: the record goes before the driver may reuse the address. */
#define GONE(name, type, kind)                                                                       \
    KP_API CUresult name(type it) {                                                                  \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        kp_foreign_removed(KP_FOREIGN_##kind, (uint64_t)it);                                         \
        COUNTED(result, real(it));                                                                   \
        return result;                                                                               \
    }

#define BOTH(name)                                                                                   \
    CAME(name, (CUdeviceptr *p, size_t bytes, CUstream stream), (p, bytes, stream), POOL, *p, bytes)
BOTH(cuMemAllocAsync)
BOTH(cuMemAllocAsync_ptsz)
#undef BOTH

#define BOTH(name)                                                                                   \
    CAME(name, (CUdeviceptr *p, size_t bytes, CUmemoryPool pool, CUstream stream),                   \
         (p, bytes, pool, stream), POOL, *p, bytes)
BOTH(cuMemAllocFromPoolAsync)
BOTH(cuMemAllocFromPoolAsync_ptsz)
#undef BOTH

/* cuMemFreeAsync also frees memory of cuMemAlloc. */
#define BOTH(name)                                                                                   \
    KP_API CUresult name(CUdeviceptr p, CUstream stream) {                                           \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        bool ours = kp_owning() && kp_own_has(p);                                                    \
        if (!ours && !kp_foreign_removed(KP_FOREIGN_POOL, p)) kp_driven_removed(p);                  \
        COUNTED(result, ours ? kp_own_free_async(p, stream) : real(p, stream));                      \
        return result;                                                                               \
    }
BOTH(cuMemFreeAsync)
BOTH(cuMemFreeAsync_ptsz)
#undef BOTH

CAME(cuMemAllocManaged, (CUdeviceptr *p, size_t bytes, unsigned flags), (p, bytes, flags), MANAGED, *p, bytes)

/* ---- arrays ---- */

/* Returns the approximate bytes of an array: the driver pads, and packs compressed formats. */
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

/* Returns the bytes of all levels together: at most a third more than the first level's. */
static uint64_t bytes_of_levels(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels) {
    return bytes_3d(d) + (levels > 1 ? bytes_3d(d) / 3 : 0);
}

CAME(cuArrayCreate_v2, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d), (array, d), ARRAY, *array, bytes_2d(d))
CAME(cuArray3DCreate_v2, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d), (array, d), ARRAY, *array, bytes_3d(d))
CAME(cuMipmappedArrayCreate, (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels),
     (array, d, levels), ARRAY, *array, bytes_of_levels(d, levels))
GONE(cuArrayDestroy, CUarray, ARRAY)
GONE(cuMipmappedArrayDestroy, CUmipmappedArray, ARRAY)

/* ---- the program's own virtual memory management ---- */

static bool is_current(CUdevice device) {
    CUdevice current;
    return kp_real.cuCtxGetDevice(&current) == CUDA_SUCCESS && current == device;
}

/* The spare memory is that of the current context's GPU; memory on another GPU is not checked. */
static CUresult create(__typeof__(&cuMemCreate) real, CUmemGenericAllocationHandle *handle, size_t bytes,
                       const CUmemAllocationProp *prop, unsigned long long flags) {
    CUresult result = real(handle, bytes, prop, flags);
    if (result != CUDA_SUCCESS || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return result;
    if (!is_current(prop->location.id) || !kp_spare_touched(bytes)) return result;
    kp_real.cuMemRelease(*handle);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

KP_API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *prop, unsigned long long flags) {
    DRIVER(cuMemCreate);
    CUresult result;
    ROOMED(result, bytes, prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && here(prop->location.id),
           create(real, handle, bytes, prop, flags));
    if (result == CUDA_SUCCESS && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        kp_foreign_added(KP_FOREIGN_VMM, *handle, bytes);
    return result;
}

/* Returns a handle of mapped memory, which a program can pass to other processes: counted as memory that must not
 * be moved. */
KP_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    DRIVER(cuMemRetainAllocationHandle);
    CUresult result;
    GATED(result, real(handle, address));
    if (result == CUDA_SUCCESS) kp_foreign_added(KP_FOREIGN_IPC, *handle, 1);
    return result;
}

/* The memory is freed with its last mapping, which as a rule has been undone by now. */
KP_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    DRIVER(cuMemRelease);
    if (!kp_foreign_removed(KP_FOREIGN_IPC, handle)) kp_foreign_removed(KP_FOREIGN_VMM, handle);
    CUresult result;
    COUNTED(result, real(handle));
    return result;
}

/* ---- from elsewhere ---- */

/* Owned memory cannot be shared: programs accept the driver's "not supported" as an answer. */
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

/* Memory of another process: counted as one, because its bytes are on that process's books. */
#define BOTH(name)                                                                                   \
    CAME(name, (CUdeviceptr *p, CUipcMemHandle handle, unsigned flags), (p, handle, flags), IPC, *p, 1)
BOTH(cuIpcOpenMemHandle)
BOTH(cuIpcOpenMemHandle_v2)
#undef BOTH
GONE(cuIpcCloseMemHandle, CUdeviceptr, IPC)

CAME(cuImportExternalMemory, (CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *d), (memory, d),
     EXTERNAL, *memory, d->size)
GONE(cuDestroyExternalMemory, CUexternalMemory, EXTERNAL)

/* ---- no memory, but arguments that a typeless wrapper cannot pass on ---- */

HOOK(COUNTED, cuIpcOpenEventHandle, (CUevent *event, CUipcEventHandle handle), real(event, handle))
HOOK(COUNTED, cuParamSetf, (CUfunction function, int offset, float value), real(function, offset, value))
HOOK(COUNTED, cuTexRefSetMipmapLevelBias, (CUtexref texture, float bias), real(texture, bias))
HOOK(COUNTED, cuTexRefSetMipmapLevelClamp, (CUtexref texture, float least, float most), real(texture, least, most))
