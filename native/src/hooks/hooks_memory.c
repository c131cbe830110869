/* Allocation, free and inspection: the owner's functions in place of the driver's. */
#include "hooks/hooks.h"

#include "base/real.h"
#include "owner/foreign.h"
#include "owner/spare.h"

/* Returns the result of an allocation by the driver, which is undone if it took the last memory of the GPU. Records
 * what it took, or would have taken. */
static CUresult driven(CUresult result, const CUdeviceptr *p, size_t bytes) {
    if (result == CUDA_SUCCESS && kp_spare_touched(bytes)) {
        kp_real.cuMemFree_v2(*p);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) kp_driven_added(*p, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) kp_need_lacked(bytes);
    return result;
}

/* A call from inside another (a driver that calls itself through its exported names) goes to the driver. `gate` is GATED or
 * REFUSABLE. */
#define OWNS(gate, name, params, mine, drivers)                                                      \
    HOOK(gate, name, params, entered_ && kp_owning() ? (mine) : (drivers))
OWNS(REFUSABLE, cuMemAlloc_v2, (CUdeviceptr *p, size_t bytes), kp_own_alloc(p, bytes), driven(real(p, bytes), p, bytes))
OWNS(REFUSABLE, cuMemAllocPitch_v2,
     (CUdeviceptr *p, size_t *pitch, size_t width, size_t height, unsigned element),
     kp_own_alloc_pitch(p, pitch, width, height, element),
     driven(real(p, pitch, width, height, element), p, width * height))
OWNS(GATED, cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *size, CUdeviceptr p),
     kp_own_range(base, size, p), real(base, size, p))
OWNS(REFUSABLE, cuPointerGetAttribute, (void *data, CUpointer_attribute attribute, CUdeviceptr p),
     kp_own_pointer_attribute(data, attribute, p), real(data, attribute, p))
OWNS(REFUSABLE, cuPointerGetAttributes,
     (unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr p),
     kp_own_pointer_attributes(count, attributes, data, p), real(count, attributes, data, p))

/* The record goes before the driver may reuse the address. */
static CUresult driven_free(CUresult (*real)(CUdeviceptr), CUdeviceptr p) {
    kp_driven_removed(p);
    return real(p);
}

HOOK(COUNTED, cuMemFree_v2, (CUdeviceptr p), kp_owning() ? kp_own_free(p) : driven_free(real, p), if (result == CUDA_SUCCESS) {
    kp_foreign_removed(KP_FOREIGN_POOL, p);
    kp_foreign_removed(KP_FOREIGN_MANAGED, p);
})
/* Asks the driver, too, so it is a part of the call. */
static CUresult told(CUresult result, const size_t *free_bytes, const size_t *total_bytes) {
    if (result == CUDA_SUCCESS && free_bytes && total_bytes) kp_need_told(*free_bytes, *total_bytes);
    return result;
}

HOOK(COUNTED, cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes),
     told(real(free_bytes, total_bytes), free_bytes, total_bytes))
