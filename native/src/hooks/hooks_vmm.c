/* The program's own virtual memory management. Every call that takes a handle is here, because the program holds names of
 * ours in their place; and every call by which others get at memory past the gate: what they reach stays in the GPU. */
#include <stdlib.h>
#include <string.h>

#include "hooks/hooks.h"

#include "base/real.h"
#include "hooks/roomed.h"
#include "owner/foreign.h"
#include "owner/spare.h"
#include "owner/vmm.h"

/* ---- memory ---- */

static bool is_current(CUdevice device) {
    CUdevice current;
    return kp_real.cuCtxGetDevice(&current) == CUDA_SUCCESS && current == device;
}

/* Returns whether the memory is in a GPU. A locality domain is a part of one. */
static bool in_gpu(const CUmemAllocationProp *prop) {
    enum { LOCALITY_DOMAIN = 6 }; /* CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, which older headers lack */
    return prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE || (int)prop->location.type == LOCALITY_DOMAIN;
}

/* Creates memory that the driver moves. The spare memory is that of the current context's GPU; memory on another GPU is
 * not checked. */
static CUresult create(__typeof__(&cuMemCreate) real, CUmemGenericAllocationHandle *handle, size_t bytes,
                       const CUmemAllocationProp *prop, unsigned long long flags) {
    CUresult result = real(handle, bytes, prop, flags);
    if (result != CUDA_SUCCESS || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return result;
    if (!is_current(prop->location.id) || !kp_spare_touched(bytes)) return result;
    kp_real.cuMemRelease(*handle);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* A call from inside another (a driver that calls itself through its exported names) gets a handle of the driver. */
KP_API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *prop, unsigned long long flags) {
    DRIVER(cuMemCreate);
    CUresult result;
    bool owns = kp_owning() && handle && kp_vmm_owns(prop);
    ROOMED(KP_GATED, result, bytes, prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && kp_here(prop->location.id),
           (owns = owns && entered_) ? kp_vmm_create(handle, bytes, prop, flags)
                                     : create(real, handle, bytes, prop, flags));
    if (!owns && result == CUDA_SUCCESS && in_gpu(prop))
        kp_foreign_added(KP_FOREIGN_VMM, *handle, bytes);
    return result;
}

/* A handle of memory that Kiwi does not own counts as memory that must not be moved: a program can pass it to other
 * processes. */
KP_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    DRIVER(cuMemRetainAllocationHandle);
    CUresult result;
    GATED(result, kp_owning() ? kp_vmm_retain(handle, address) : real(handle, address));
    if (result == CUDA_SUCCESS && !kp_vmm_is_ours(*handle)) kp_foreign_added(KP_FOREIGN_IPC, *handle, 1);
    return result;
}

/* The memory is freed with its last mapping, which as a rule has been undone by now. */
KP_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    DRIVER(cuMemRelease);
    if (!kp_foreign_removed(KP_FOREIGN_IPC, handle)) kp_foreign_removed(KP_FOREIGN_VMM, handle);
    CUresult result;
    COUNTED(result, kp_owning() ? kp_vmm_release(handle) : real(handle));
    return result;
}

HOOK(GATED, cuMemMap,
     (CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),
     kp_owning() ? kp_vmm_map(at, bytes, offset, handle, flags) : real(at, bytes, offset, handle, flags))
HOOK(COUNTED, cuMemUnmap, (CUdeviceptr at, size_t bytes), kp_owning() ? kp_vmm_unmap(at, bytes) : real(at, bytes))
HOOK(GATED, cuMemSetAccess, (CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count),
     kp_owning() ? kp_vmm_access(at, bytes, access, count) : real(at, bytes, access, count))
HOOK(COUNTED, cuMemAddressFree, (CUdeviceptr at, size_t bytes),
     kp_owning() ? kp_vmm_address_free(at, bytes) : real(at, bytes))
HOOK(COUNTED, cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle),
     kp_owning() ? kp_vmm_properties(prop, handle) : real(prop, handle))

/* ---- what others reach ---- */

/* Records, inside the gate, that others reach the memory of a handle, or at an address. */
static CUresult shared(CUresult result, CUmemGenericAllocationHandle handle) {
    if (result == CUDA_SUCCESS && kp_owning()) kp_stays_named(handle);
    return result;
}

static CUresult shared_at(CUresult result, CUdeviceptr at, size_t bytes) {
    if (result == CUDA_SUCCESS && kp_owning()) kp_stays_at(at, bytes);
    return result;
}

/* It is unknown who has the descriptor, and for how long: counted until the program ends. */
HOOK(GATED, cuMemExportToShareableHandle,
     (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags),
     shared(real(shareable, kp_vmm_handle(handle), type, flags), handle),
     if (result == CUDA_SUCCESS) kp_own_seen_foreign(KP_FOREIGN_IPC, 1))
HOOK(GATED, cuMemGetHandleForAddressRange,
     (void *shareable, CUdeviceptr at, size_t bytes, CUmemRangeHandleType type, unsigned long long flags),
     shared_at(real(shareable, at, bytes, type, flags), at, bytes),
     if (result == CUDA_SUCCESS) kp_own_seen_foreign(KP_FOREIGN_IPC, 1))

/* Programs set it for memory that a device will read by itself (peermem, GPUDirect). */
HOOK(GATED, cuPointerSetAttribute, (const void *value, CUpointer_attribute attribute, CUdeviceptr p),
     shared_at(real(value, attribute, p), p, attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && *(const int *)value))

HOOK(GATED, cuMulticastBindMem,
     (CUmemGenericAllocationHandle group, size_t offset, CUmemGenericAllocationHandle handle, size_t from, size_t bytes,
      unsigned long long flags),
     shared(real(group, offset, kp_vmm_handle(handle), from, bytes, flags), handle))
HOOK(GATED, cuMulticastBindAddr,
     (CUmemGenericAllocationHandle group, size_t offset, CUdeviceptr at, size_t bytes, unsigned long long flags),
     shared_at(real(group, offset, at, bytes, flags), at, bytes))
#if CUDA_VERSION >= 13010
HOOK(GATED, cuMulticastBindMem_v2,
     (CUmemGenericAllocationHandle group, CUdevice device, size_t offset, CUmemGenericAllocationHandle handle,
      size_t from, size_t bytes, unsigned long long flags),
     shared(real(group, device, offset, kp_vmm_handle(handle), from, bytes, flags), handle))
HOOK(GATED, cuMulticastBindAddr_v2,
     (CUmemGenericAllocationHandle group, CUdevice device, size_t offset, CUdeviceptr at, size_t bytes,
      unsigned long long flags),
     shared_at(real(group, device, offset, at, bytes, flags), at, bytes))
#endif
#if CUDA_VERSION >= 13030
HOOK(GATED, cuLogicalEndpointBindMem,
     (CUlogicalEndpointId endpoint, CUdevice device, cuuint64_t offset, CUmemGenericAllocationHandle handle,
      cuuint64_t from, cuuint64_t bytes, unsigned long long flags),
     shared(real(endpoint, device, offset, kp_vmm_handle(handle), from, bytes, flags), handle))
HOOK(GATED, cuLogicalEndpointBindAddr,
     (CUlogicalEndpointId endpoint, CUdevice device, cuuint64_t offset, void *at, cuuint64_t bytes,
      unsigned long long flags),
     shared_at(real(endpoint, device, offset, at, bytes, flags), (CUdeviceptr)(uintptr_t)at, bytes))
#endif

/* ---- sparse arrays: a handle in each entry of a list ---- */

static bool has_handle(const CUarrayMapInfo *one) {
    return one->memHandleType == CU_MEM_HANDLE_TYPE_GENERIC && kp_vmm_is_ours(one->memHandle.memHandle);
}

/* The driver keeps the mappings, and nobody could put them back: the memory stays. */
static CUresult map_arrays(__typeof__(&cuMemMapArrayAsync) real, CUarrayMapInfo *list, unsigned count, CUstream stream) {
    bool any = false;
    for (unsigned i = 0; list && i < count; i++) any = any || has_handle(&list[i]);
    if (!kp_owning() || !any) return real(list, count, stream);
    CUarrayMapInfo *drivers = malloc(count * sizeof *drivers);
    if (!drivers) return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(drivers, list, count * sizeof *drivers);
    for (unsigned i = 0; i < count; i++)
        if (has_handle(&list[i])) drivers[i].memHandle.memHandle = kp_vmm_handle(list[i].memHandle.memHandle);
    CUresult result = real(drivers, count, stream);
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        if (has_handle(&list[i])) kp_stays_named(list[i].memHandle.memHandle);
    free(drivers);
    return result;
}

HOOK(GATED, cuMemMapArrayAsync, (CUarrayMapInfo *list, unsigned count, CUstream stream),
     map_arrays(real, list, count, stream))
HOOK(GATED, cuMemMapArrayAsync_ptsz, (CUarrayMapInfo *list, unsigned count, CUstream stream),
     map_arrays(real, list, count, stream))
