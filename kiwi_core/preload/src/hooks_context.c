/* Contexts: the first one starts the link (before it is made, or after it where memory is owned), and one
 * that ends must let the pager out first. */
#include "hooks.h"
#include "real.h"

/* Asks the driver, so it must be counted as the call that made the context is. */
static CUresult made(CUresult result, CUcontext context, CUdevice device) {
    if (result != CUDA_SUCCESS || kp_disabled()) return result;
    kp_context_seen(device);
    if (context) kp_own_context_seen(context, device);
    return result;
}

/* cuCtxCreate leaves the new context current. */
static CUresult created(CUresult result) {
    CUdevice device;
    CUcontext context;
    if (result != CUDA_SUCCESS || !kp_real.cuCtxGetDevice || !kp_real.cuCtxGetCurrent) return result;
    if (kp_real.cuCtxGetDevice(&device) != CUDA_SUCCESS) return result;
    return made(result, kp_real.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL, device);
}

/* The link starts outside of the call: it waits for the daemon, which may close the gate at once. */
#define MAKES_A_CONTEXT(device, call)                                                                \
    CUresult result;                                                                                 \
    kp_context_wanted(device);                                                                       \
    GATED(result, call);                                                                             \
    if (result == CUDA_SUCCESS) kp_context_told();                                                   \
    return result

KP_API CUresult cuInit(unsigned flags) {
    DRIVER(cuInit);
    CUresult result;
    COUNTED(result, real(flags));
    if (result == CUDA_SUCCESS) kp_driver_initialised();
    return result;
}

KP_API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    DRIVER(cuCtxCreate_v2);
    MAKES_A_CONTEXT(device, created(real(context, flags, device)));
}

KP_API CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned flags,
                               CUdevice device) {
    DRIVER(cuCtxCreate_v3);
    MAKES_A_CONTEXT(device, created(real(context, params, count, flags, device)));
}

KP_API CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned flags,
                               CUdevice device) {
    DRIVER(cuCtxCreate_v4);
    MAKES_A_CONTEXT(device, created(real(context, params, flags, device)));
}

static CUresult retained(CUresult result, CUcontext *context, CUdevice device) {
    return made(result, result == CUDA_SUCCESS ? *context : NULL, device);
}

KP_API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    DRIVER(cuDevicePrimaryCtxRetain);
    MAKES_A_CONTEXT(device, retained(real(context, device), context, device));
}

KP_API CUresult cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device,
                                 unsigned flags) {
    DRIVER(cuGreenCtxCreate);
    /* Synchronising its device's primary context waits for it, too. */
    MAKES_A_CONTEXT(device, made(real(context, resources, device, flags), NULL, device));
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

/* Not gated, for programs end with these. Nobody of ours is in the context any more when it goes. */

KP_API CUresult cuCtxDestroy_v2(CUcontext context) {
    DRIVER(cuCtxDestroy_v2);
    CUresult result;
    COUNTED(result, kp_disabled() ? real(context) : kp_own_context_destroy(context));
    return result;
}

KP_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    DRIVER(cuDevicePrimaryCtxRelease_v2);
    CUresult result;
    COUNTED(result, kp_disabled() ? real(device) : kp_own_primary_release(device));
    return result;
}

KP_API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    DRIVER(cuDevicePrimaryCtxReset_v2);
    CUresult result;
    COUNTED(result, kp_disabled() ? real(device) : kp_own_primary_reset(device));
    return result;
}

KP_API CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }
KP_API CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }
