/* Green contexts: a part of the GPU's multiprocessors with a context of its own. Memory allocated there
 * belongs to the primary context; the streams end with the green context. This is what the header says; how
 * the checkpoint API treats it is untested. */
#include <stdlib.h>

#include "emu.h"

struct CUgreenCtx_st { /* no CUcontext: passing one as a CUcontext is an error */
    CUcontext context;
};

KE_ENTRY(cuGreenCtxCreate, (CUgreenCtx *out, CUdevResourceDesc resources, CUdevice dev, unsigned flags),
         (out, resources, dev, flags)) {
    (void)flags;
    CUcontext primary;
    if (!out || !resources) return CUDA_ERROR_INVALID_VALUE;
    CUresult rc = ke_primary_retain(&primary, dev);
    if (rc != CUDA_SUCCESS) return rc;
    ke_mu_lock();
    CUgreenCtx green = calloc(1, sizeof *green); /* kept for stale handles, as contexts are */
    CUcontext c = green ? ke_context_new((unsigned)dev, primary->flags, false) : NULL;
    rc = c ? ke_stream_new(c, 0, 0, &c->null_stream) : CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS) {
        c->green_of = primary;
        c->alive = true;
        green->context = c;
        *out = green;
    }
    ke_mu_unlock();
    if (rc != CUDA_SUCCESS) ke_primary_release(dev, false);
    return rc;
}

KE_ENTRY(cuGreenCtxDestroy, (CUgreenCtx green), (green)) {
    if (!green) return CUDA_ERROR_INVALID_CONTEXT;
    ke_mu_lock();
    CUresult rc = ke_context_check(green->context);
    ke_mu_unlock();
    if (rc != CUDA_SUCCESS) return rc;
    ke_wait_context(green->context);
    green->context->alive = false; /* this detaches its streams: see ke_stream_resolve */
    return ke_primary_release((CUdevice)green->context->dev, false);
}

KE_ENTRY(cuCtxFromGreenCtx, (CUcontext *out, CUgreenCtx green), (out, green)) {
    if (!out || !green) return CUDA_ERROR_INVALID_VALUE;
    *out = green->context;
    return ke_context_check(green->context);
}

KE_ENTRY(cuGreenCtxStreamCreate, (CUstream *out, CUgreenCtx green, unsigned flags, int priority),
         (out, green, flags, priority)) {
    if (!out || !green || flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    ke_mu_lock();
    CUresult rc = ke_context_check(green->context);
    if (rc == CUDA_SUCCESS) rc = ke_stream_new(green->context, flags, priority, out);
    ke_mu_unlock();
    return rc;
}

/* All of the device's multiprocessors in one piece: splitting them is not emulated. */
struct CUdevResourceDesc_st {
    CUdevResource resource;
};

KE_ENTRY(cuDeviceGetDevResource, (CUdevice dev, CUdevResource *out, CUdevResourceType type), (dev, out, type)) {
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (dev < 0 || (unsigned)dev >= ke.device_count) return CUDA_ERROR_INVALID_DEVICE;
    if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *out = (CUdevResource){.type = type, .sm = {KE_MULTIPROCESSORS, KE_MULTIPROCESSORS, KE_MULTIPROCESSORS, 0, 0}};
    return CUDA_SUCCESS;
}

KE_ENTRY(cuDevResourceGenerateDesc, (CUdevResourceDesc *out, CUdevResource *resources, unsigned count),
         (out, resources, count)) {
    if (!out || !resources || count != 1 || resources->type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_VALUE;
    if (!(*out = calloc(1, sizeof **out))) return CUDA_ERROR_OUT_OF_MEMORY; /* no call frees one */
    (*out)->resource = *resources;
    return CUDA_SUCCESS;
}
