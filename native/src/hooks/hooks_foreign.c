/* Calls that allocate memory which Kiwi cannot own, and their counterparts. */
#include "hooks/hooks.h"

#include "base/real.h"
#include "hooks/roomed.h"
#include "owner/foreign.h"

/* Counts memory for a generated wrapper, whose file includes no header with types. */
void kp_wrapped_foreign(int count) {
    static const enum kp_foreign kinds[] = KP_COUNTED;
    kp_own_seen_foreign(kinds[count], 1);
}

/* ---- the calls ---- */

/* Defines the wrapper of an allocating call with the arguments `args`; the memory is recorded by `key`. */
#define CAME(name, params, args, kind, key, bytes)                                                   \
    KP_API CUresult name params {                                                                    \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        ROOMED(KP_GATED | KP_REFUSABLE, result, bytes, kp_current_is_here(), real args);               \
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
