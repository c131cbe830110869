/* Allocation, free and inspection: the owner's calls in place of the driver's. */
#include "hooks.h"

/* A call from inside another (a driver that reaches itself through its exported names) is the
 * driver's own business. */
#define OWNED(result, mine, drivers)                                                                 \
    do {                                                                                             \
        bool entered_ = kp_gate_enter();                                                             \
        result = entered_ && kp_owning() ? (mine) : (drivers);                                       \
        kp_gate_leave(entered_);                                                                     \
    } while (0)

KP_API CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t bytes) {
    DRIVER(cuMemAlloc_v2);
    CUresult result;
    OWNED(result, kp_own_alloc(p, bytes), real(p, bytes));
    return result;
}

KP_API CUresult cuMemAllocPitch_v2(CUdeviceptr *p, size_t *pitch, size_t width, size_t height,
                                   unsigned element) {
    DRIVER(cuMemAllocPitch_v2);
    CUresult result;
    OWNED(result, kp_own_alloc_pitch(p, pitch, width, height, element),
          real(p, pitch, width, height, element));
    return result;
}

KP_API CUresult cuMemFree_v2(CUdeviceptr p) {
    DRIVER(cuMemFree_v2);
    CUresult result;
    COUNTED(result, kp_owning() ? kp_own_free(p) : real(p));
    if (result == CUDA_SUCCESS) {
        kp_foreign_gone(KP_FOREIGN_POOL, p);
        kp_foreign_gone(KP_FOREIGN_MANAGED, p);
    }
    return result;
}

KP_API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
    DRIVER(cuMemGetAddressRange_v2);
    CUresult result;
    OWNED(result, kp_own_range(base, size, p), real(base, size, p));
    return result;
}

KP_API CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr p) {
    DRIVER(cuPointerGetAttribute);
    CUresult result;
    OWNED(result, kp_own_pointer_attribute(data, attribute, p), real(data, attribute, p));
    return result;
}

KP_API CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data,
                                       CUdeviceptr p) {
    DRIVER(cuPointerGetAttributes);
    CUresult result;
    OWNED(result, kp_own_pointer_attributes(count, attributes, data, p), real(count, attributes, data, p));
    return result;
}

KP_API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    DRIVER(cuMemGetInfo_v2);
    CUresult result;
    COUNTED(result, kp_owning() ? kp_own_mem_info(free_bytes, total_bytes) : real(free_bytes, total_bytes));
    return result;
}
