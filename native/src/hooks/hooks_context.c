/* Contexts: the first one starts the link before it is created, and a context that is destroyed must let the pager leave
 * first. */
#include "hooks/hooks.h"

#include "base/real.h"
#include "hooks/start.h"

/* Records a new context. This calls the driver, so it must be counted as part of the call that made the context. */
static CUresult made(CUresult result, CUcontext context, CUdevice device) {
    if (result != CUDA_SUCCESS || kp_disabled()) return result;
    kp_context_created(device);
    if (context) kp_own_context_seen(context, device);
    return result;
}

/* Records the context that cuCtxCreate has left current. */
static CUresult created(CUresult result) {
    CUdevice device;
    CUcontext context;
    if (result != CUDA_SUCCESS || !kp_real.cuCtxGetDevice || !kp_real.cuCtxGetCurrent) return result;
    if (kp_real.cuCtxGetDevice(&device) != CUDA_SUCCESS) return result;
    return made(result, kp_real.cuCtxGetCurrent(&context) == CUDA_SUCCESS ? context : NULL, device);
}

/* Starts the link outside of the call: the start waits for the daemon, which may close the gate at once. */
#define MAKES_A_CONTEXT(name, params, call)                                                          \
    KP_API CUresult name params {                                                                    \
        DRIVER(name);                                                                                \
        CUresult result;                                                                             \
        kp_context_before_create(device);                                                            \
        GATED(result, call);                                                                         \
        if (result == CUDA_SUCCESS) kp_context_start_link();                                         \
        return result;                                                                               \
    }

HOOK(COUNTED, cuInit, (unsigned flags), real(flags), if (result == CUDA_SUCCESS) kp_driver_initialised())

MAKES_A_CONTEXT(cuCtxCreate_v2, (CUcontext *context, unsigned flags, CUdevice device),
                created(real(context, flags, device)))
MAKES_A_CONTEXT(cuCtxCreate_v3,
                (CUcontext *context, CUexecAffinityParam *params, int count, unsigned flags, CUdevice device),
                created(real(context, params, count, flags, device)))
MAKES_A_CONTEXT(cuCtxCreate_v4, (CUcontext *context, CUctxCreateParams *params, unsigned flags, CUdevice device),
                created(real(context, params, flags, device)))

static CUresult retained(CUresult result, CUcontext *context, CUdevice device) {
    return made(result, result == CUDA_SUCCESS ? *context : NULL, device);
}

MAKES_A_CONTEXT(cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device),
                retained(real(context, device), context, device))
static CUresult made_green(CUresult result, CUgreenCtx *context, CUdevice device) {
    if (result == CUDA_SUCCESS && !kp_disabled()) kp_own_green_seen(*context, device);
    return made(result, NULL, device);
}

MAKES_A_CONTEXT(cuGreenCtxCreate,
                (CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned flags),
                made_green(real(context, resources, device, flags), context, device))

static CUresult enabled(CUresult result, CUcontext peer) {
    return result == CUDA_SUCCESS && kp_owning() ? kp_own_peer_enabled(peer) : result;
}

HOOK(GATED, cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), enabled(real(peer, flags), peer))

/* Not gated, because programs end with these calls. No thread of ours is in the context when it is destroyed. */

HOOK(COUNTED, cuCtxDestroy_v2, (CUcontext context), kp_disabled() ? real(context) : kp_own_context_destroy(context))
HOOK(COUNTED, cuGreenCtxDestroy, (CUgreenCtx context), kp_disabled() ? real(context) : kp_own_green_destroy(context))
HOOK(COUNTED, cuDevicePrimaryCtxRelease_v2, (CUdevice device),
     kp_disabled() ? real(device) : kp_own_primary_release(device))
HOOK(COUNTED, cuDevicePrimaryCtxReset_v2, (CUdevice device),
     kp_disabled() ? real(device) : kp_own_primary_reset(device))
KP_API CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }
KP_API CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }
