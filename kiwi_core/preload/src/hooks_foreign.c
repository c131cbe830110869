/* Calls that give memory which Kiwi cannot own, and their counterparts; and what there is of it now, by address
 * or handle, so that the books fall when it is given back. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

#include "hooks.h"

#define BUCKETS 1024

static struct item {
    struct item *next;
    uint64_t key, bytes;
    enum kp_foreign kind;
} *buckets[BUCKETS];
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

static struct item **bucket_of(uint64_t key) {
    return &buckets[(key * 0x9e3779b97f4a7c15ull) >> 54];
}

void kp_foreign_came(enum kp_foreign kind, uint64_t key, uint64_t bytes) {
    if (kp_disabled()) return;
    struct item *new = malloc(sizeof *new);
    kp_own_seen_foreign(kind, (int64_t)bytes);
    if (!new) return; /* it stays on the books: too much there does no harm */
    struct item **bucket = bucket_of(key);
    pthread_mutex_lock(&mu);
    *new = (struct item){*bucket, key, bytes, kind};
    *bucket = new;
    pthread_mutex_unlock(&mu);
}

void kp_foreign_gone(enum kp_foreign kind, uint64_t key) {
    if (kp_disabled()) return;
    pthread_mutex_lock(&mu);
    struct item **at = bucket_of(key);
    while (*at && ((*at)->key != key || (*at)->kind != kind)) at = &(*at)->next;
    struct item *found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&mu);
    if (!found) return;
    kp_own_seen_foreign(kind, -(int64_t)found->bytes);
    free(found);
}

/* The generated wrappers know no types, so not the owner's names either. */
void kp_wrapped_foreign(int count) {
    static const enum kp_foreign kinds[] = KP_COUNTED;
    kp_own_seen_foreign(kinds[count], 1);
}

/* ---- the calls ---- */

#define EACH(name)                                                                                   \
    KP_API CUresult name(CUdeviceptr *p, size_t bytes, CUstream stream) {                            \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        GATED(result, real(p, bytes, stream));                                                       \
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
        GATED(result, real(p, bytes, pool, stream));                                                 \
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

static uint64_t bytes_3d(const CUDA_ARRAY3D_DESCRIPTOR *d) {
    return array_bytes(d->Width, d->Height, d->Depth, d->Format, d->NumChannels);
}

KP_API CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) {
    DRIVER(cuArrayCreate_v2);
    CUresult result;
    GATED(result, real(array, d));
    if (result == CUDA_SUCCESS)
        kp_foreign_came(KP_FOREIGN_ARRAY, (uintptr_t)*array,
                        array_bytes(d->Width, d->Height, 0, d->Format, d->NumChannels));
    return result;
}

KP_API CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    DRIVER(cuArray3DCreate_v2);
    CUresult result;
    GATED(result, real(array, d));
    if (result == CUDA_SUCCESS) kp_foreign_came(KP_FOREIGN_ARRAY, (uintptr_t)*array, bytes_3d(d));
    return result;
}

KP_API CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d,
                                       unsigned levels) {
    DRIVER(cuMipmappedArrayCreate);
    CUresult result;
    GATED(result, real(array, d, levels));
    if (result == CUDA_SUCCESS) /* all levels together: at most a third more than the first */
        kp_foreign_came(KP_FOREIGN_ARRAY, (uintptr_t)*array, bytes_3d(d) + (levels > 1 ? bytes_3d(d) / 3 : 0));
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
    GATED(result, real(handle, bytes, prop, flags));
    if (result == CUDA_SUCCESS && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        kp_foreign_came(KP_FOREIGN_VMM, *handle, bytes);
    return result;
}

/* The memory goes with its last mapping, which as a rule has been undone by now. */
KP_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    DRIVER(cuMemRelease);
    kp_foreign_gone(KP_FOREIGN_VMM, handle);
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
