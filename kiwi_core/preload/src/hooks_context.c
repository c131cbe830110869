/* Contexts: the first one starts the link, and one that ends must let the pager out first. */
#include "hooks.h"
#include "real.h"

/* cuCtxCreate leaves the new context current. */
static CUresult created(CUresult result) {
    CUdevice device;
    CUcontext context;
    if (result != CUDA_SUCCESS || !kp_real.cuCtxGetDevice || !kp_real.cuCtxGetCurrent) return result;
    if (kp_real.cuCtxGetDevice(&device) != CUDA_SUCCESS) return result;
    kp_context_seen(device);
    if (kp_owning() && kp_real.cuCtxGetCurrent(&context) == CUDA_SUCCESS) kp_own_context_seen(context, device);
    return result;
}

KP_API CUresult cuInit(unsigned flags) {
    DRIVER(cuInit);
    CUresult result = real(flags);
    if (result == CUDA_SUCCESS) kp_driver_initialised();
    return result;
}

KP_API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    DRIVER(cuCtxCreate_v2);
    CUresult result;
    GATED(result, real(context, flags, device));
    return created(result);
}

KP_API CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned flags,
                               CUdevice device) {
    DRIVER(cuCtxCreate_v3);
    CUresult result;
    GATED(result, real(context, params, count, flags, device));
    return created(result);
}

KP_API CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned flags,
                               CUdevice device) {
    DRIVER(cuCtxCreate_v4);
    CUresult result;
    GATED(result, real(context, params, flags, device));
    return created(result);
}

KP_API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    DRIVER(cuDevicePrimaryCtxRetain);
    CUresult result;
    GATED(result, real(context, device));
    if (result != CUDA_SUCCESS) return result;
    kp_context_seen(device);
    if (kp_owning()) kp_own_context_seen(*context, device);
    return result;
}

KP_API CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device,
                                 unsigned flags) {
    DRIVER(cuGreenCtxCreate);
    CUresult result;
    GATED(result, real(context, resources, device, flags));
    if (result == CUDA_SUCCESS) kp_context_seen(device);
    return result;
}

KP_API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    DRIVER(cuCtxEnablePeerAccess);
    CUresult result;
    bool entered = kp_gate_enter();
    result = real(peer, flags);
    if (result == CUDA_SUCCESS && kp_owning()) result = kp_own_peer_enabled(peer);
    kp_gate_leave(entered);
    return result;
}

/* Not gated: the owner leaves the context first, and programs end with these. */

KP_API CUresult cuCtxDestroy_v2(CUcontext context) {
    DRIVER(cuCtxDestroy_v2);
    return kp_owning() ? kp_own_context_destroy(context) : real(context);
}

KP_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    DRIVER(cuDevicePrimaryCtxRelease_v2);
    return kp_owning() ? kp_own_primary_release(device) : real(device);
}

KP_API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    DRIVER(cuDevicePrimaryCtxReset_v2);
    return kp_owning() ? kp_own_primary_reset(device) : real(device);
}

KP_API CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }
KP_API CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }
